// Re-lays a linear layer's weights for this variant's lanes, and reads single rows back (for embeddings and tests).
// Layout: layout.h. Sources: PackSource in kernels.h; any alignment, any strides between rows and groups.
#include <algorithm>

#include "decl.h"
#include "layout.h"

namespace octavo::OCTAVO_NS {
namespace {

// One channel's place in its panel.
struct Channel {
  uint8_t* panel;
  int lane;
};

inline void put(uint8_t* to, int lane, const uint8_t* from, size_t bytes) { std::memcpy(to + bytes * size_t(lane), from, bytes); }

// The 32 codes from `first` on, or what there is of them in this channel; `from` holds `count` codes.
void put_codes(WeightKind kind, Channel c, uint8_t* unit, int first, int count, const uint8_t* from) {
  if (kind == WeightKind::f8) {
    for (int j = 0; j < count; ++j) unit[(first + j) * kLanes + c.lane] = from[j];
  } else {
    const int steps = has_nibbles(kind) ? count / 8 : count / 4;
    for (int s = 0; s < steps; ++s) std::memcpy(unit + (first / 4 + s) * 4 * kLanes + 4 * c.lane, from + 4 * s, 4);
  }
}

// f8: times 2^8, exact but at the ends of fp32's range.
void put_scale(const PackedW& w, uint8_t* to, int lane, const uint8_t* from) {
  if (w.kind != WeightKind::f8) return put(to, lane, from, w.wide ? 4 : 2);
  float scale;
  std::memcpy(&scale, from, 4);
  scale *= 256.0f;
  std::memcpy(to + 4 * lane, &scale, 4);
}

// One channel of w4, t4, w8 or f8. offsets null: a weight that has minimums or zero points elsewhere gets 0 here.
void pack_grouped(const PackedW& w, const Layout& l, Channel c, const uint8_t* codes, int64_t codes_group, const uint8_t* scales,
                  int64_t scales_group, const uint8_t* offsets, int64_t offsets_group) {
  constexpr uint8_t kZeroHalf[2] = {0, 0};
  const int64_t groups = (w.k + w.group - 1) / w.group;
  const int per_block = l.scales_per_block, unit_codes = std::min<int>(w.group, kGroup);
  const size_t code_bytes = size_t(unit_codes) / (has_nibbles(w.kind) ? 2 : 1), scale_bytes = w.wide ? 4 : 2;
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* block = c.panel + size_t(g / per_block) * l.block_bytes;
    const int part = int(g % per_block);
    for (int64_t u = 0; u < l.units; ++u)
      put_codes(w.kind, c, block + size_t(u) * l.unit_bytes, part * unit_codes, unit_codes,
                codes + g * codes_group + size_t(u) * code_bytes);
    put_scale(w, block + l.scales_at + size_t(part) * kLanes * scale_bytes, c.lane, scales + g * scales_group);
    if (w.offset != Offset::code)
      put(block + l.offsets_at + size_t(part) * kLanes * 2, c.lane, offsets ? offsets + g * offsets_group : kZeroHalf, 2);
  }
}

// f32 and f16: one value per k; bf16: pairs.
void pack_float(WeightKind kind, Channel c, int64_t k, const uint8_t* codes, int64_t stride) {
  if (kind == WeightKind::f32) {
    for (int64_t i = 0; i < k; ++i) std::memcpy(c.panel + (i * kLanes + c.lane) * 4, codes + i * stride, 4);
  } else if (kind == WeightKind::f16) {
    for (int64_t i = 0; i < k; ++i) std::memcpy(c.panel + (i * kLanes + c.lane) * 2, codes + i * stride, 2);
  } else {
    for (int64_t i = 0; i < k; ++i) std::memcpy(c.panel + ((i / 2 * kLanes + c.lane) * 2 + i % 2) * 2, codes + i * stride, 2);
  }
}

bool whole_tile_zeroed(const PackedW& w, int64_t k) { return k == w.k_padded && w.n % kLanes == 0; }

inline float half_at(const uint8_t* p) {
  uint16_t h[kLanes] = {};
  std::memcpy(h, p, 2);
  float out[kLanes];
  store(out, load_f16(h));
  return out[0];
}

// Element e of 32; f8 without its factor of 2^8.
inline float code_at(const PackedW& w, const uint8_t* unit, int e, int lane) {
  if (w.kind == WeightKind::f8) {
    const uint8_t code = unit[e * kLanes + lane];
    const uint16_t half = uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7);
    return half_at(reinterpret_cast<const uint8_t*>(&half));
  }
  if (w.kind == WeightKind::w8) return float(int8_t(unit[(e / 4 * kLanes + lane) * 4 + e % 4]));
  const uint8_t both = unit[(e % 16 / 4 * kLanes + lane) * 4 + e % 4];
  const int code = e < 16 ? both & 15 : both >> 4;
  return float(w.kind == WeightKind::t4 ? w.table[code] : code);
}

}  // namespace

size_t packed_bytes(const PackedW& w) {
  const Layout l = layout_of(w);
  return l.panel_bytes * size_t(l.tiles);
}

// Tiles are divided among the threads, so that no two write to one panel. A tile whose padding must be cleared is cleared by
// the source that holds its first channel; sources are packed in ascending order, one after the other.
void pack(const PackedW& w, const PackSource& source, int64_t first_row, int ith, int nth) {
  const Layout l = layout_of(w);
  const int64_t last_row = first_row + source.rows;
  const int64_t first_tile = first_row / kLanes, tiles = (last_row + kLanes - 1) / kLanes - first_tile;
  const int64_t begin = first_tile + tiles * ith / nth, end = first_tile + tiles * (ith + 1) / nth;
  const bool clear = !whole_tile_zeroed(w, w.k);
  for (int64_t tile = begin; tile < end; ++tile) {
    uint8_t* panel = w.data + size_t(tile) * l.panel_bytes;
    if (clear && tile * kLanes >= first_row) std::memset(panel, 0, l.panel_bytes);
    for (int64_t row = std::max(tile * kLanes, first_row); row < std::min((tile + 1) * kLanes, last_row); ++row) {
      const Channel channel{panel, int(row - tile * kLanes)};
      const int64_t r = row - first_row;
      const uint8_t* codes = source.codes + r * source.codes_row;
      const uint8_t* scales = source.scales ? source.scales + r * source.scales_row : nullptr;
      const uint8_t* offsets = source.offsets ? source.offsets + r * source.offsets_row : nullptr;
      if (w.group) {
        pack_grouped(w, l, channel, codes, source.codes_group, scales, source.scales_group, offsets, source.offsets_group);
      } else {
        pack_float(w.kind, channel, w.k, codes, source.codes_group);
      }
    }
  }
}

void dequant_row(const PackedW& w, int64_t row, float* out) {
  const Layout l = layout_of(w);
  const uint8_t* panel = w.data + size_t(row / kLanes) * l.panel_bytes;
  const int lane = int(row % kLanes);
  if (w.kind == WeightKind::f32) {
    for (int64_t i = 0; i < w.k; ++i) std::memcpy(out + i, panel + (i * kLanes + lane) * 4, 4);
    return;
  }
  if (w.kind == WeightKind::f16) {
    for (int64_t i = 0; i < w.k; ++i) out[i] = half_at(panel + (i * kLanes + lane) * 2);
    return;
  }
  if (w.kind == WeightKind::bf16) {
    for (int64_t i = 0; i < w.k; ++i) {
      uint16_t h;
      std::memcpy(&h, panel + ((i / 2 * kLanes + lane) * 2 + i % 2) * 2, 2);
      out[i] = bf16_to_float(h);
    }
    return;
  }
  for (int64_t first = 0; first < w.k; first += w.group) {
    const int part = int(first / w.group % l.scales_per_block);
    const uint8_t* block = panel + size_t(first / w.group / l.scales_per_block) * l.block_bytes;
    const size_t at = size_t(part) * kLanes + size_t(lane);
    float scale = 0, min = 0;
    if (w.wide)
      std::memcpy(&scale, block + l.scales_at + at * 4, 4);
    else
      scale = half_at(block + l.scales_at + at * 2);
    const float offset = w.offset == Offset::code ? 0.0f : half_at(block + l.offsets_at + at * 2);
    if (w.offset == Offset::min) min = offset;
    const float zero_point = w.offset == Offset::zero ? offset : w.kind == WeightKind::w4 && w.offset == Offset::code ? 8.0f : 0.0f;
    for (int64_t j = 0; j < w.group && first + j < w.k; ++j) {
      const int e = int((part * w.group + j) % kGroup);
      const uint8_t* unit = block + size_t(j / kGroup) * l.unit_bytes;
      out[first + j] = (code_at(w, unit, e, lane) - zero_point) * scale + min;
    }
  }
}

}  // namespace octavo::OCTAVO_NS
