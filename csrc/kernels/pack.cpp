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

// The min of sources that have none, in a weight where others do.
constexpr uint8_t kZeroHalf[2] = {0, 0};

inline void put_half(uint8_t* to, int lane, const uint8_t* from) { std::memcpy(to + 2 * lane, from, 2); }

void pack_w4(const Layout& l, Channel c, const uint8_t* codes, int64_t codes_group, const uint8_t* scales, int64_t scales_group,
             const uint8_t* mins, int64_t mins_group) {
  for (int64_t g = 0; g < l.groups; ++g) {
    uint8_t* to = c.panel + size_t(g) * l.group_bytes;
    const uint8_t* from = codes + g * codes_group;
    for (int s = 0; s < 4; ++s) std::memcpy(to + s * 4 * kLanes + 4 * c.lane, from + 4 * s, 4);
    put_half(to + l.scales_at, c.lane, scales + g * scales_group);
    if (l.group_bytes > l.mins_at) put_half(to + l.mins_at, c.lane, mins ? mins + g * mins_group : kZeroHalf);
  }
}

void pack_w8(const Layout& l, Channel c, int group, int64_t source_groups, const uint8_t* codes, int64_t codes_group, const uint8_t* scales,
             int64_t scales_group, const uint8_t* mins, int64_t mins_group) {
  for (int64_t g = 0; g < source_groups; ++g) {
    const int64_t first = g * group;
    const int part = int(first % kGroup) / group;
    uint8_t* to = c.panel + size_t(first / kGroup) * l.group_bytes;
    const uint8_t* from = codes + g * codes_group;
    for (int s = 0; s < group / 4; ++s) std::memcpy(to + (part * group / 4 + s) * 4 * kLanes + 4 * c.lane, from + 4 * s, 4);
    put_half(to + l.scales_at + size_t(part) * kLanes * 2, c.lane, scales + g * scales_group);
    if (l.group_bytes > l.mins_at) put_half(to + l.mins_at + size_t(part) * kLanes * 2, c.lane, mins ? mins + g * mins_group : kZeroHalf);
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

}  // namespace

size_t packed_bytes(WeightKind kind, int64_t n, int64_t k, int group, bool has_mins) {
  const Layout l = layout_of(kind, n, pad_k(k), group, has_mins);
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
      const uint8_t* mins = source.mins ? source.mins + r * source.mins_row : nullptr;
      if (w.kind == WeightKind::w4) {
        pack_w4(l, channel, codes, source.codes_group, scales, source.scales_group, mins, source.mins_group);
      } else if (w.kind == WeightKind::w8) {
        pack_w8(l, channel, w.group, (w.k + w.group - 1) / w.group, codes, source.codes_group, scales, source.scales_group, mins,
                source.mins_group);
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
  const int group = w.kind == WeightKind::w4 ? kGroup : w.group;
  for (int64_t first = 0; first < w.k; first += group) {
    const uint8_t* from = panel + size_t(first / kGroup) * l.group_bytes;
    const int offset = int(first % kGroup), part = offset / group;
    const float scale = half_at(from + l.scales_at + (size_t(part) * kLanes + size_t(lane)) * 2);
    const float min = w.has_mins ? half_at(from + l.mins_at + (size_t(part) * kLanes + size_t(lane)) * 2) : 0.0f;
    for (int j = 0; j < group && first + j < w.k; ++j) {
      const int e = offset + j;
      int code;
      if (w.kind == WeightKind::w8) {
        code = int8_t(from[(e / 4 * kLanes + lane) * 4 + e % 4]);
      } else {
        const uint8_t both = from[(e % 16 / 4 * kLanes + lane) * 4 + e % 4];
        code = e < 16 ? both & 15 : both >> 4;
      }
      out[first + j] = float(code) * scale + min;
    }
  }
}

}  // namespace octavo::OCTAVO_NS
