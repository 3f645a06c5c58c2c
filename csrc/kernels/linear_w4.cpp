// Linear layer with 4-bit weights and int8 activations.
// acc = fma(sx * sw, float(dot), acc), then fma(sx * min, float(sum of q), acc), over groups of 32 in ascending order; the
// dots are exact integers, so tiles only choose which elements share loads. y may alias residual, nothing else.
#include "linear.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int kTileRows = kRegisters == 32 ? 6 : 4;
constexpr int kTileCols = 2;         // panels side by side: an activation is loaded once for both
constexpr int64_t kExpandFrom = 20;  // rows from which it pays to expand panels once, not nibble by nibble per row tile

// The quantised rows of one tile.
struct Rows {
  const int8_t* q;
  const float* scale;
  const float* sum;
  int64_t k_padded, groups;
};

// Panels as they lie in memory.
template <int NT>
struct Nibbles {
  const uint8_t* panel[NT];
  size_t group_bytes, scales_at, mins_at;
  inline void codes(int t, int64_t g, int s, B& low, B& high) const {
    const B both = load_b(panel[t] + size_t(g) * group_bytes + size_t(s) * 4 * kLanes);
    low = low4(both);
    high = high4(both);
  }
  inline F scale(int t, int64_t g) const { return half(t, g, scales_at); }
  inline F min(int t, int64_t g) const { return half(t, g, mins_at); }

 private:
  inline F half(int t, int64_t g, size_t at) const {
    return load_f16(reinterpret_cast<const uint16_t*>(panel[t] + size_t(g) * group_bytes + at));
  }
};

// Panels unpacked into scratch: per group [panel][8 steps][4 * kLanes] bytes (low and high of each pair in turn), then
// float scales [panel][kLanes] and mins.
template <int NT>
struct Expanded {
  static constexpr size_t kCodes = size_t(8) * 4 * kLanes;  // of one panel
  static constexpr size_t kScales = size_t(4) * kLanes;
  static constexpr size_t kGroupBytes = NT * (kCodes + 2 * kScales);
  const uint8_t* base;
  inline void codes(int t, int64_t g, int s, B& low, B& high) const {
    const uint8_t* p = base + size_t(g) * kGroupBytes + t * kCodes + size_t(s) * 8 * kLanes;
    low = load_b(p);
    high = load_b(p + 4 * kLanes);
  }
  inline F scale(int t, int64_t g) const { return at(t, g, 0); }
  inline F min(int t, int64_t g) const { return at(t, g, NT * kScales); }

 private:
  inline F at(int t, int64_t g, size_t offset) const {
    return load(reinterpret_cast<const float*>(base + size_t(g) * kGroupBytes + NT * kCodes + offset + t * kScales));
  }
};

inline void store_b(uint8_t* p, B b) { std::memcpy(p, &b, sizeof b); }

template <int NT, bool kMins>
void expand(const Nibbles<NT>& from, int64_t groups, uint8_t* to) {
  using E = Expanded<NT>;
  for (int64_t g = 0; g < groups; ++g, to += E::kGroupBytes) {
    float* scales = reinterpret_cast<float*>(to + NT * E::kCodes);
    for (int t = 0; t < NT; ++t) {
      for (int s = 0; s < 4; ++s) {
        B low, high;
        from.codes(t, g, s, low, high);
        store_b(to + t * E::kCodes + s * 8 * kLanes, low);
        store_b(to + t * E::kCodes + s * 8 * kLanes + 4 * kLanes, high);
      }
      store(scales + t * kLanes, from.scale(t, g));
      if (kMins) store(scales + (NT + t) * kLanes, from.min(t, g));
    }
  }
}

template <int MR, int NT, bool kMins, class Source>
OCTAVO_TILE void tile(const Source& w, Rows x, Ahead ahead, float* acc) {
  F sum[MR][NT];
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) sum[r][t] = zero();
  for (int64_t g = 0; g < x.groups; ++g) {
    ahead.ask(g);
    D dot[MR][NT];
    for (int r = 0; r < MR; ++r)
      for (int t = 0; t < NT; ++t) dot[r][t] = dot4_zero();
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      B low[NT], high[NT];
      for (int t = 0; t < NT; ++t) w.codes(t, g, s, low[t], high[t]);
      for (int r = 0; r < MR; ++r) {
        const int8_t* q = x.q + r * x.k_padded + g * kGroup + 4 * s;
        const B x_low = dup4(q), x_high = dup4(q + 16);
        for (int t = 0; t < NT; ++t) dot[r][t] = dot4(dot[r][t], low[t], x_low);
        for (int t = 0; t < NT; ++t) dot[r][t] = dot4(dot[r][t], high[t], x_high);
      }
    }
    F scale[NT], min[NT];
    for (int t = 0; t < NT; ++t) {
      scale[t] = w.scale(t, g);
      min[t] = kMins ? w.min(t, g) : zero();
    }
    for (int r = 0; r < MR; ++r) {
      const F x_scale = set1(x.scale[r * x.groups + g]), x_sum = set1(x.sum[r * x.groups + g]);
      for (int t = 0; t < NT; ++t) {
        sum[r][t] = fma(mul(x_scale, scale[t]), to_float(dot4_sum(dot[r][t])), sum[r][t]);
        if (kMins) sum[r][t] = fma(mul(x_scale, min[t]), x_sum, sum[r][t]);
      }
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) store(acc + r * kAccRow + t * kLanes, sum[r][t]);
}

template <bool kMins>
class W4 {
 public:
  W4(const LinearArgs& a, const Layout& l, Arena& arena)
      : a_(a), l_(l), scratch_(arena.take<uint8_t>(Expanded<kTileCols>::kGroupBytes * size_t(l.groups))) {}
  int64_t chunk_rows() const { return rows_in_cache(size_t(a_.w->k_padded), kTileRows); }
  void start(int64_t, int64_t) {}

  void run(const uint8_t* const* panels, int count, int64_t row, int64_t rows, float* acc) {
    if (rows == 1) {  // bound by memory, which is fastest as one stream: panel after panel, not side by side
      for (int t = 0; t < count; ++t)
        tile<1, 1, kMins>(nibbles<1>(panels + t), rows_at(row), ahead_in_stream(panels[t], l_), acc + t * kLanes);
      return;
    }
    for (int t = 0; t < count; t += kTileCols)
      with_rows<kTileCols>(count - t, [&](auto nt) { columns<nt.value>(panels + t, row, rows, acc + t * kLanes); });
  }

 private:
  Rows rows_at(int64_t row) const {
    const int64_t k = a_.w->k_padded;
    return {a_.xq.q + row * k, a_.xq.scale + row * l_.groups, a_.xq.sum + row * l_.groups, k, l_.groups};
  }
  template <int NT>
  Nibbles<NT> nibbles(const uint8_t* const* panels) const {
    Nibbles<NT> w;
    std::copy(panels, panels + NT, w.panel);
    w.group_bytes = l_.group_bytes;
    w.scales_at = l_.scales_at;
    w.mins_at = l_.mins_at;
    return w;
  }
  template <int NT>
  void columns(const uint8_t* const* panels, int64_t row, int64_t rows, float* acc) {
    const Nibbles<NT> w = nibbles<NT>(panels);
    const Ahead ahead = ahead_by_panels(panels[0], NT, l_);
    if (rows < kExpandFrom) return row_tiles<NT>(w, row, rows, ahead, acc);
    expand<NT, kMins>(w, l_.groups, scratch_);
    row_tiles<NT>(Expanded<NT>{scratch_}, row, rows, ahead, acc);
  }
  template <int NT, class Source>
  void row_tiles(const Source& w, int64_t row, int64_t rows, Ahead ahead, float* acc) {
    for (int64_t i = 0, count; i < rows; i += count, ahead = Ahead{}) {
      count = tile_rows(rows - i, kTileRows);
      with_rows<kTileRows>(count, [&](auto mr) { tile<mr.value, NT, kMins>(w, rows_at(row + i), ahead, acc + i * kAccRow); });
    }
  }

  const LinearArgs& a_;
  const Layout& l_;
  uint8_t* scratch_;
};

}  // namespace

size_t linear_w4_scratch(int64_t k) { return kAccBytes + Expanded<kTileCols>::kGroupBytes * size_t(pad_k(k) / kGroup) + kArenaSlack; }

void linear_w4(const LinearArgs& args, int ith, int nth) {
  args.w->has_mins ? run_linear<W4<true>>(args, ith, nth) : run_linear<W4<false>>(args, ith, nth);
}

}  // namespace octavo::OCTAVO_NS
