// Causal grouped-query attention over the paged cache: prefill, chunked prefill and decode in one kernel.
//
// q, y [rows][num_heads * head_dim] fp32; y may be q. The cache's layout and the order of every sum: kernels.h.
// A unit of work is one kv head of one sequence and a tile of its query rows; "row" below means one query row of one of the
// query heads that share the kv head, so that K and V of a chunk are read (and, if it pays, widened) once for all of them.
// The rows of a block are computed together, but each by its own operations in its own order.
#include <algorithm>

#include "kernels/decl.h"
#include "kernels/math.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kChunk = kAttentionChunk;
constexpr int64_t kTiles = kChunk / kTile;
constexpr int64_t kMaxRows = 96;     // of a unit; with head_dim 64 its state and a widened chunk fit into 256 KiB
constexpr int64_t kWidenAbove = 12;  // rows from which a bf16 chunk is widened into scratch instead of in each use
constexpr int64_t kSplitRows = 16;   // a unit of at most so many rows may be shared by threads, chunk by chunk
constexpr int kPerTile = int(kTile) / kLanes;
constexpr int kBlockRows = 6;
const float kInf = std::numeric_limits<float>::infinity();

inline F load_kv(const float* p) { return load(p); }
inline F load_kv(const uint16_t* p) { return load_bf16(p); }

int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Vectors of one row that a block of `rows` rows computes together: as many as the registers hold, a power of two.
constexpr int vectors_for(int rows) {
  const int accumulators = kRegisters >= 32 ? 24 : 12;
  int n = 8;
  while (n > 1 && n * rows > accumulators) n /= 2;
  return n;
}

// sum[r][v] += left(r) * right(v). The longer side is loaded last, one at a time: as few registers as possible are taken.
template <int R, int V, class Left, class Right>
inline void multiply(F (&sum)[R][V], Left left, Right right) {
  if constexpr (R > V) {
    F all[V];
    for (int v = 0; v < V; ++v) all[v] = right(v);
    for (int r = 0; r < R; ++r) {
      const F one = left(r);
      for (int v = 0; v < V; ++v) sum[r][v] = fma(one, all[v], sum[r][v]);
    }
  } else {
    F all[R];
    for (int r = 0; r < R; ++r) all[r] = left(r);
    for (int v = 0; v < V; ++v) {
      const F one = right(v);
      for (int r = 0; r < R; ++r) sum[r][v] = fma(all[r], one, sum[r][v]);
    }
  }
}

// ---- scores: s[r][t] = sum over d ascending of q[r][d] * k[d][t] ----

// `ahead`: tiles of V that are wanted soon, or null; a line is asked for now and then, as a burst would hold up the products.
template <int R, int T, class E>
void score_tiles(const float* q, int64_t ldq, const E* const* k, int64_t head_dim, float* s, const E* const* ahead) {
  constexpr int V = T * kPerTile;
  F sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = zero();
  for (int64_t d = 0; d < head_dim; ++d) {
    if (ahead && d * kTile * sizeof(E) % 64 == 0)
      for (int t = 0; t < T; ++t) __builtin_prefetch(ahead[t] + d * kTile);
    multiply<R, V>(
        sum, [&](int r) { return set1(q[r * ldq + d]); },
        [&](int v) { return load_kv(k[v / kPerTile] + d * kTile + v % kPerTile * kLanes); });
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(s + r * kChunk + v * kLanes, sum[r][v]);
}

// Tiles [t, end), T at a time, the rest by halves.
template <int R, int T, class E>
void score_from(const float* q, int64_t ldq, const E* const* k, int64_t head_dim, float* s, int64_t t, int64_t end, const E* const* ahead) {
  for (; t + T <= end; t += T) score_tiles<R, T>(q, ldq, k + t, head_dim, s + t * kTile, ahead ? ahead + t : nullptr);
  if constexpr (T > 1)
    if (t < end) score_from<R, T / 2>(q, ldq, k, head_dim, s, t, end, ahead);
}

template <int R, class E>
void score(const float* q, int64_t ldq, const E* const* k, int64_t head_dim, float* s, int64_t first, int64_t end, const E* const* ahead) {
  constexpr int T = vectors_for(R) / kPerTile;
  score_from<R, (T < 1 ? 1 : T)>(q, ldq, k, head_dim, s, first, end, ahead);
}

// While the values of one chunk are summed, the next chunk's K is asked for: with each token its sixteenth of a tile, of
// which a pass over some columns takes the same part. Decode has too few products a byte for the hardware to keep ahead.
struct Ahead {
  const char* tiles[kTiles];  // null: nothing to fetch
  size_t sixteenth;           // bytes
};

inline void fetch(const void* p, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at);
}

// ---- values: o[r][d] += sum over tokens [first, end) ascending of p[r][t] * v[t][d] ----

template <int R, int V, class E>
void value_columns(const float* p, const E* const* values, int64_t ldv, int64_t d, float* o, int64_t ldo, int64_t first, int64_t end,
                   const Ahead* ahead) {
  F sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = load(o + r * ldo + d + v * kLanes);
  for (int64_t t = first; t < end;) {
    const E* value = values[t / kTile] + t % kTile * ldv + d;
    const char* next = ahead ? ahead->tiles[t / kTile] : nullptr;
    const int64_t stop = std::min(end, (t / kTile + 1) * kTile);
    for (; t < stop; ++t, value += ldv) {
      if (next) fetch(next + size_t(t % kTile) * ahead->sixteenth + size_t(d) * sizeof(E), V * kLanes * sizeof(E));
      multiply<R, V>(sum, [&](int r) { return set1(p[r * kChunk + t]); }, [&](int v) { return load_kv(value + v * kLanes); });
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(o + r * ldo + d + v * kLanes, sum[r][v]);
}

struct Visible {
  int64_t first, end;
};  // positions of a chunk that a row sees, relative to the chunk; empty if first >= end

// Columns [d, d + V * kLanes) of R rows: tokens that only some rows see are added row by row, the common ones together.
template <int R, int V, class E>
void value_rows(const float* p, const E* const* v, int64_t ldv, int64_t d, float* o, int64_t ldo, const Visible* seen, const Ahead* ahead) {
  int64_t first = seen[0].first, end = seen[0].end;
  for (int r = 1; r < R; ++r) first = std::max(first, seen[r].first), end = std::min(end, seen[r].end);
  if (R == 1 || first >= end) {
    for (int r = 0; r < R; ++r)
      if (seen[r].first < seen[r].end) value_columns<1, V>(p + r * kChunk, v, ldv, d, o + r * ldo, ldo, seen[r].first, seen[r].end, ahead);
    return;
  }
  for (int r = 0; r < R; ++r)
    if (seen[r].first < first) value_columns<1, V>(p + r * kChunk, v, ldv, d, o + r * ldo, ldo, seen[r].first, first, nullptr);
  value_columns<R, V>(p, v, ldv, d, o, ldo, first, end, ahead);
  for (int r = 0; r < R; ++r)
    if (end < seen[r].end) value_columns<1, V>(p + r * kChunk, v, ldv, d, o + r * ldo, ldo, end, seen[r].end, nullptr);
}

// Calls f with the number of rows, 1 to kBlockRows, as a constant.
template <int N>
struct Constant {
  static constexpr int value = N;
};
template <class Fn>
void with_rows(int rows, Fn f) {
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

// ---- one unit of work ----

struct Scratch {
  float *q, *out, *chunk_out, *scores, *keys, *values;
  size_t layout(int64_t head_dim, uint8_t* base) {
    const int64_t width = padded(head_dim);
    size_t used = 0;
    const auto place = [&](float*& part, int64_t count) {
      if (base) part = reinterpret_cast<float*>(base + used);
      used += size_t(count) * 4;
    };
    place(q, kMaxRows * width);
    place(out, kMaxRows * width);
    place(chunk_out, kMaxRows * width);
    place(scores, kMaxRows * kChunk);
    place(keys, kChunk * head_dim);
    place(values, kChunk * width);
    return used + 64;
  }
};

struct Unit {
  int64_t seq, kv_head;
  int64_t first_head, num_heads;  // query heads [first_head, first_head + num_heads) of this kv head
  int64_t first_row, num_rows;    // query rows, in the batch
  int64_t position;               // of first_row
  int64_t count() const { return num_rows * num_heads; }
  int64_t first_chunk(int64_t window) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) / kChunk : 0; }
  int64_t end_chunk() const { return (position + num_rows - 1) / kChunk + 1; }
};

class Worker {
 public:
  // `next`: what this thread computes after this unit, or null; its first K is asked for while the last values are summed.
  Worker(const AttentionArgs& a, const Unit& u, const Scratch& s, const Unit* next)
      : a_(a),
        u_(u),
        next_(next),
        s_(s),
        dim_(a.kv.head_dim),
        width_(padded(dim_)),
        n_(u.count()),
        blocks_((n_ + kBlockRows - 1) / kBlockRows) {
    const bool whole_vectors = dim_ % kLanes == 0;
    widen_ = !whole_vectors || (a.kv.type == KvType::bf16 && n_ > kWidenAbove);
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t d = 0; d < dim_; ++d) s_.q[i * width_ + d] = query(i)[d] * a.scale;
  }

  // Chunks [first, end), merged as they come.
  void run(int64_t first, int64_t end) {
    start();
    end_ = end;
    for (int64_t c = first; c < end; ++c) {
      compute(c);
      merge(c, m_, l_, s_.chunk_out);
    }
    for (int64_t i = 0; i < n_; ++i) write(i);
  }

  // Chunks [first, end) left apart in `parts`, where `origin` is the unit's first chunk, for merge_parts().
  void run_apart(int64_t first, int64_t end, int64_t origin, float* parts) {
    end_ = end;
    for (int64_t c = first; c < end; ++c) {
      compute(c);
      float* p = parts + (c - origin) * part_floats(n_, dim_);
      std::memcpy(p, m_, size_t(n_) * 4);
      std::memcpy(p + kMaxRows, l_, size_t(n_) * 4);
      std::memcpy(p + 2 * kMaxRows, s_.chunk_out, size_t(n_ * width_) * 4);
    }
  }

  void merge_parts(int64_t first, int64_t end, const float* parts) {
    start();
    for (int64_t c = first; c < end; ++c, parts += part_floats(n_, dim_)) merge(c, parts, parts + kMaxRows, parts + 2 * kMaxRows);
    for (int64_t i = 0; i < n_; ++i) write(i);
  }

  // One chunk's results: maxima, sums, values.
  static int64_t part_floats(int64_t rows, int64_t head_dim) { return 2 * kMaxRows + rows * padded(head_dim); }

 private:
  int64_t offset(int64_t i) const { return (u_.first_head + i % u_.num_heads) * dim_; }
  const float* query(int64_t i) const { return a_.q + (u_.first_row + i / u_.num_heads) * a_.ldq + offset(i); }

  Visible visible(int64_t chunk, int64_t i) const {
    const int64_t position = u_.position + i / u_.num_heads, start = chunk * kChunk;
    const int64_t first = a_.window > 0 ? std::max<int64_t>(0, position - a_.window + 1) : 0;
    return {std::max<int64_t>(0, first - start), std::min(kChunk, position + 1 - start)};
  }

  // Rows of block b: as even as possible, at most kBlockRows.
  int64_t block_start(int64_t b) const { return n_ * b / blocks_; }

  void compute(int64_t chunk) {
    for (int64_t i = 0; i < n_; ++i) seen_[i] = visible(chunk, i);
    int64_t first = kChunk, end = 0;
    for (int64_t i = 0; i < n_; ++i)
      if (seen_[i].first < seen_[i].end) first = std::min(first, seen_[i].first), end = std::max(end, seen_[i].end);
    if (a_.kv.type == KvType::f32)
      compute_as<float>(chunk, first, end);
    else
      compute_as<uint16_t>(chunk, first, end);
  }

  // Where tile t of a chunk begins in the pool of K or V.
  template <class E>
  const E* tile_in(const uint8_t* pool, const Unit& u, int64_t chunk, int64_t t) const {
    const KvLayer& kv = a_.kv;
    const int64_t position = chunk * kChunk + t * kTile;
    const int64_t block = a_.block_table[u.seq * a_.ld_block_table + position / kv.block_size];
    const int64_t tile = (block * kv.num_kv_heads + u.kv_head) * (kv.block_size / kTile) + position % kv.block_size / kTile;
    return reinterpret_cast<const E*>(pool) + tile * kTile * dim_;
  }

  // The K of the chunk after this one: of this unit, or the first of the thread's next.
  template <class E>
  Ahead after(int64_t chunk) const {
    Ahead ahead{{}, size_t(dim_) * sizeof(E)};
    const bool same = chunk + 1 < end_;
    const Unit* u = same ? &u_ : next_;
    if (!u) return ahead;
    const int64_t c = same ? chunk + 1 : u->first_chunk(a_.window);
    const int64_t tokens = std::min(kChunk, u->position + u->num_rows - c * kChunk);
    for (int64_t t = 0; t * kTile < tokens; ++t) ahead.tiles[t] = reinterpret_cast<const char*>(tile_in<E>(a_.kv.k, *u, c, t));
    return ahead;
  }

  template <class E>
  void compute_as(int64_t chunk, int64_t first, int64_t end) {
    const E *keys[kTiles] = {}, *values[kTiles] = {};
    for (int64_t t = first / kTile; t * kTile < end; ++t) {
      keys[t] = tile_in<E>(a_.kv.k, u_, chunk, t);
      values[t] = tile_in<E>(a_.kv.v, u_, chunk, t);
    }
    if (!widen_) {
      const Ahead ahead = after<E>(chunk);
      return compute_on(keys, values, dim_, first, end, blocks_ == 1 ? &ahead : nullptr);
    }
    const float *wide_keys[kTiles] = {}, *wide_values[kTiles] = {};
    for (int64_t t = first / kTile; t * kTile < end; ++t) {
      float* k = s_.keys + t * kTile * dim_;
      float* v = s_.values + t * kTile * width_;
      for (int64_t d = 0; d < dim_ * kTile; d += kLanes) store(k + d, load_kv(keys[t] + d));
      for (int64_t i = 0; i < kTile; ++i) widen_row(values[t] + i * dim_, v + i * width_);
      wide_keys[t] = k;
      wide_values[t] = v;
    }
    compute_on(wide_keys, wide_values, width_, first, end, nullptr);
  }

  void widen_row(const float* from, float* to) const {
    std::memcpy(to, from, size_t(dim_) * 4);
    for (int64_t d = dim_; d < width_; ++d) to[d] = 0.0f;
  }
  void widen_row(const uint16_t* from, float* to) const {
    int64_t d = 0;
    for (; d + kLanes <= dim_; d += kLanes) store(to + d, load_bf16(from + d));
    for (; d < dim_; ++d) to[d] = bf16_to_float(from[d]);
    for (; d < width_; ++d) to[d] = 0.0f;
  }

  template <class E>
  void compute_on(const E* const* keys, const E* const* values, int64_t ldv, int64_t first, int64_t end, const Ahead* ahead) {
    // Few tiles at a time, so that a tile of K stays in the first cache while all rows pass over it.
    const int64_t together = std::max(1, vectors_for(int((n_ + blocks_ - 1) / blocks_)) / kPerTile), last = (end + kTile - 1) / kTile;
    for (int64_t t = first / kTile; t < last; t += together) {
      const int64_t stop = std::min(t + together, last);
      for (int64_t b = 0; b < blocks_; ++b) scores(b, keys, t, stop, ahead ? values : nullptr);
    }
    for (int64_t i = 0; i < n_; ++i) weigh(i);
    std::memset(s_.chunk_out, 0, size_t(n_ * width_) * 4);
    const int64_t vectors = ldv / kLanes, most = vectors_for(int((n_ + blocks_ - 1) / blocks_));
    for (int64_t at = 0, v = most; at < vectors; at += v) {
      while (at + v > vectors) v /= 2;
      for (int64_t b = 0; b < blocks_; ++b) value_block(b, values, ldv, at * kLanes, int(v), ahead);
    }
  }

  // Scores of block b for its tiles within [t, end): tiles that no row of the block sees are left out.
  template <class E>
  void scores(int64_t b, const E* const* keys, int64_t t, int64_t end, const E* const* ahead) {
    const int64_t from = block_start(b), to = block_start(b + 1);
    int64_t low = kChunk, high = 0;
    for (int64_t i = from; i < to; ++i)
      if (seen_[i].first < seen_[i].end) low = std::min(low, seen_[i].first), high = std::max(high, seen_[i].end);
    t = std::max(t, low / kTile);
    end = std::min(end, (high + kTile - 1) / kTile);
    if (t >= end) return;
    with_rows(int(to - from), [&](auto rows) {
      score<decltype(rows)::value>(s_.q + from * width_, width_, keys, dim_, s_.scores + from * kChunk, t, end, ahead);
    });
  }

  // Columns [d, d + v * kLanes) of block b.
  template <class E>
  void value_block(int64_t b, const E* const* values, int64_t ldv, int64_t d, int v, const Ahead* ahead) {
    const int64_t from = block_start(b), to = block_start(b + 1);
    with_rows(int(to - from), [&](auto rows) {
      constexpr int R = decltype(rows)::value, kMost = vectors_for(R);
      const auto add_columns = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        if constexpr (V <= kMost)
          value_rows<R, V>(s_.scores + from * kChunk, values, ldv, d, s_.chunk_out + from * width_, width_, seen_ + from, ahead);
      };
      if (v == 8) return add_columns(Constant<8>());
      if (v == 4) return add_columns(Constant<4>());
      if (v == 2) return add_columns(Constant<2>());
      return add_columns(Constant<1>());
    });
  }

  // Row i: scores become weights relative to the chunk's own maximum.
  void weigh(int64_t i) {
    const Visible seen = seen_[i];
    m_[i] = -kInf;
    l_[i] = 0.0f;
    if (seen.first >= seen.end) return;
    float* s = s_.scores + i * kChunk;
    const int64_t low = seen.first / kTile * kTile, high = (seen.end + kTile - 1) / kTile * kTile;
    if (a_.soft_cap > 0.0f) {
      const F cap = set1(a_.soft_cap);
      for (int64_t t = low; t < high; t += kLanes) store(s + t, mul(cap, tanh(div(load(s + t), cap))));
    }
    for (int64_t t = low; t < seen.first; ++t) s[t] = -kInf;
    for (int64_t t = seen.end; t < high; ++t) s[t] = -kInf;
    F top = set1(-kInf);
    for (int64_t t = low; t < high; t += kLanes) top = max(top, load(s + t));
    m_[i] = reduce_max(top);
    const F m = set1(m_[i]);
    F sum = zero();
    for (int64_t t = low; t < high; t += kLanes) {
      const F p = exp_nonpositive(sub(load(s + t), m));
      sum = octavo::OCTAVO_NS::add(sum, p);
      store(s + t, p);
    }
    l_[i] = reduce_add(sum);
  }

  void start() {
    for (int64_t i = 0; i < kMaxRows; ++i) total_m_[i] = -kInf, total_l_[i] = 0.0f;
    std::memset(s_.out, 0, size_t(n_ * width_) * 4);
  }

  // Merges a chunk's results into the totals. Rows that see nothing of the chunk are left alone.
  void merge(int64_t chunk, const float* m, const float* l, const float* o) {
    float old_factor[kMaxRows], new_factor[kMaxRows];
    for (int64_t i = 0; i < n_; i += kLanes) {
      const F before = load(total_m_ + i), now = load(m + i), top = max(now, before);
      store(old_factor + i, exp_nonpositive(sub(before, top)));
      store(new_factor + i, exp_nonpositive(sub(now, top)));
    }
    for (int64_t i = 0; i < n_; ++i) {
      const Visible seen = visible(chunk, i);
      if (seen.first >= seen.end) continue;
      total_m_[i] = m[i] > total_m_[i] ? m[i] : total_m_[i];
      total_l_[i] = total_l_[i] * old_factor[i] + l[i] * new_factor[i];
      const F a = set1(old_factor[i]), b = set1(new_factor[i]);
      float* out = s_.out + i * width_;
      for (int64_t d = 0; d < width_; d += kLanes) store(out + d, fma(load(out + d), a, mul(load(o + i * width_ + d), b)));
    }
  }

  void write(int64_t i) const {
    float* y = a_.y + (u_.first_row + i / u_.num_heads) * a_.ldy + offset(i);
    const F inverse = set1(1.0f / total_l_[i]);
    const float* out = s_.out + i * width_;
    int64_t d = 0;
    for (; d + kLanes <= dim_; d += kLanes) store(y + d, mul(load(out + d), inverse));
    if (d < dim_) store_n(y + d, mul(load(out + d), inverse), int(dim_ - d));
  }

  const AttentionArgs& a_;
  const Unit& u_;
  const Unit* next_;
  const Scratch& s_;
  const int64_t dim_, width_, n_, blocks_;
  bool widen_;
  int64_t end_ = 0;  // chunks from here on are not this thread's
  Visible seen_[kMaxRows];
  alignas(64) float m_[kMaxRows], l_[kMaxRows], total_m_[kMaxRows], total_l_[kMaxRows];
};

// ---- the division of the work ----

// Visits every unit, in an order and a shape that depend on the arguments alone.
template <class Fn>
void for_each_unit(const AttentionArgs& a, int64_t tile_rows, Fn f) {
  const int64_t group = a.num_heads / a.kv.num_kv_heads, heads = std::min(group, kMaxRows);
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t begin = a.query_start[s], end = a.query_start[s + 1];
    for (int64_t h = 0; h < a.kv.num_kv_heads; ++h)
      for (int64_t first = 0; first < group; first += heads)
        for (int64_t row = begin; row < end; row += tile_rows) {
          const int64_t rows = std::min(tile_rows, end - row);
          f(Unit{s, h, h * group + first, std::min(heads, group - first), row, rows, a.seq_lens[s] - (end - row)});
        }
  }
}

// About what a token of context costs, in products with one row: reading and widening K and V is worth some ten rows.
int64_t weight(const Unit& u) { return u.count() + 10; }

int64_t cost(const Unit& u, int64_t window) {
  const int64_t tokens = u.position + u.num_rows - u.first_chunk(window) * kChunk;
  return weight(u) * (tokens + 16);
}

// Query rows of a unit: many rows use a chunk of K and V well, but each thread should find several units.
int64_t choose_tile_rows(const AttentionArgs& a, int nth) {
  const int64_t heads = std::min(a.num_heads / a.kv.num_kv_heads, kMaxRows);
  int64_t rows = std::max<int64_t>(1, kMaxRows / heads);
  while (rows > 1 && rows * heads > 24 && (a.rows / rows + a.num_seqs) * a.kv.num_kv_heads < 6 * nth) rows = (rows + 1) / 2;
  return rows;
}

// One unit that several threads share: a counter, then the chunks' partial results.
struct Shared {
  uint8_t* base;
  size_t bytes;
  float* parts() const { return reinterpret_cast<float*>(base + 64); }
  bool fits(const Unit& u, int64_t chunks, int64_t head_dim) const {
    return base && 64 + size_t(chunks * Worker::part_floats(u.count(), head_dim)) * 4 <= bytes;
  }
  // True for the last of `sharers` to arrive, who sees what all the others have written.
  bool last_of(int sharers) const {
    int32_t* counter = reinterpret_cast<int32_t*>(base);
    if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) < sharers) return false;
    __atomic_store_n(counter, 0, __ATOMIC_RELAXED);
    return true;
  }
};

class Division {
 public:
  Division(const AttentionArgs& a, int64_t total, int nth) : a_(a), total_(std::max<int64_t>(1, total)), nth_(nth) {}

  // The thread whose share of the total cost holds the point `at`.
  int owner(int64_t at) const { return int(std::min<int64_t>(nth_ - 1, at * nth_ / total_)); }
  int owner_of_chunk(const Unit& u, int64_t start, int64_t chunk) const {
    return owner(start + weight(u) * ((chunk - u.first_chunk(a_.window)) * kChunk + kChunk / 2));
  }
  // A unit that begins in thread t's share and ends in a later one's is shared through slot t; no other unit can be.
  Shared slot(int thread) const {
    const size_t bytes = a_.shared ? a_.shared_bytes / size_t(nth_) / 64 * 64 : 0;
    return {bytes > 0 ? a_.shared + size_t(thread) * bytes : nullptr, bytes};
  }

 private:
  const AttentionArgs& a_;
  const int64_t total_;
  const int nth_;
};

// What of a unit is one thread's: chunks [from, to), whole or apart.
struct Part {
  Unit unit;
  int64_t from, to;
  int sharers;  // threads that share the unit; 1: it is whole
  int head;     // the first of them
};

// The part of a unit, whose costs begin at `start`, that is thread `ith`'s; none if from >= to.
Part part_of(const AttentionArgs& a, const Division& division, const Unit& u, int64_t start, int ith) {
  const int64_t first = u.first_chunk(a.window), end = u.end_chunk();
  const int head = division.owner_of_chunk(u, start, first), tail = division.owner_of_chunk(u, start, end - 1);
  if (head == tail || u.count() > kSplitRows || !division.slot(head).fits(u, end - first, a.kv.head_dim)) {
    const int owner = head == tail ? head : division.owner(start + cost(u, a.window) / 2);
    return {u, first, owner == ith ? end : first, 1, head};
  }
  Part part{u, end, first, 0, head};
  for (int64_t c = first, previous = -1; c < end; ++c) {
    const int owner = division.owner_of_chunk(u, start, c);
    part.sharers += owner != previous;
    previous = owner;
    if (owner == ith) part.from = std::min(part.from, c), part.to = c + 1;
  }
  return part;
}

void run_part(const AttentionArgs& a, const Division& division, const Part& part, const Part* next, const Scratch& scratch) {
  const int64_t first = part.unit.first_chunk(a.window), end = part.unit.end_chunk();
  Worker worker(a, part.unit, scratch, next ? &next->unit : nullptr);
  if (part.sharers == 1) return worker.run(first, end);
  const Shared shared = division.slot(part.head);
  worker.run_apart(part.from, part.to, first, shared.parts());
  if (shared.last_of(part.sharers)) worker.merge_parts(first, end, shared.parts());
}

}  // namespace

size_t attention_scratch(int64_t head_dim) { return Scratch{}.layout(head_dim, nullptr); }

void attention(const AttentionArgs& a, int ith, int nth) {
  Scratch scratch{};
  scratch.layout(a.kv.head_dim, a.scratch);
  const int64_t tile_rows = choose_tile_rows(a, nth);
  int64_t total = 0;
  for_each_unit(a, tile_rows, [&](const Unit& u) { total += cost(u, a.window); });
  const Division division(a, total, nth);
  int64_t start = 0;
  Part parts[2];  // one is computed when the next is known
  int count = 0;
  for_each_unit(a, tile_rows, [&](const Unit& u) {
    const Part part = part_of(a, division, u, start, ith);
    start += cost(u, a.window);
    if (part.from >= part.to) return;
    parts[count % 2] = part;
    if (count++ > 0) run_part(a, division, parts[count % 2], &part, scratch);
  });
  if (count > 0) run_part(a, division, parts[(count - 1) % 2], nullptr, scratch);
}

}  // namespace octavo::OCTAVO_NS
