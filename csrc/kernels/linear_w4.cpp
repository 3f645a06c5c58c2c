// Linear layer with 4-bit weights and int8 activations. The order of additions is kernels.h's: the dots are exact integers, so tiles
// only choose which elements share loads. y may alias residual, nothing else.
#include "linear.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int kTileRows = kRegisters == 32 ? 6 : 4;
constexpr int kTileCols = 2;         // panels side by side: an activation is loaded once for both
constexpr int64_t kExpandFrom = 20;  // rows from which it pays to expand panels once, not nibble by nibble per row tile

// The quantised rows of one tile. sum: per block of inputs that share scales, what multiplies the minimum, or where the products begin.
struct Rows {
  const int8_t* q;
  const float* scale;
  const float* sum;
  int64_t k_padded, groups, blocks, units;
};

// Panels as they lie in memory. kPlain: fp16 scales, and minimums if any.
template <int NT, bool kPlain>
struct Nibbles {
  const uint8_t* panel[NT];
  size_t block_bytes, unit_bytes, scales_at, offsets_at;
  bool wide, zeros;
  inline void codes(int t, int64_t b, int64_t u, int s, B& low, B& high) const {
    const B both = load_b(block(t, b) + size_t(u) * unit_bytes + size_t(s) * 4 * kLanes);
    low = low4(both);
    high = high4(both);
  }
  inline F scale(int t, int64_t b) const {
    if (!kPlain && wide) return load(reinterpret_cast<const float*>(block(t, b) + scales_at));
    return load_f16(reinterpret_cast<const uint16_t*>(block(t, b) + scales_at));
  }
  inline F min(int t, int64_t b) const {
    const F offset = load_f16(reinterpret_cast<const uint16_t*>(block(t, b) + offsets_at));
    return !kPlain && zeros ? neg(mul(offset, scale(t, b))) : offset;
  }

 private:
  inline const uint8_t* block(int t, int64_t b) const { return panel[t] + size_t(b) * block_bytes; }
};

// Panels unpacked into scratch: per block for each of its units [panel][8 steps][4 * kLanes] bytes (low and high of each pair in turn),
// then float scales [panel][kLanes] and minimums.
template <int NT>
struct Expanded {
  static constexpr size_t kCodes = size_t(8) * 4 * kLanes;  // of one panel
  static constexpr size_t kScales = size_t(4) * kLanes;
  static constexpr size_t kGroupBytes = NT * (kCodes + 2 * kScales);  // of 32 inputs, at most
  const uint8_t* base;
  int64_t units;
  inline void codes(int t, int64_t b, int64_t u, int s, B& low, B& high) const {
    const uint8_t* p = block(b) + size_t(u) * NT * kCodes + t * kCodes + size_t(s) * 8 * kLanes;
    low = load_b(p);
    high = load_b(p + 4 * kLanes);
  }
  inline F scale(int t, int64_t b) const { return at(t, b, 0); }
  inline F min(int t, int64_t b) const { return at(t, b, NT * kScales); }
  inline const uint8_t* block(int64_t b) const { return base + size_t(b) * (size_t(units) * NT * kCodes + 2 * NT * kScales); }

 private:
  inline F at(int t, int64_t b, size_t offset) const {
    return load(reinterpret_cast<const float*>(block(b) + size_t(units) * NT * kCodes + offset + t * kScales));
  }
};

inline void store_b(uint8_t* p, B b) { std::memcpy(p, &b, sizeof b); }

template <int NT, bool kMins, class Source>
void expand(const Source& from, int64_t blocks, int64_t units, uint8_t* scratch) {
  using E = Expanded<NT>;
  const E out{scratch, units};
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t* to = scratch + (out.block(b) - scratch);
    for (int64_t u = 0; u < units; ++u) {
      for (int t = 0; t < NT; ++t, to += E::kCodes) {
        for (int s = 0; s < 4; ++s) {
          B low, high;
          from.codes(t, b, u, s, low, high);
          store_b(to + s * 8 * kLanes, low);
          store_b(to + s * 8 * kLanes + 4 * kLanes, high);
        }
      }
    }
    float* scales = reinterpret_cast<float*>(to);
    for (int t = 0; t < NT; ++t) {
      store(scales + t * kLanes, from.scale(t, b));
      if (kMins) store(scales + (NT + t) * kLanes, from.min(t, b));
    }
  }
}

// Exact integer products of the rows' 32 inputs g with unit u of block b.
template <int MR, int NT, class Source>
inline void dots(const Source& w, const Rows& x, int64_t b, int64_t u, int64_t g, D (&dot)[MR][NT]) {
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) dot[r][t] = dot4_zero();
#pragma GCC unroll 4
  for (int s = 0; s < 4; ++s) {
    B low[NT], high[NT];
    for (int t = 0; t < NT; ++t) w.codes(t, b, u, s, low[t], high[t]);
    for (int r = 0; r < MR; ++r) {
      const int8_t* q = x.q + r * x.k_padded + g * kGroup + 4 * s;
      const B x_low = dup4(q), x_high = dup4(q + 16);
      for (int t = 0; t < NT; ++t) dot[r][t] = dot4(dot[r][t], low[t], x_low);
      for (int t = 0; t < NT; ++t) dot[r][t] = dot4(dot[r][t], high[t], x_high);
    }
  }
}

// kOne: a block is 32 inputs. Without minimums codes count from -8: products begin at -8 times the sum.
template <int MR, int NT, bool kMins, bool kOne, class Source>
OCTAVO_TILE void tile(const Source& w, Rows x, Ahead ahead, float* acc) {
  F sum[MR][NT];
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) sum[r][t] = zero();
  for (int64_t b = 0, g = 0; b < x.blocks; ++b) {
    F part[MR][NT];
    D dot[MR][NT];
    if constexpr (kOne) {
      ahead.ask(b);
      dots<MR, NT>(w, x, b, 0, b, dot);
    } else {
      for (int r = 0; r < MR; ++r)
        for (int t = 0; t < NT; ++t) part[r][t] = kMins ? zero() : set1(x.sum[r * x.blocks + b]);
      for (int64_t u = 0; u < x.units; ++u, ++g) {
        ahead.ask(g);
        dots<MR, NT>(w, x, b, u, g, dot);
        for (int r = 0; r < MR; ++r) {
          const F x_scale = set1(x.scale[r * x.groups + g]);
          for (int t = 0; t < NT; ++t) part[r][t] = fma(x_scale, to_float(dot4_sum(dot[r][t])), part[r][t]);
        }
      }
    }
    F scale[NT], min[NT];
    for (int t = 0; t < NT; ++t) {
      scale[t] = w.scale(t, b);
      min[t] = kMins ? w.min(t, b) : zero();
    }
    for (int r = 0; r < MR; ++r) {
      const F x_sum = set1(x.sum[r * x.blocks + b]);
      if constexpr (kOne) {
        const F x_scale = set1(x.scale[r * x.groups + b]);
        for (int t = 0; t < NT; ++t) {
          const F product = to_float(dot4_sum(dot[r][t]));
          part[r][t] = kMins ? mul(x_scale, product) : fma(x_scale, product, x_sum);
        }
      }
      for (int t = 0; t < NT; ++t) {
        sum[r][t] = fma(scale[t], part[r][t], sum[r][t]);
        if (kMins) sum[r][t] = fma(min[t], x_sum, sum[r][t]);
      }
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) store(acc + r * kAccRow + t * kLanes, sum[r][t]);
}

// kPlain: groups of 32, fp16 scales, minimums or none: what is commonest has loops of its own.
template <bool kMins, bool kPlain>
class W4 {
 public:
  W4(const LinearArgs& a, const Layout& l, Arena& arena)
      : a_(a),
        l_(l),
        scratch_(arena.take<uint8_t>(Expanded<kTileCols>::kGroupBytes * size_t(l.groups))),
        sums_(arena.take<float>(size_t(kMaxChunk) * size_t(l.blocks))) {}
  int64_t chunk_rows() const { return rows_in_cache(size_t(a_.w->k_padded), kTileRows); }

  void start(int64_t row, int64_t rows) {
    first_row_ = row;
    for (int64_t i = 0; i < rows; ++i)
      block_sums(a_.xq.scale + (row + i) * l_.groups, a_.xq.sum + (row + i) * l_.groups, l_.blocks, l_.units, kMins ? 1.0f : -8.0f,
                 sums_ + i * l_.blocks);
  }

  void run(const uint8_t* const* panels, int count, int64_t row, int64_t rows, float* acc) {
    if (rows == 1) {  // bound by memory, which is fastest as one stream: panel after panel, not side by side
      for (int t = 0; t < count; ++t)
        tile<1, 1, kMins, kPlain>(nibbles<1>(panels + t), rows_at(row), ahead_in_stream(panels[t], l_), acc + t * kLanes);
      return;
    }
    for (int t = 0; t < count; t += kTileCols)
      with_rows<kTileCols>(count - t, [&](auto nt) { columns<nt.value>(panels + t, row, rows, acc + t * kLanes); });
  }

 private:
  Rows rows_at(int64_t row) const {
    const int64_t k = a_.w->k_padded;
    return {a_.xq.q + row * k, a_.xq.scale + row * l_.groups, sums_ + (row - first_row_) * l_.blocks, k, l_.groups, l_.blocks, l_.units};
  }
  template <int NT>
  Nibbles<NT, kPlain> nibbles(const uint8_t* const* panels) const {
    Nibbles<NT, kPlain> w;
    std::copy(panels, panels + NT, w.panel);
    w.block_bytes = l_.block_bytes;
    w.unit_bytes = l_.unit_bytes;
    w.scales_at = l_.scales_at;
    w.offsets_at = l_.offsets_at;
    w.wide = a_.w->wide;
    w.zeros = a_.w->offset == Offset::zero;
    return w;
  }
  template <int NT>
  void columns(const uint8_t* const* panels, int64_t row, int64_t rows, float* acc) {
    const Nibbles<NT, kPlain> w = nibbles<NT>(panels);
    const Ahead ahead = ahead_by_panels(panels[0], NT, l_);
    if (rows < kExpandFrom) return row_tiles<NT>(w, row, rows, ahead, acc);
    expand<NT, kMins>(w, l_.blocks, l_.units, scratch_);
    row_tiles<NT>(Expanded<NT>{scratch_, l_.units}, row, rows, ahead, acc);
  }
  template <int NT, class Source>
  void row_tiles(const Source& w, int64_t row, int64_t rows, Ahead ahead, float* acc) {
    for (int64_t i = 0, count; i < rows; i += count, ahead = Ahead{}) {
      count = tile_rows(rows - i, kTileRows);
      with_rows<kTileRows>(count, [&](auto mr) { tile<mr.value, NT, kMins, kPlain>(w, rows_at(row + i), ahead, acc + i * kAccRow); });
    }
  }

  const LinearArgs& a_;
  const Layout& l_;
  uint8_t* scratch_;
  float* sums_;
  int64_t first_row_ = 0;
};

}  // namespace

size_t linear_w4_scratch(int64_t k) {
  const size_t groups = size_t(pad_k(k) / kGroup);
  return kAccBytes + (Expanded<kTileCols>::kGroupBytes + size_t(kMaxChunk) * 4) * groups + kArenaSlack;
}

void linear_w4(const LinearArgs& args, int ith, int nth) {
  const PackedW& w = *args.w;
  const bool plain = w.group == kGroup && !w.wide && w.offset != Offset::zero;
  if (w.offset == Offset::code)
    plain ? run_linear<W4<false, true>>(args, ith, nth) : run_linear<W4<false, false>>(args, ith, nth);
  else
    plain ? run_linear<W4<true, true>>(args, ith, nth) : run_linear<W4<true, false>>(args, ith, nth);
}

}  // namespace octavo::OCTAVO_NS
