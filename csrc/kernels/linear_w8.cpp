// Linear layer with 8-bit weights, or 4-bit codes of 8-bit numbers (t4), and int8 activations. The order of additions is kernels.h's; the
// dots are exact integers. y may alias residual, nothing else.
#include "linear.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int kTileRows = kRegisters == 32 ? 6 : 4;
constexpr int kTileCols = 2;                                             // panels side by side: an activation is loaded once for both
constexpr int64_t kExpandFrom = 20;                                      // rows from which it pays to look codes up once, not per row tile
constexpr size_t kExpanded = size_t(kTileCols) * kLanes * (kGroup + 4);  // bytes of 32 inputs looked up, fp32 scales included

// The quantised rows of one tile.
struct Rows {
  const int8_t* q;
  const float* scale;
  const int32_t* sums;      // of q over each 32 inputs, or each 16 where weights have groups of 16
  const float* block_sums;  // per scale of the weights, what multiplies the minimum
  int64_t k_padded, groups, parts, scales, blocks, units;
};

// How a weight's scales lie over its inputs.
enum class Spread { half, one, many };  // a scale per 16 inputs, per 32, per more

template <int NT, Spread kSpread>
struct Panels {
  const uint8_t* panel[NT];
  size_t block_bytes, unit_bytes, scales_at, offsets_at;
  bool wide, zeros;
  // Step s of eight, and the first of the four inputs that it multiplies.
  inline B numbers(int t, int64_t b, int64_t u, int s) const { return load_b(unit(t, b, u) + s * 4 * kLanes); }
  static constexpr int input(int s) { return 4 * s; }

  inline const uint8_t* unit(int t, int64_t b, int64_t u) const { return block(t, b) + size_t(u) * unit_bytes; }
  inline const uint8_t* block(int t, int64_t b) const { return panel[t] + size_t(b) * block_bytes; }
  inline F scale(int t, int64_t b, int part) const {
    if (kSpread == Spread::many && wide) return load(reinterpret_cast<const float*>(block(t, b) + scales_at));
    return half(t, b, part, scales_at);
  }
  inline F min(int t, int64_t b, int part) const {
    const F offset = half(t, b, part, offsets_at);
    return kSpread == Spread::many && zeros ? neg(mul(offset, scale(t, b, part))) : offset;
  }

 private:
  inline F half(int t, int64_t b, int part, size_t at) const {
    return load_f16(reinterpret_cast<const uint16_t*>(block(t, b) + at) + part * kLanes);
  }
};

// Panels whose nibbles stand for a table's numbers: steps alternate between low and high nibbles of the same bytes.
template <int NT, Spread kSpread>
struct Looked : Panels<NT, kSpread> {
  Table table;
  inline B numbers(int t, int64_t b, int64_t u, int s) const {
    const B both = load_b(this->unit(t, b, u) + s / 2 * 4 * kLanes);
    return lookup16(table, s % 2 == 0 ? low4(both) : high4(both));
  }
  static constexpr int input(int s) { return s % 2 * 16 + s / 2 * 4; }
};

inline void store_b(uint8_t* p, B b) { std::memcpy(p, &b, sizeof b); }

// What all codes stand for, as panels of w8 in `scratch`: no row can tell them from these.
template <int NT, Spread kSpread>
Panels<NT, kSpread> expanded(const Looked<NT, kSpread>& from, const Layout& l, uint8_t* scratch) {
  Panels<NT, kSpread> to = from;
  to.unit_bytes = 2 * from.unit_bytes;
  to.scales_at = 2 * from.scales_at;
  to.block_bytes = from.block_bytes + from.scales_at;
  for (int t = 0; t < NT; ++t) {
    uint8_t* at = scratch + size_t(t) * size_t(l.blocks) * to.block_bytes;
    to.panel[t] = at;
    for (int64_t b = 0; b < l.blocks; ++b, at += to.block_bytes) {
      for (int64_t u = 0; u < l.units; ++u)
        for (int s = 0; s < 8; ++s) store_b(at + size_t(u) * to.unit_bytes + from.input(s) * kLanes, from.numbers(t, b, u, s));
      std::memcpy(at + to.scales_at, from.block(t, b) + from.scales_at, from.block_bytes - from.scales_at);
    }
  }
  return to;
}

// Exact integer products of steps [first, first + kSteps) of the 32 inputs g; `sum` is the place of q's sum over them.
template <int MR, int NT, int kSteps, class Source>
inline void dots(const Source& w, const Rows& x, int64_t b, int64_t u, int64_t g, int first, int64_t sum, I (&dot)[MR][NT]) {
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) dot[r][t] = dot8_start(x.sums[r * x.parts + sum]);
#pragma GCC unroll 8
  for (int s = first; s < first + kSteps; ++s) {
    W8 codes[NT];
    for (int t = 0; t < NT; ++t) codes[t] = prepare8(w.numbers(t, b, u, s));
    for (int r = 0; r < MR; ++r) {
      const B q = dup4(x.q + r * x.k_padded + g * kGroup + w.input(s));
      for (int t = 0; t < NT; ++t) dot[r][t] = dot8(dot[r][t], codes[t], q);
    }
  }
}

template <int MR, int NT, bool kMins, class Source>
inline void add_scaled(const Source& w, const Rows& x, int64_t b, int part, int64_t at, const F (&products)[MR][NT], F (&sum)[MR][NT]) {
  F scale[NT], min[NT];
  for (int t = 0; t < NT; ++t) {
    scale[t] = w.scale(t, b, part);
    min[t] = kMins ? w.min(t, b, part) : zero();
  }
  for (int r = 0; r < MR; ++r) {
    for (int t = 0; t < NT; ++t) {
      sum[r][t] = fma(scale[t], products[r][t], sum[r][t]);
      if (kMins) sum[r][t] = fma(min[t], set1(x.block_sums[r * x.scales + at]), sum[r][t]);
    }
  }
}

template <int MR, int NT, Spread kSpread, bool kMins, class Source>
OCTAVO_TILE void tile(const Source& w, Rows x, Ahead ahead, float* acc) {
  F sum[MR][NT];
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) sum[r][t] = zero();
  for (int64_t b = 0, g = 0; b < x.blocks; ++b) {
    F products[MR][NT];
    I dot[MR][NT];
    if constexpr (kSpread == Spread::many) {
      for (int r = 0; r < MR; ++r)
        for (int t = 0; t < NT; ++t) products[r][t] = zero();
      for (int64_t u = 0; u < x.units; ++u, ++g) {
        ahead.ask(g);
        dots<MR, NT, 8>(w, x, b, u, g, 0, g, dot);
        for (int r = 0; r < MR; ++r) {
          const F x_scale = set1(x.scale[r * x.groups + g]);
          for (int t = 0; t < NT; ++t) products[r][t] = fma(x_scale, to_float(dot[r][t]), products[r][t]);
        }
      }
      add_scaled<MR, NT, kMins>(w, x, b, 0, b, products, sum);
    } else {
      constexpr int kParts = kSpread == Spread::half ? 2 : 1;
      ahead.ask(b);
      for (int part = 0; part < kParts; ++part) {
        dots<MR, NT, 8 / kParts>(w, x, b, 0, b, part * (8 / kParts), b * kParts + part, dot);
        for (int r = 0; r < MR; ++r) {
          const F x_scale = set1(x.scale[r * x.groups + b]);
          for (int t = 0; t < NT; ++t) products[r][t] = mul(x_scale, to_float(dot[r][t]));
        }
        add_scaled<MR, NT, kMins>(w, x, b, part, b * kParts + part, products, sum);
      }
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) store(acc + r * kAccRow + t * kLanes, sum[r][t]);
}

// kTable: t4, which has no minimums and no groups of 16.
template <Spread kSpread, bool kMins, bool kTable>
class W8Kernel {
 public:
  W8Kernel(const LinearArgs& a, const Layout& l, Arena& arena)
      : a_(a),
        l_(l),
        parts_(l.groups * kParts),
        scales_(l.blocks * kParts),
        sums_(arena.take<int32_t>(size_t(kMaxChunk) * size_t(parts_))),
        block_sums_(arena.take<float>(size_t(kMaxChunk) * size_t(scales_))),
        expanded_(kTable ? arena.take<uint8_t>(kExpanded * size_t(l.groups)) : nullptr) {}
  int64_t chunk_rows() const { return rows_in_cache(size_t(a_.w->k_padded), kTileRows); }

  // Sums as integers, which correct unsigned products, and scaled, which multiply the minimums.
  void start(int64_t row, int64_t rows) {
    first_row_ = row;
    for (int64_t i = 0; i < rows; ++i) {
      const float* scale = a_.xq.scale + (row + i) * l_.groups;
      const float* from = a_.xq.sum + (row + i) * l_.groups;
      int32_t* to = sums_ + i * parts_;
      float* scaled = block_sums_ + i * scales_;
      if (kParts == 1) {
        for (int64_t g = 0; g < l_.groups; ++g) to[g] = int32_t(from[g]);
        if (kMins) block_sums(scale, from, l_.blocks, l_.units, 1.0f, scaled);
        continue;
      }
      const int8_t* q = a_.xq.q + (row + i) * a_.w->k_padded;
      for (int64_t p = 0; p < parts_; ++p) {
        int32_t total = 0;
        for (int j = 0; j < kGroup / kParts; ++j) total += q[p * (kGroup / kParts) + j];
        to[p] = total;
        scaled[p] = scale[p / kParts] * float(total);
      }
    }
  }

  void run(const uint8_t* const* panels, int count, int64_t row, int64_t rows, float* acc) {
    if (rows == 1) {  // bound by memory, which is fastest as one stream: panel after panel, not side by side
      for (int t = 0; t < count; ++t)
        tile<1, 1, kSpread, kMins>(bind<1>(panels + t), rows_at(row), ahead_in_stream(panels[t], l_), acc + t * kLanes);
      return;
    }
    for (int t = 0; t < count; t += kTileCols)
      with_rows<kTileCols>(count - t, [&](auto nt) { columns<nt.value>(panels + t, row, rows, acc + t * kLanes); });
  }

 private:
  static constexpr int kParts = kSpread == Spread::half ? 2 : 1;
  template <int NT>
  using Source = std::conditional_t<kTable, Looked<NT, kSpread>, Panels<NT, kSpread>>;

  Rows rows_at(int64_t row) const {
    const int64_t k = a_.w->k_padded, i = row - first_row_;
    return {a_.xq.q + row * k,
            a_.xq.scale + row * l_.groups,
            sums_ + i * parts_,
            block_sums_ + i * scales_,
            k,
            l_.groups,
            parts_,
            scales_,
            l_.blocks,
            l_.units};
  }
  template <int NT>
  Source<NT> bind(const uint8_t* const* panels) const {
    Source<NT> w;
    std::copy(panels, panels + NT, w.panel);
    w.block_bytes = l_.block_bytes;
    w.unit_bytes = l_.unit_bytes;
    w.scales_at = l_.scales_at;
    w.offsets_at = l_.offsets_at;
    w.wide = a_.w->wide;
    w.zeros = a_.w->offset == Offset::zero;
    if constexpr (kTable) w.table = load_table(a_.w->table);
    return w;
  }
  template <int NT>
  void columns(const uint8_t* const* panels, int64_t row, int64_t rows, float* acc) {
    const Source<NT> w = bind<NT>(panels);
    const Ahead ahead = ahead_by_panels(panels[0], NT, l_);
    if constexpr (kTable) {
      if (rows >= kExpandFrom) return row_tiles<NT>(expanded(w, l_, expanded_), row, rows, ahead, acc);
    }
    row_tiles<NT>(w, row, rows, ahead, acc);
  }
  template <int NT, class From>
  void row_tiles(const From& w, int64_t row, int64_t rows, Ahead ahead, float* acc) {
    for (int64_t i = 0, count; i < rows; i += count, ahead = Ahead{}) {
      count = tile_rows(rows - i, kTileRows);
      with_rows<kTileRows>(count, [&](auto mr) { tile<mr.value, NT, kSpread, kMins>(w, rows_at(row + i), ahead, acc + i * kAccRow); });
    }
  }

  const LinearArgs& a_;
  const Layout& l_;
  const int64_t parts_, scales_;
  int32_t* sums_;
  float* block_sums_;
  uint8_t* expanded_;
  int64_t first_row_ = 0;
};

template <Spread kSpread>
void spread_over(const LinearArgs& args, int ith, int nth) {
  args.w->offset == Offset::code ? run_linear<W8Kernel<kSpread, false, false>>(args, ith, nth)
                                 : run_linear<W8Kernel<kSpread, true, false>>(args, ith, nth);
}

}  // namespace

size_t linear_w8_scratch(int64_t k) { return kAccBytes + size_t(kMaxChunk) * size_t(pad_k(k) / 16) * 8 + kArenaSlack; }

size_t linear_t4_scratch(int64_t k) { return linear_w8_scratch(k) + kExpanded * size_t(pad_k(k) / kGroup); }

void linear_w8(const LinearArgs& args, int ith, int nth) {
  const PackedW& w = *args.w;
  if (w.kind == WeightKind::t4) {
    if (w.group == kGroup && !w.wide) return run_linear<W8Kernel<Spread::one, false, true>>(args, ith, nth);
    return run_linear<W8Kernel<Spread::many, false, true>>(args, ith, nth);
  }
  if (w.group < kGroup) return spread_over<Spread::half>(args, ith, nth);
  if (w.group == kGroup && !w.wide && w.offset != Offset::zero) return spread_over<Spread::one>(args, ith, nth);
  spread_over<Spread::many>(args, ith, nth);
}

}  // namespace octavo::OCTAVO_NS
