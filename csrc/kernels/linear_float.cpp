// Linear layer with float weights: f32, f16 (activations stay fp32), bf16 and f8 (activations are rounded to bf16).
// acc = fma(x[k], w[k], acc) for k ascending, in fp32; with the bf16 instruction, pairs of k ascending. y may alias
// residual, nothing else.
#include "linear.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int kTileRows = kRegisters == 32 ? 6 : 4;
constexpr int kTileCols = 2;
constexpr int64_t kBlock = 256;      // inputs per pass over the rows: two panels' worth stay in the first cache
constexpr int64_t kExpandFrom = 12;  // rows from which 16-bit weights are widened once per block; f8: from the second row tile on

// Activations of one row tile: floats, or pairs of bf16 read as one.
struct Rows {
  const float* x;
  int64_t stride;
};

// Sources of weights: `pair` gives inputs k and k + 1 (k even) of panel t. kScaled: a source is bound to inputs that share a scale.
template <int NT>
struct Wide {  // f32
  static constexpr size_t kBytes = 4;
  static constexpr bool kScaled = false;
  const uint8_t* panel[NT];
  inline F at(int t, int64_t k) const { return load(reinterpret_cast<const float*>(panel[t]) + k * kLanes); }
  inline void pair(int t, int64_t k, F& even, F& odd) const {
    even = at(t, k);
    odd = at(t, k + 1);
  }
};

template <int NT>
struct Half {  // f16
  static constexpr size_t kBytes = 2;
  static constexpr bool kScaled = false;
  const uint8_t* panel[NT];
  inline F at(int t, int64_t k) const { return load_f16(reinterpret_cast<const uint16_t*>(panel[t]) + k * kLanes); }
  inline void pair(int t, int64_t k, F& even, F& odd) const {
    even = at(t, k);
    odd = at(t, k + 1);
  }
};

template <int NT>
struct Brain {  // bf16
  static constexpr size_t kBytes = 2;
  static constexpr bool kScaled = false;
  const uint8_t* panel[NT];
  inline B slots(int t, int64_t k) const { return load_b(panel[t] + k * kLanes * 2); }
  inline void pair(int t, int64_t k, F& even, F& odd) const {
    const B both = slots(t, k);
    even = pair_even(both);
    odd = pair_odd(both);
  }
};

template <int NT>
struct Eight {  // f8; panel: as if no scales lay before this block
  static constexpr size_t kBytes = 1;
  static constexpr bool kScaled = true;
  const uint8_t* panel[NT];
  F scale[NT];
  inline void pair(int t, int64_t k, F& even, F& odd) const {
    load_f8_pair(panel[t] + k * kLanes, even, odd);
    even = mul(even, scale[t]);
    odd = mul(odd, scale[t]);
  }
};

// Inputs [from, to) of one tile on top of acc (or of zero, for the first block); from is even.
template <int MR, int NT, class Source>
OCTAVO_TILE void tile(const Source& w, Rows x, int64_t from, int64_t to, Ahead ahead, float* acc) {
  F sum[MR][NT];
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) sum[r][t] = from == 0 ? zero() : load(acc + r * kAccRow + t * kLanes);
  int64_t k = from;
  for (; k + 2 <= to; k += 2) {
    ahead.ask(k / 2);
    F even[NT], odd[NT];
    for (int t = 0; t < NT; ++t) w.pair(t, k, even[t], odd[t]);
    for (int r = 0; r < MR; ++r) {
      const F value = set1(x.x[r * x.stride + k]);
      for (int t = 0; t < NT; ++t) sum[r][t] = fma(value, even[t], sum[r][t]);
    }
    for (int r = 0; r < MR; ++r) {
      const F value = set1(x.x[r * x.stride + k + 1]);
      for (int t = 0; t < NT; ++t) sum[r][t] = fma(value, odd[t], sum[r][t]);
    }
  }
  if (k < to) {  // an odd k ends alone: x has no further element, and the panel's padding is not used
    F even[NT], odd[NT];
    for (int t = 0; t < NT; ++t) w.pair(t, k, even[t], odd[t]);
    for (int r = 0; r < MR; ++r)
      for (int t = 0; t < NT; ++t) sum[r][t] = fma(set1(x.x[r * x.stride + k]), even[t], sum[r][t]);
  }
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) store(acc + r * kAccRow + t * kLanes, sum[r][t]);
}

// The same with pairs of bf16 on both sides; x's padding is zero, so that an odd k needs no end of its own.
template <int MR, int NT>
OCTAVO_TILE void tile_pairs(const Brain<NT>& w, Rows x, int64_t from, int64_t to, Ahead ahead, float* acc) {
  F sum[MR][NT];
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) sum[r][t] = from == 0 ? zero() : load(acc + r * kAccRow + t * kLanes);
  for (int64_t k = from; k < to; k += 2) {
    ahead.ask(k / 2);
    B slots[NT];
    for (int t = 0; t < NT; ++t) slots[t] = w.slots(t, k);
    for (int r = 0; r < MR; ++r) {
      const B value = dup4(reinterpret_cast<const int8_t*>(x.x + r * x.stride + k / 2));
      for (int t = 0; t < NT; ++t) sum[r][t] = fma_bf16(sum[r][t], slots[t], value);
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) store(acc + r * kAccRow + t * kLanes, sum[r][t]);
}

// Inputs [from, to) of NT panels widened to float: [k][NT][kLanes] would interleave; kept as NT runs of kBlock instead, so
// that Wide reads them.
template <int NT, class Source>
void widen(const Source& w, int64_t from, int64_t to, float* block) {
  for (int t = 0; t < NT; ++t) {
    float* run = block + t * kBlock * kLanes;
    for (int64_t k = from; k < to; k += 2) {  // an odd end reads and writes one padded input
      F even, odd;
      w.pair(t, k, even, odd);
      store(run + (k - from) * kLanes, even);
      store(run + (k - from + 1) * kLanes, odd);
    }
  }
}

template <template <int> class Source, bool kRoundX>
class FloatKernel {
 public:
  FloatKernel(const LinearArgs& a, const Layout& l, Arena& arena) : a_(a), l_(l), k_(a.w->k) {
    block_ = arena.take<float>(size_t(kTileCols) * kBlock * kLanes);
    rounded_ = arena.take<float>(size_t(kRoundX ? kMaxChunk : 0) * size_t(a.w->k_padded));
  }
  int64_t chunk_rows() const { return kMaxChunk / kTileRows * kTileRows; }

  void start(int64_t row, int64_t rows) {
    x_ = {a_.x + row * a_.ldx, a_.ldx};
    first_row_ = row;
    if constexpr (!kRoundX) return;
    for (int64_t i = 0; i < rows; ++i) kPairs ? round_pairs(i) : round_floats(i);
    x_ = {rounded_, kPairs ? a_.w->k_padded / 2 : a_.w->k_padded};
  }

  void run(const uint8_t* const* panels, int count, int64_t row, int64_t rows, float* acc) {
    const Rows x{x_.x + (row - first_row_) * x_.stride, x_.stride};
    if (rows == 1) {
      with_rows<kMaxTiles>(count, [&](auto nt) {
        for (int64_t from = 0, to; from < k_; from = to) {
          to = Source<1>::kScaled ? block_end(from) : k_;
          product<1, nt.value>(bind<nt.value>(panels, from), x, from, to, Ahead{}, acc);
        }
      });
      return;
    }
    for (int t = 0; t < count; t += kTileCols)
      with_rows<kTileCols>(count - t, [&](auto nt) { columns<nt.value>(panels + t, x, rows, acc + t * kLanes); });
  }

 private:
  static constexpr bool kPairs = kRoundX && kPairBf16 && !Source<1>::kScaled;

  void round_floats(int64_t i) {
    const float* from = a_.x + (first_row_ + i) * a_.ldx;
    float* to = rounded_ + i * a_.w->k_padded;
    int64_t k = 0;
    for (; k + kLanes <= k_; k += kLanes) store(to + k, round_bf16(load(from + k)));
    if (k < k_) store_n(to + k, round_bf16(load_n(from + k, int(k_ - k))), int(k_ - k));
  }
  void round_pairs(int64_t i) {
    const float* from = a_.x + (first_row_ + i) * a_.ldx;
    uint16_t* to = reinterpret_cast<uint16_t*>(rounded_) + i * a_.w->k_padded;
    int64_t k = 0;
    for (; k + kLanes <= k_; k += kLanes) store_bf16(to + k, load(from + k));
    if (k < k_) store_bf16(to + k, load_n(from + k, int(k_ - k))), k += kLanes;
    for (; k < a_.w->k_padded; ++k) to[k] = 0;
  }

  // The end of a pass over inputs that begins at `from`: kBlock of them, or what is left of those that share a scale.
  int64_t block_end(int64_t from) const {
    const int64_t end = std::min(from + kBlock, k_);
    return Source<1>::kScaled ? std::min(end, (from / a_.w->group + 1) * a_.w->group) : end;
  }
  template <int NT>
  Source<NT> bind(const uint8_t* const* panels, int64_t from) const {
    Source<NT> w;
    std::copy(panels, panels + NT, w.panel);
    if constexpr (Source<NT>::kScaled) {
      const int64_t block = from / a_.w->group;
      for (int t = 0; t < NT; ++t) {
        w.scale[t] = load(reinterpret_cast<const float*>(panels[t] + size_t(block) * l_.block_bytes + l_.scales_at));
        w.panel[t] += size_t(block) * (l_.block_bytes - l_.scales_at);
      }
    }
    return w;
  }
  template <int MR, int NT, class W>
  static void product(const W& w, Rows x, int64_t from, int64_t to, Ahead ahead, float* acc) {
    if constexpr (kPairs)
      tile_pairs<MR, NT>(w, x, from, to, ahead, acc);
    else
      tile<MR, NT>(w, x, from, to, ahead, acc);
  }
  template <int NT, class W>
  static void row_tiles(const W& w, Rows x, int64_t rows, int64_t from, int64_t to, Ahead ahead, float* acc) {
    for (int64_t i = 0, count; i < rows; i += count, ahead = Ahead{}) {
      count = tile_rows(rows - i, kTileRows);
      with_rows<kTileRows>(
          count, [&](auto mr) { product<mr.value, NT>(w, Rows{x.x + i * x.stride, x.stride}, from, to, ahead, acc + i * kAccRow); });
    }
  }
  template <int NT>
  void columns(const uint8_t* const* panels, Rows x, int64_t rows, float* acc) {
    using W = Source<NT>;
    // Per pair of inputs. Long panels are left to the hardware, which follows them well.
    Ahead ahead = ahead_by_panels(panels[0], NT, l_);
    ahead.step_bytes = size_t(NT) * 2 * kLanes * W::kBytes;
    if (l_.panel_bytes > (size_t(32) << 10)) ahead = Ahead{};
    if (rows <= kTileRows && !W::kScaled) return row_tiles<NT>(bind<NT>(panels, 0), x, rows, 0, k_, ahead, acc);
    for (int64_t from = 0, to; from < k_; from = to) {
      to = block_end(from);
      const W w = bind<NT>(panels, from);
      if constexpr (W::kBytes == 4 || kPairs) {
        row_tiles<NT>(w, x, rows, from, to, ahead, acc);
      } else if (rows < (W::kScaled ? kTileRows + 1 : kExpandFrom)) {
        row_tiles<NT>(w, x, rows, from, to, ahead, acc);
      } else {
        widen<NT>(w, from, to, block_);
        Wide<NT> wide;
        for (int t = 0; t < NT; ++t)  // as if the run held the panel from its beginning
          wide.panel[t] = reinterpret_cast<const uint8_t*>(block_ + t * kBlock * kLanes - from * kLanes);
        row_tiles<NT>(wide, x, rows, from, to, ahead, acc);
      }
    }
  }

  const LinearArgs& a_;
  const Layout& l_;
  const int64_t k_;
  float* block_;
  float* rounded_;
  Rows x_{};
  int64_t first_row_ = 0;
};

}  // namespace

size_t linear_float_scratch(int64_t k) {
  return kAccBytes + size_t(kTileCols) * kBlock * kLanes * 4 + size_t(kMaxChunk) * size_t(pad_k(k)) * 4 + kArenaSlack;
}

void linear_float(const LinearArgs& args, int ith, int nth) {
  if (args.w->kind == WeightKind::f32)
    run_linear<FloatKernel<Wide, false>>(args, ith, nth);
  else if (args.w->kind == WeightKind::f16)
    run_linear<FloatKernel<Half, false>>(args, ith, nth);
  else if (args.w->kind == WeightKind::f8)
    run_linear<FloatKernel<Eight, true>>(args, ith, nth);
  else
    run_linear<FloatKernel<Brain, true>>(args, ith, nth);
}

}  // namespace octavo::OCTAVO_NS
