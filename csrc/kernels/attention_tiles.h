// The products of attention over blocks of rows: scores with tiles of keys, weighted sums of tiles of values.
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

// Of the rows of a block: what any of them sees, and what all do (first <= end).
struct BlockSeen {
  Visible any, all;
};

inline BlockSeen common(const Visible* seen, int64_t rows) {
  BlockSeen b{{kChunk, 0}, seen[0]};
  for (int64_t r = 0; r < rows; ++r) {
    if (seen[r].first < seen[r].end) b.any = {std::min(b.any.first, seen[r].first), std::max(b.any.end, seen[r].end)};
    b.all = {std::max(b.all.first, seen[r].first), std::min(b.all.end, seen[r].end)};
  }
  b.all.end = std::max(b.all.first, b.all.end);
  return b;
}

// Neighbouring tiles of a chunk, of K or of V, and as many that are wanted next: as one is passed over, the other is asked for line
// by line. Decode has too few products a byte for the hardware to keep ahead, and a burst of requests would hold up the products.
template <class E>
struct Tiles {
  const E* at[kTiles];
  const char* next[kTiles];  // these tiles themselves if there is nothing to ask for
};

template <size_t kBytes>
inline void ask_for(const char* p) {
#pragma GCC unroll 8
  for (size_t at = 0; at < kBytes; at += 64) __builtin_prefetch(p + at);
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
  void load_all(const float* p, int64_t ld) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) at[r][v] = load(p + r * ld + v * kLanes);
  }
  void store_all(float* p, int64_t ld) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(p + r * ld + v * kLanes, at[r][v]);
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
};

// ---- scores: s[r][t] = sum over d ascending of q[r][d] * k[d][t] ----

template <int R, int T, class E>
__attribute__((noinline)) void score_tiles(const float* q, int64_t ldq, const E* const* k, const char* const* next, int64_t head_dim,
                                           float* s) {
  constexpr int V = T * kPerTile;
  constexpr size_t kRow = kTile * sizeof(E);
  const E* tile[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) tile[t] = k[t];
  Sums<R, V> sums;
  sums.clear();
  const int64_t share = (head_dim + T - 1) / T;  // one of the next tiles after the other: one pointer less is held
#pragma GCC unroll 1
  for (int t = 0; t < T; ++t) {
    const char* ahead = next[t];
    const int64_t end = std::min(head_dim, (t + 1) * share);
#pragma GCC unroll 1
    for (int64_t d = t * share; d < end; ++d, ahead += T * kRow) {
      ask_for<T * kRow>(ahead);
      sums.multiply([&](int r) { return set1(q[r * ldq + d]); },
                    [&](int v) { return load_kv(tile[v / kPerTile] + d * kTile + v % kPerTile * kLanes); });
    }
  }
  sums.store_all(s, kChunk);
}

// `count` tiles, T at a time, the rest by halves.
template <int R, int T, class E>
void score_from(const float* q, int64_t ldq, const Tiles<E>& k, int64_t t, int64_t count, int64_t head_dim, float* s) {
  for (; t + T <= count; t += T) score_tiles<R, T>(q, ldq, k.at + t, k.next + t, head_dim, s + t * kTile);
  if constexpr (T > 1)
    if (t < count) score_from<R, T / 2>(q, ldq, k, t, count, head_dim, s);
}

template <int R, class E>
void score(const float* q, int64_t ldq, const Tiles<E>& k, int64_t count, int64_t head_dim, float* s) {
  constexpr int T = vectors_for(R) / kPerTile;
  score_from<R, (T < 1 ? 1 : T)>(q, ldq, k, 0, count, head_dim, s);
}

// ---- values: sums[r][d] += sum over t ascending of p[r][t] * v[t][d] ----

// What a block takes from tiles of V: `count` of them, of which the first holds the chunk's tokens from `token` on. A row of V has
// `width` elements.
template <class E>
struct ValueTiles {
  const Tiles<E>& v;
  int64_t token, count, width;
  int64_t clamp(int64_t t) const { return std::min(std::max(t, token), token + count * kTile); }
  const E* at(int64_t t) const { return v.at[(t - token) / kTile] + t % kTile * width; }
};

// Of V vectors of columns, from d on. Tokens that only some rows of the block see are added row by row, the common ones together. On
// its own: inlined into its callers, the sums find no registers.
template <int R, int V, class E>
__attribute__((noinline)) void add_values(const float* p, const ValueTiles<E>& tiles, int64_t d, const Visible* seen,
                                          const BlockSeen& block, float* sums, int64_t ld) {
  const int64_t first = tiles.clamp(block.all.first), end = tiles.clamp(block.all.end);
  const auto alone = [&](int r, int64_t from, int64_t to) {
    if (from >= to) return;
    Sums<1, V> s;
    s.load_all(sums + r * ld, ld);
    for (int64_t t = from; t < to; ++t) {
      const E* value = tiles.at(t) + d;
      s.multiply([&](int) { return set1(p[r * kChunk + t]); }, [&](int v) { return load_kv(value + v * kLanes); });
    }
    s.store_all(sums + r * ld, ld);
  };
  if (block.any.first < first)
    for (int r = 0; r < R; ++r) alone(r, tiles.clamp(seen[r].first), std::min(first, tiles.clamp(seen[r].end)));
  if (first < end) {
    Sums<R, V> s;
    s.load_all(sums, ld);
    for (int64_t t = first; t < end;) {
      const int64_t tile = (t - tiles.token) / kTile, stop = std::min(end, tiles.token + (tile + 1) * kTile);
      const int64_t offset = t % kTile * tiles.width + d;
      const E* value = tiles.v.at[tile] + offset;
      const char* ahead = tiles.v.next[tile] + size_t(offset) * sizeof(E);
      for (; t < stop; ++t, value += tiles.width, ahead += size_t(tiles.width) * sizeof(E)) {
        ask_for<V * kLanes * sizeof(E)>(ahead);
        s.multiply([&](int r) { return set1(p[r * kChunk + t]); }, [&](int v) { return load_kv(value + v * kLanes); });
      }
    }
    s.store_all(sums, ld);
  }
  if (end < block.any.end)
    for (int r = 0; r < R; ++r) alone(r, std::max(end, tiles.clamp(seen[r].first)), tiles.clamp(seen[r].end));
}

// Of all columns from d on, V vectors at a time, the rest by halves.
template <int R, int V, class E>
void add_from(const float* p, const ValueTiles<E>& tiles, int64_t d, const Visible* seen, const BlockSeen& block, float* sums, int64_t ld) {
  for (; d + V * kLanes <= tiles.width; d += V * kLanes) add_values<R, V>(p, tiles, d, seen, block, sums + d, ld);
  if constexpr (V > 1)
    if (d < tiles.width) add_from<R, V / 2>(p, tiles, d, seen, block, sums, ld);
}

template <int R, class E>
void add(const float* p, const ValueTiles<E>& tiles, const Visible* seen, const BlockSeen& block, float* sums, int64_t ld) {
  add_from<R, vectors_for(R)>(p, tiles, 0, seen, block, sums, ld);
}

}  // namespace octavo::OCTAVO_NS
