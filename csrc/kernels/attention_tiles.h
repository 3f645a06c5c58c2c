// The products of attention over blocks of rows: scores with a tile of keys, weighted sums of values.
//
// Knows no sequences and no cache: pointers to tiles, rows of one block, and which tokens of the chunk each row sees. The rows of a
// block are computed together, but each by its own operations in its own order (kernels.h).
#pragma once
#include <algorithm>

#include "kernels/decl.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {

constexpr int64_t kTile = 16;
constexpr int64_t kChunk = kAttentionChunk;
constexpr int64_t kTiles = kChunk / kTile;
constexpr int kPerTile = int(kTile) / kLanes;
constexpr int kBlockRows = 6;

inline F load_kv(const float* p) { return load(p); }
inline F load_kv(const uint16_t* p) { return load_bf16(p); }

// Vectors of one row that a block of `rows` rows computes together: as many as the registers hold, a power of two.
constexpr int vectors_for(int rows) {
  const int accumulators = kRegisters >= 32 ? 24 : 12;
  int n = 8;
  while (n > 1 && n * rows > accumulators) n /= 2;
  return n;
}

// Calls f with the number of rows, 1 to kBlockRows, as a constant.
template <int N>
struct Constant {
  static constexpr int value = N;
};
template <class Fn>
inline void with_rows(int rows, Fn f) {
  switch (rows) {
    case 1:
      return f(Constant<1>());
    case 2:
      return f(Constant<2>());
    case 3:
      return f(Constant<3>());
    case 4:
      return f(Constant<4>());
    case 5:
      return f(Constant<5>());
    default:
      return f(Constant<6>());
  }
}

struct Visible {
  int64_t first, end;  // positions of a chunk that a row sees, relative to the chunk; empty if first >= end
};

// Of the rows of a block: what any of them sees, and what all do (first <= end). The same: nothing is left to single rows.
struct BlockSeen {
  Visible any, all;
  bool same;
};

inline BlockSeen common(const Visible* seen, int64_t rows) {
  BlockSeen b{{kChunk, 0}, seen[0], true};
  for (int64_t r = 0; r < rows; ++r) {
    if (seen[r].first < seen[r].end) b.any = {std::min(b.any.first, seen[r].first), std::max(b.any.end, seen[r].end)};
    b.same = b.same && seen[r].first == seen[0].first && seen[r].end == seen[0].end;
    b.all = {std::max(b.all.first, seen[r].first), std::min(b.all.end, seen[r].end)};
  }
  b.all.end = std::max(b.all.first, b.all.end);
  return b;
}

// The sums of a block, [R][V] vectors. Its loops are unrolled by name: else the sums pass through memory before and after a product.
template <int R, int V>
struct Sums {
  F at[R][V];

  void clear() {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) at[r][v] = zero();
  }

  // at[r][v] += left(r) * right(v). The longer side is loaded last, one at a time: as few registers as possible are taken.
  template <class Left, class Right>
  void multiply(Left left, Right right) {
    if constexpr (R > V) {
      F all[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) all[v] = right(v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F one = left(r);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) at[r][v] = fma(one, all[v], at[r][v]);
      }
    } else {
      F all[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) all[r] = left(r);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const F one = right(v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) at[r][v] = fma(all[r], one, at[r][v]);
      }
    }
  }

  // Sets at[r][v] to the sum over the tokens that row r sees, ascending, of p[r][t] * value[t][v]: tokens that only some rows see are
  // added row by row, the common ones together.
  template <class Columns>
  void add_values(const float* p, const Columns& columns, const Visible* seen, const BlockSeen& block) {
    clear();
    const Visible all = block.all;
    if (!block.same) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) add_row(r, p, columns, seen[r].first, std::min(all.first, seen[r].end));
    }
    for (int64_t t = all.first; t < all.end;) {
      const auto* value = columns.at(t);
      for (const int64_t stop = columns.stop(t, all.end); t < stop; ++t, value += columns.row()) {
        columns.look_ahead(t, V * kLanes * sizeof(*value));
        multiply([&](int r) { return set1(p[r * kChunk + t]); }, [&](int v) { return load_kv(value + v * kLanes); });
      }
    }
    if (!block.same) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) add_row(r, p, columns, all.end, seen[r].end);
    }
  }

  template <class Columns>
  void add_row(int r, const float* p, const Columns& columns, int64_t t, int64_t end) {
    for (; t < end; ++t) {
      const auto* value = columns.at(t);
      const F weight = set1(p[r * kChunk + t]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) at[r][v] = fma(weight, load_kv(value + v * kLanes), at[r][v]);
    }
  }
};

template <int V>
inline void store_all(float* p, const F (&sums)[V]) {
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) store(p + v * kLanes, sums[v]);
}

// ---- scores: s[r][t] = sum over d ascending of q[r][d] * k[d][t] ----

// `ahead`: tiles of V that are wanted soon, or null; a line is asked for now and then, as a burst would hold up the products.
template <int R, int T, bool kAhead, class E>
void score_tiles(const float* q, int64_t ldq, const E* const* k, int64_t head_dim, float* s, const E* const* ahead) {
  constexpr int V = T * kPerTile;
  const E* tile[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) tile[t] = k[t];
  Sums<R, V> sums;
  sums.clear();
  const auto step = [&](int64_t d) {
    sums.multiply([&](int r) { return set1(q[r * ldq + d]); },
                  [&](int v) { return load_kv(tile[v / kPerTile] + d * kTile + v % kPerTile * kLanes); });
  };
  int64_t d = 0;
  for (; d + 4 <= head_dim; d += 4) {
    if constexpr (kAhead) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t)
        for (size_t at = 0; at < 4 * kTile * sizeof(E); at += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(ahead[t] + d * kTile) + at);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) step(d + i);
  }
  for (; d < head_dim; ++d) step(d);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store_all(s + r * kChunk, sums.at[r]);
}

// Tiles [t, end), T at a time, the rest by halves.
template <int R, int T, bool kAhead, class E>
void score_from(const float* q, int64_t ldq, const E* const* k, int64_t head_dim, float* s, int64_t t, int64_t end, const E* const* ahead) {
  for (; t + T <= end; t += T) score_tiles<R, T, kAhead>(q, ldq, k + t, head_dim, s + t * kTile, kAhead ? ahead + t : nullptr);
  if constexpr (T > 1)
    if (t < end) score_from<R, T / 2, kAhead>(q, ldq, k, head_dim, s, t, end, ahead);
}

template <int R, bool kAhead, class E>
void score(const float* q, int64_t ldq, const E* const* k, int64_t head_dim, float* s, int64_t first, int64_t end, const E* const* ahead) {
  constexpr int T = vectors_for(R) / kPerTile;
  score_from<R, (T < 1 ? 1 : T), kAhead>(q, ldq, k, head_dim, s, first, end, ahead);
}

// ---- where the values are ----

inline void fetch(const void* p, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at);
}

// While the values of one chunk are summed, the next chunk's K is asked for: with each token its sixteenth of a tile, of
// which a pass over some columns takes the same part. Decode has too few products a byte for the hardware to keep ahead.
struct Ahead {
  const char* tiles[kTiles];  // null: nothing to fetch
  size_t sixteenth;           // bytes
};

// Columns [d, ...) of the values as they lie in the cache, tile by tile.
template <class E>
struct CachedColumns {
  const E* const* tiles;
  int64_t head_dim, d;
  const Ahead* ahead;
  const E* at(int64_t t) const { return tiles[t / kTile] + t % kTile * head_dim + d; }
  int64_t row() const { return head_dim; }
  int64_t stop(int64_t t, int64_t end) const { return std::min(end, (t / kTile + 1) * kTile); }
  void look_ahead(int64_t t, size_t bytes) const {
    if (ahead && ahead->tiles[t / kTile])
      fetch(ahead->tiles[t / kTile] + size_t(t % kTile) * ahead->sixteenth + size_t(d) * sizeof(E), bytes);
  }
};

// The same of one panel: [kChunk][kWidth] floats.
template <int64_t kWidth>
struct PanelColumns {
  const float* panel;
  const float* at(int64_t t) const { return panel + t * kWidth; }
  constexpr int64_t row() const { return kWidth; }
  int64_t stop(int64_t, int64_t end) const { return end; }
  void look_ahead(int64_t, size_t) const {}
};

// Where a block finds V vectors of columns, and how many it takes at most.
template <class E>
struct CachedValues {
  const E* const* tiles;
  int64_t head_dim;
  const Ahead* ahead;  // may be null
  static constexpr int most(int rows) { return vectors_for(rows); }
  template <int V>
  CachedColumns<E> columns(int64_t d) const {
    return {tiles, head_dim, d, ahead};
  }
};
struct WideValues {
  const float* panel;
  static constexpr int most(int) { return vectors_for(kBlockRows); }
  template <int V>
  PanelColumns<V * kLanes> columns(int64_t) const {
    return {panel};
  }
};

// The values of a block's rows, of which the first is `row`, for columns d and on. On its own: inlined into its callers, the sums find
// no registers.
template <int R, int V, class Columns, class Done>
__attribute__((noinline)) void sum_values(const float* p, Columns columns, const Visible* seen, const BlockSeen& block, int64_t row,
                                          int64_t d, Done done) {
  Sums<R, V> sums;
  sums.add_values(p, columns, seen, block);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) done(row + r, d, sums.at[r]);
}

}  // namespace octavo::OCTAVO_NS
