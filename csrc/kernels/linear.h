// What all linear kernels share: dividing the work among threads, walking over tiles, and the epilogue.
// Knows nothing of how a product is computed: a Kernel supplies that.
//
// A Kernel has
//   static constexpr int kRows       rows that it likes to be given together (a multiple is best)
//   int64_t chunk_rows()             rows whose activations stay in the near caches, at most kMaxChunk
//   void start(row, rows)            prepares activations of these rows (at most chunk_rows())
//   void run(panels, count, row, rows, acc)
//                                    acc[i * kAccRow + t * kLanes ...] = row (row + i) times panel t, for count <= kMaxTiles
// Every number it computes must depend only on its own row and channel (the contract in kernels.h).
#pragma once
#include <algorithm>

#include "decl.h"
#include "layout.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {

// A tile's loop is a function of its own: inlined into the walk over rows, it shares registers with it and spills its own.
#define OCTAVO_TILE __attribute__((noinline))

constexpr int kMaxTiles = 4;   // panels computed before an epilogue
constexpr int kMaxChunk = 64;  // rows likewise
constexpr int64_t kAccRow = kMaxTiles * kLanes;
constexpr size_t kAccBytes = size_t(kMaxChunk) * kAccRow * 4;

// Hands out a thread's scratch, 64-byte aligned pieces.
class Arena {
 public:
  explicit Arena(uint8_t* base) : at_((reinterpret_cast<uintptr_t>(base) + 63) & ~uintptr_t(63)) {}
  template <class T>
  T* take(size_t count) {
    T* p = reinterpret_cast<T*>(at_);
    at_ += (count * sizeof(T) + 63) & ~size_t(63);
    return p;
  }

 private:
  uintptr_t at_;
};

constexpr size_t kArenaSlack = 1024;  // for alignment, whatever the number of pieces

// The tiles and rows of one thread.
struct Share {
  int64_t tile_begin, tile_end, row_begin, row_end;
};

// Threads form a grid over tiles and rows. Rows are cut only where tiles alone leave threads idle, and never below 16 rows:
// each cut reads all weights once more.
inline Share share_of(int64_t tiles, int64_t rows, int ith, int nth) {
  int best_parts = 1;
  int64_t best_cost = ((tiles + nth - 1) / nth) * rows;
  for (int parts = 2; parts <= nth && rows / parts >= 16; ++parts) {
    const int columns = nth / parts;
    const int64_t cost = ((tiles + columns - 1) / columns) * ((rows + parts - 1) / parts);
    if (cost * 20 < best_cost * 19) {
      best_cost = cost;
      best_parts = parts;
    }
  }
  const int columns = nth / best_parts, column = ith % columns, part = ith / columns;
  if (part >= best_parts) return {0, 0, 0, 0};
  return {tiles * column / columns, tiles * (column + 1) / columns, rows * part / best_parts, rows * (part + 1) / best_parts};
}

inline F load_some(const float* p, int64_t n) { return n >= kLanes ? load(p) : load_n(p, int(n)); }
inline void store_some(float* p, F v, int64_t n) { n >= kLanes ? store(p, v) : store_n(p, v, int(n)); }

// A whole tile of one epilogue without bias and scale, by far the commonest: what to do is decided outside the rows' loop.
template <Epilogue kWhich>
inline void finish_whole(const float* acc, int64_t rows, float* y, int64_t ldy, const float* residual, int64_t ldr) {
  for (int64_t i = 0; i < rows; ++i, acc += kAccRow, y += ldy) {
    F v = load(acc);
    if constexpr (kWhich == Epilogue::add) v = octavo::OCTAVO_NS::add(load(residual), v), residual += ldr;
    store(y, v);
  }
}

// y[.., c ...] from `count` finished tiles, for Epilogue none, add and gelu.
inline void finish_plain(const LinearArgs& a, const float* acc, int64_t row, int64_t rows, int64_t tile, int count) {
  const int64_t n = a.w->n;
  const bool simple = a.bias == nullptr && a.scale == 1.0f;
  for (int t = 0; t < count; ++t) {
    const int64_t c = (tile + t) * kLanes, valid = std::min<int64_t>(kLanes, n - c);
    const float* from = acc + t * kLanes;
    float* y = a.y + row * a.ldy + c;
    if (simple && valid == kLanes && a.epilogue == Epilogue::none) {
      finish_whole<Epilogue::none>(from, rows, y, a.ldy, nullptr, 0);
      continue;
    }
    if (simple && valid == kLanes && a.epilogue == Epilogue::add) {
      finish_whole<Epilogue::add>(from, rows, y, a.ldy, a.residual + row * a.ldr + c, a.ldr);
      continue;
    }
    const F bias = a.bias ? load_some(a.bias + c, valid) : zero();
    for (int64_t i = 0; i < rows; ++i) {
      F v = load(from + i * kAccRow);
      if (a.bias) v = octavo::OCTAVO_NS::add(v, bias);
      if (a.scale != 1.0f) v = mul(v, set1(a.scale));
      if (a.epilogue == Epilogue::add) v = octavo::OCTAVO_NS::add(load_some(a.residual + (row + i) * a.ldr + c, valid), v);
      if (a.epilogue == Epilogue::gelu) v = gelu_tanh(v);
      store_some(y + i * a.ldy, v, valid);
    }
  }
}

// y[.., c ...] = act(gate) * up. acc holds `count` gate tiles, then the tiles where their up channels start; `shift` is the
// place of the first up channel in its tile.
inline void finish_gated(const LinearArgs& a, const float* acc, int64_t row, int64_t rows, int64_t tile, int count, int shift) {
  const int64_t half = a.w->n / 2;
  for (int t = 0; t < count; ++t) {
    const int64_t c = (tile + t) * kLanes, valid = std::min<int64_t>(kLanes, half - c);
    const F gate_bias = a.bias ? load_some(a.bias + c, valid) : zero();
    const F up_bias = a.bias ? load_some(a.bias + half + c, valid) : zero();
    for (int64_t i = 0; i < rows; ++i) {
      F gate = load(acc + i * kAccRow + t * kLanes), up = load(acc + i * kAccRow + (count + t) * kLanes + shift);
      if (a.bias) gate = octavo::OCTAVO_NS::add(gate, gate_bias), up = octavo::OCTAVO_NS::add(up, up_bias);
      gate = a.epilogue == Epilogue::silu_mul ? silu(gate) : gelu_tanh(gate);
      store_some(a.y + (row + i) * a.ldy + c, mul(gate, up), valid);
    }
  }
}

template <class Kernel>
void plain_tiles(const LinearArgs& a, const Layout& l, Kernel& kernel, const Share& share, int64_t row, int64_t rows, float* acc) {
  const uint8_t* panels[kMaxTiles];
  for (int64_t tile = share.tile_begin; tile < share.tile_end; tile += kMaxTiles) {
    const int count = int(std::min<int64_t>(kMaxTiles, share.tile_end - tile));
    for (int t = 0; t < count; ++t) panels[t] = a.w->data + size_t(tile + t) * l.panel_bytes;
    kernel.run(panels, count, row, rows, acc);
    finish_plain(a, acc, row, rows, tile, count);
  }
}

template <class Kernel>
void gated_tiles(const LinearArgs& a, const Layout& l, Kernel& kernel, const Share& share, int64_t row, int64_t rows, float* acc) {
  const int64_t half = a.w->n / 2;
  const int shift = int(half % kLanes);
  const int step = shift == 0 ? kMaxTiles / 2 : 1;  // up channels that straddle tiles need a tile more
  const uint8_t* panels[kMaxTiles];
  for (int64_t tile = share.tile_begin; tile < share.tile_end; tile += step) {
    const int count = int(std::min<int64_t>(step, share.tile_end - tile));
    const int64_t up = (half + tile * kLanes) / kLanes;
    const int ups = int(std::min<int64_t>(shift == 0 ? count : 2, l.tiles - up));
    for (int t = 0; t < count; ++t) panels[t] = a.w->data + size_t(tile + t) * l.panel_bytes;
    for (int t = 0; t < ups; ++t) panels[count + t] = a.w->data + size_t(up + t) * l.panel_bytes;
    kernel.run(panels, count + ups, row, rows, acc);
    finish_gated(a, acc, row, rows, tile, count, shift);
  }
}

// Of one row: per block of inputs that share scales, sx * (sum of q) over its kGroups, ascending, times `factor`, a power of two.
inline void block_sums(const float* scale, const float* sum, int64_t blocks, int64_t units, float factor, float* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    float total = 0.0f;
    for (int64_t u = 0; u < units; ++u) total += scale[b * units + u] * sum[b * units + u];
    out[b] = total * factor;
  }
}

template <class Kernel>
void run_linear(const LinearArgs& a, int ith, int nth) {
  const Layout l = layout_of(*a.w);
  const bool gated = a.epilogue == Epilogue::silu_mul || a.epilogue == Epilogue::gelu_mul;
  const int64_t tiles = gated ? (a.w->n / 2 + kLanes - 1) / kLanes : l.tiles;
  const Share share = share_of(tiles, a.rows, ith, nth);
  if (share.tile_begin == share.tile_end) return;
  Arena arena(a.scratch);
  float* acc = arena.take<float>(kMaxChunk * kAccRow);
  Kernel kernel(a, l, arena);
  const int64_t chunk = kernel.chunk_rows();
  for (int64_t row = share.row_begin; row < share.row_end; row += chunk) {
    const int64_t rows = std::min(chunk, share.row_end - row);
    kernel.start(row, rows);
    if (gated)
      gated_tiles(a, l, kernel, share, row, rows, acc);
    else
      plain_tiles(a, l, kernel, share, row, rows, acc);
  }
}

// Weights arrive from memory one line at a time: while a row tile multiplies a group, it asks for the bytes that come next. Hardware
// alone loses the stream at the end of each panel (a few KB for a narrow layer).
struct Ahead {
  const uint8_t* next = nullptr;  // null: somebody else has asked
  size_t step_bytes = 0;          // to ask for per step: what a tile multiplies between two questions
  inline void ask(int64_t step) const {
    if (next == nullptr) return;
    for (size_t line = 0; line < step_bytes; line += 64) __builtin_prefetch(next + size_t(step) * step_bytes + line);
  }
};

// Per kGroup inputs, the scales' share included.
inline size_t ahead_bytes(const Layout& l) { return l.panel_bytes / size_t(l.groups); }

// A single row reads panel after panel, as one stream: the bytes 2 KB on.
inline Ahead ahead_in_stream(const uint8_t* panel, const Layout& l) { return {panel + 2048, ahead_bytes(l)}; }

// Several rows hold `count` panels in the caches: the next `count`, asked for by the first row tile.
inline Ahead ahead_by_panels(const uint8_t* panel, int count, const Layout& l) {
  return {panel + size_t(count) * l.panel_bytes, size_t(count) * ahead_bytes(l)};
}

// Rows whose activations (bytes each) fit into half a near cache, in whole row tiles.
inline int64_t rows_in_cache(size_t row_bytes, int tile_rows) {
  const int64_t fit = int64_t((size_t(256) << 10) / std::max<size_t>(row_bytes, 1));
  const int64_t rows = std::clamp<int64_t>(fit, 16, kMaxChunk);
  return std::max<int64_t>(rows / tile_rows, 1) * tile_rows;
}

// Rows of the next tile when `left` remain: full tiles, but the last two share what is left (5 = 3 + 2, not 4 + 1, which would load
// every weight for a single row).
inline int64_t tile_rows(int64_t left, int64_t full) { return left <= full ? left : left < 2 * full ? (left + 1) / 2 : full; }

// Calls f(integral_constant R) for the given count of rows, 1 <= rows <= R at the start.
template <int R, class Fn>
inline void with_rows(int64_t rows, Fn&& f) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, f);
  }
  f(std::integral_constant<int, R>{});
}

}  // namespace octavo::OCTAVO_NS
