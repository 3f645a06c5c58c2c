// Linear layer with 8-bit weights and int8 activations.
// acc = fma(sx * sw, float(dot), acc), then fma(sx * min, float(sum of q), acc), over the weights' groups (16 or 32) in
// ascending order; the dots are exact integers. y may alias residual, nothing else.
#include "linear.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int kTileRows = kRegisters == 32 ? 6 : 4;
constexpr int kTileCols = 2;  // panels side by side: an activation is loaded once for both

struct Rows {
  const int8_t* q;
  const float* scale;
  const int32_t* sums;              // of q over each of the weights' groups
  int64_t k_padded, groups, parts;  // groups of 32; parts: the weights' groups
};

template <int NT>
struct Panels {
  const uint8_t* panel[NT];
  size_t group_bytes, scales_at, mins_at;
  inline const uint8_t* group(int t, int64_t g) const { return panel[t] + size_t(g) * group_bytes; }
  inline F half(int t, int64_t g, int part, size_t at) const {
    return load_f16(reinterpret_cast<const uint16_t*>(group(t, g) + at) + part * kLanes);
  }
};

// kParts: the weights' groups per 32 inputs, 1 or 2.
template <int MR, int NT, int kParts, bool kMins>
OCTAVO_TILE void tile(const Panels<NT>& w, Rows x, Ahead ahead, float* acc) {
  constexpr int kSteps = 8 / kParts;
  F sum[MR][NT];
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) sum[r][t] = zero();
  for (int64_t g = 0; g < x.groups; ++g) {
    ahead.ask(g);
    for (int part = 0; part < kParts; ++part) {
      I dot[MR][NT];
      for (int r = 0; r < MR; ++r)
        for (int t = 0; t < NT; ++t) dot[r][t] = dot8_start(x.sums[r * x.parts + g * kParts + part]);
#pragma GCC unroll 8
      for (int s = part * kSteps; s < (part + 1) * kSteps; ++s) {
        W8 codes[NT];
        for (int t = 0; t < NT; ++t) codes[t] = prepare8(load_b(w.group(t, g) + s * 4 * kLanes));
        for (int r = 0; r < MR; ++r) {
          const B q = dup4(x.q + r * x.k_padded + g * kGroup + 4 * s);
          for (int t = 0; t < NT; ++t) dot[r][t] = dot8(dot[r][t], codes[t], q);
        }
      }
      F scale[NT], min[NT];
      for (int t = 0; t < NT; ++t) {
        scale[t] = w.half(t, g, part, w.scales_at);
        min[t] = kMins ? w.half(t, g, part, w.mins_at) : zero();
      }
      for (int r = 0; r < MR; ++r) {
        const F x_scale = set1(x.scale[r * x.groups + g]);
        for (int t = 0; t < NT; ++t) {
          sum[r][t] = fma(mul(x_scale, scale[t]), to_float(dot[r][t]), sum[r][t]);
          if (kMins) sum[r][t] = fma(mul(x_scale, min[t]), set1(float(x.sums[r * x.parts + g * kParts + part])), sum[r][t]);
        }
      }
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) store(acc + r * kAccRow + t * kLanes, sum[r][t]);
}

template <int kParts, bool kMins>
class W8Kernel {
 public:
  W8Kernel(const LinearArgs& a, const Layout& l, Arena& arena)
      : a_(a), l_(l), parts_(l.groups * kParts), sums_(arena.take<int32_t>(size_t(kMaxChunk) * size_t(parts_))) {}
  int64_t chunk_rows() const { return rows_in_cache(size_t(a_.w->k_padded), kTileRows); }

  // Sums per weight group as integers: what corrects unsigned products, and what multiplies the mins.
  void start(int64_t row, int64_t rows) {
    first_row_ = row;
    for (int64_t i = 0; i < rows; ++i) {
      int32_t* to = sums_ + i * parts_;
      if (kParts == 1) {
        const float* from = a_.xq.sum + (row + i) * l_.groups;
        for (int64_t g = 0; g < l_.groups; ++g) to[g] = int32_t(from[g]);
        continue;
      }
      const int8_t* q = a_.xq.q + (row + i) * a_.w->k_padded;
      for (int64_t p = 0; p < parts_; ++p) {
        int32_t total = 0;
        for (int j = 0; j < kGroup / kParts; ++j) total += q[p * (kGroup / kParts) + j];
        to[p] = total;
      }
    }
  }

  void run(const uint8_t* const* panels, int count, int64_t row, int64_t rows, float* acc) {
    if (rows == 1) {  // bound by memory, which is fastest as one stream: panel after panel, not side by side
      for (int t = 0; t < count; ++t)
        tile<1, 1, kParts, kMins>(bind<1>(panels + t), rows_at(row), ahead_in_stream(panels[t], l_), acc + t * kLanes);
      return;
    }
    for (int t = 0; t < count; t += kTileCols)
      with_rows<kTileCols>(count - t, [&](auto nt) { columns<nt.value>(panels + t, row, rows, acc + t * kLanes); });
  }

 private:
  Rows rows_at(int64_t row) const {
    const int64_t k = a_.w->k_padded;
    return {a_.xq.q + row * k, a_.xq.scale + row * l_.groups, sums_ + (row - first_row_) * parts_, k, l_.groups, parts_};
  }
  template <int NT>
  Panels<NT> bind(const uint8_t* const* panels) const {
    Panels<NT> w;
    std::copy(panels, panels + NT, w.panel);
    w.group_bytes = l_.group_bytes;
    w.scales_at = l_.scales_at;
    w.mins_at = l_.mins_at;
    return w;
  }
  template <int NT>
  void columns(const uint8_t* const* panels, int64_t row, int64_t rows, float* acc) {
    const Panels<NT> w = bind<NT>(panels);
    Ahead ahead = ahead_by_panels(panels[0], NT, l_);
    for (int64_t i = 0, count; i < rows; i += count, ahead = Ahead{}) {
      count = tile_rows(rows - i, kTileRows);
      with_rows<kTileRows>(count, [&](auto mr) { tile<mr.value, NT, kParts, kMins>(w, rows_at(row + i), ahead, acc + i * kAccRow); });
    }
  }

  const LinearArgs& a_;
  const Layout& l_;
  const int64_t parts_;
  int32_t* sums_;
  int64_t first_row_ = 0;
};

}  // namespace

size_t linear_w8_scratch(int64_t k) { return kAccBytes + size_t(kMaxChunk) * size_t(pad_k(k) / 16) * 4 + kArenaSlack; }

void linear_w8(const LinearArgs& args, int ith, int nth) {
  if (args.w->group == 16)
    args.w->has_mins ? run_linear<W8Kernel<2, true>>(args, ith, nth) : run_linear<W8Kernel<2, false>>(args, ith, nth);
  else
    args.w->has_mins ? run_linear<W8Kernel<1, true>>(args, ith, nth) : run_linear<W8Kernel<1, false>>(args, ith, nth);
}

}  // namespace octavo::OCTAVO_NS
