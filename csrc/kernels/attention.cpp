// Causal grouped-query attention over the paged cache: prefill, chunked prefill and decode in one kernel.
//
// q, y [rows][num_heads * head_dim] fp32; y may be q. The cache's layout and the order of every sum: kernels.h.
// A unit of work is one kv head of one sequence and a tile of its query rows; "row" below means one query row of one of the
// query heads that share the kv head, so that K and V of a chunk are read (and, if it pays, widened) once for all of them.
// The rows of a block are computed together, but each by its own operations in its own order.
#include <algorithm>

#include "kernels/attention_tiles.h"
#include "kernels/decl.h"
#include "kernels/math.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int64_t kMaxRows = 96;                 // of a unit; with head_dim 64 its state and its queries fit into 128 KiB
constexpr int64_t kWidenAbove = 12;              // rows from which a chunk is widened into scratch instead of in each use
constexpr int64_t kSplitRows = 16;               // a unit of at most so many rows may be shared by threads, chunk by chunk
constexpr int kPanel = vectors_for(kBlockRows);  // vectors of V's columns that lie together when widened
constexpr int kTogether = kPanel / kPerTile > 1 ? kPanel / kPerTile : 1;  // tiles of K that are widened together
const float kInf = std::numeric_limits<float>::infinity();

int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// ---- one unit of work ----

struct Scratch {
  float *q, *out, *scores, *keys, *values;
  size_t layout(int64_t head_dim, uint8_t* base) {
    const int64_t width = padded(head_dim);
    size_t used = 0;
    const auto place = [&](float*& part, int64_t count) {
      if (base) part = reinterpret_cast<float*>(base + used);
      used += size_t(count) * 4;
    };
    place(q, kMaxRows * width);
    place(out, kMaxRows * width);
    place(scores, kMaxRows * kChunk);
    place(keys, kTogether * kTile * head_dim);
    place(values, kChunk * kPanel * kLanes);
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

// What becomes of V vectors of row i's values, from column d on: added to the totals, or left as they are for merge_parts().
struct Merge {
  float* out;
  int64_t width;
  const Visible* seen;
  const float *before, *now;  // what the totals and the values are multiplied with
  template <int V>
  void operator()(int64_t i, int64_t d, const F (&sums)[V]) const {
    if (seen[i].first >= seen[i].end) return;
    float* o = out + i * width + d;
    const F old_factor = set1(before[i]), factor = set1(now[i]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(o + v * kLanes, fma(load(o + v * kLanes), old_factor, mul(sums[v], factor)));
  }
};
struct Keep {
  float* out;
  int64_t width;
  template <int V>
  void operator()(int64_t i, int64_t d, const F (&sums)[V]) const {
    store_all(out + i * width + d, sums);
  }
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
    widen_ = !whole_vectors || n_ > kWidenAbove;
    for (int64_t b = 0; b <= blocks_; ++b) block_start_[b] = n_ * b / blocks_;
    each_row([&](int64_t i, int64_t row, int64_t at) {
      const float* q = a.q + row * a.ldq + at;
      for (int64_t d = 0; d < dim_; ++d) s_.q[i * width_ + d] = q[d] * a.scale;
    });
  }

  // Chunks [first, end), merged as they come.
  void run(int64_t first, int64_t end) {
    start();
    end_ = end;
    for (int64_t c = first; c < end; ++c) {
      compute(c, [&] { absorb(m_, l_); }, Merge{s_.out, width_, seen_, old_factor_, new_factor_});
    }
    write();
  }

  // Chunks [first, end) left apart in `parts`, where `origin` is the unit's first chunk, for merge_parts().
  void run_apart(int64_t first, int64_t end, int64_t origin, float* parts) {
    end_ = end;
    for (int64_t c = first; c < end; ++c) {
      float* p = parts + (c - origin) * part_floats(n_, dim_);
      float* out = p + 2 * kMaxRows;
      compute(c, [] {}, Keep{out, width_});
      std::memcpy(p, m_, size_t(n_) * 4);
      std::memcpy(p + kMaxRows, l_, size_t(n_) * 4);
    }
  }

  void merge_parts(int64_t first, int64_t end, const float* parts) {
    start();
    for (int64_t c = first; c < end; ++c, parts += part_floats(n_, dim_)) {
      look(c);
      absorb(parts, parts + kMaxRows);
      const float* out = parts + 2 * kMaxRows;
      for (int64_t i = 0; i < n_; ++i)
        for (int64_t d = 0; d < width_; d += kLanes) {
          const F sums[1] = {load(out + i * width_ + d)};
          Merge{s_.out, width_, seen_, old_factor_, new_factor_}(i, d, sums);
        }
    }
    write();
  }

  // One chunk's results: maxima, sums, values.
  static int64_t part_floats(int64_t rows, int64_t head_dim) { return 2 * kMaxRows + rows * padded(head_dim); }

 private:
  // f(i, row of the batch, first column) for each row.
  template <class Fn>
  void each_row(Fn f) const {
    for (int64_t r = 0, i = 0; r < u_.num_rows; ++r)
      for (int64_t h = 0; h < u_.num_heads; ++h, ++i) f(i, u_.first_row + r, (u_.first_head + h) * dim_);
  }

  // What each row sees of a chunk, each block, and all of them together.
  Visible look(int64_t chunk) {
    each_row([&](int64_t i, int64_t row, int64_t) {
      const int64_t start = chunk * kChunk, position = u_.position + row - u_.first_row;
      const int64_t first = a_.window > 0 ? std::max<int64_t>(0, position - a_.window + 1) : 0;
      seen_[i] = {std::max<int64_t>(0, first - start), std::min(kChunk, position + 1 - start)};
    });
    Visible all{kChunk, 0};
    for (int64_t b = 0; b < blocks_; ++b) {
      blocks_seen_[b] = common(seen_ + block_start_[b], block_start_[b + 1] - block_start_[b]);
      all = {std::min(all.first, blocks_seen_[b].any.first), std::max(all.end, blocks_seen_[b].any.end)};
    }
    return all;
  }
  bool sees(int64_t i) const { return seen_[i].first < seen_[i].end; }

  // One chunk. weighed(): its maxima and sums are known; done(i, d, sum): a vector of row i's values is.
  template <class Weighed, class Done>
  void compute(int64_t chunk, Weighed weighed, Done done) {
    const Visible all = look(chunk);
    if (a_.kv.type == KvType::f32)
      compute_as<float>(chunk, all, weighed, done);
    else
      compute_as<uint16_t>(chunk, all, weighed, done);
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

  template <class E, class Weighed, class Done>
  void compute_as(int64_t chunk, const Visible& all, Weighed weighed, Done done) {
    const E *keys[kTiles] = {}, *values[kTiles] = {};
    for (int64_t t = all.first / kTile; t * kTile < all.end; ++t) {
      keys[t] = tile_in<E>(a_.kv.k, u_, chunk, t);
      values[t] = tile_in<E>(a_.kv.v, u_, chunk, t);
    }
    if (widen_) {
      score_widened(keys, all);
      weigh();
      weighed();
      return sum_widened(values, all, done);
    }
    const Ahead ahead = after<E>(chunk);
    const int64_t last = (all.end + kTile - 1) / kTile;
    const int64_t together = std::max(1, vectors_for(int((n_ + blocks_ - 1) / blocks_)) / kPerTile);
    for (int64_t t = all.first / kTile; t < last; t += together) {
      for (int64_t b = 0; b < blocks_; ++b) score_block(b, keys, t, std::min(t + together, last), blocks_ == 1 ? values : nullptr);
    }
    weigh();
    weighed();
    const CachedValues<E> cached{values, dim_, blocks_ == 1 ? &ahead : nullptr};
    const int64_t vectors = dim_ / kLanes;
    for (int64_t at = 0, v = vectors_for(int((n_ + blocks_ - 1) / blocks_)); at < vectors; at += v) {
      while (at + v > vectors) v /= 2;
      for (int64_t b = 0; b < blocks_; ++b) value_block(b, at, int(v), cached, done);
    }
  }

  // Few tiles at a time, so that a tile of K stays in the first cache while all rows pass over it.
  template <class E>
  void score_widened(const E* const* keys, const Visible& all) {
    const int64_t last = (all.end + kTile - 1) / kTile;
    for (int64_t t = all.first / kTile; t < last; t += kTogether) {
      const float* wide[kTiles] = {};
      for (int64_t i = t; i < std::min(t + kTogether, last); ++i) {
        float* k = s_.keys + (i - t) * kTile * dim_;
        for (int64_t d = 0; d < dim_ * kTile; d += kLanes) store(k + d, load_kv(keys[i] + d));
        wide[i] = k;
      }
      for (int64_t b = 0; b < blocks_; ++b) score_block<float>(b, wide, t, std::min(t + kTogether, last), nullptr);
    }
  }

  // Some columns at a time, side by side: a row of V is as long as a power of two, of which the first cache holds few.
  template <class E, class Done>
  void sum_widened(const E* const* values, const Visible& all, Done done) {
    const int64_t vectors = width_ / kLanes;
    for (int64_t at = 0, v = kPanel; at < vectors; at += v) {
      while (at + v > vectors) v /= 2;
      for (int64_t t = all.first; t < all.end; ++t) {
        const E* from = values[t / kTile] + t % kTile * dim_ + at * kLanes;
        float* to = s_.values + t * v * kLanes;
        if (v == kPanel && (at + v) * kLanes <= dim_)
          for (int i = 0; i < kPanel; ++i) store(to + i * kLanes, load_kv(from + i * kLanes));
        else
          widen_some(from, dim_ - at * kLanes, v * kLanes, to);
      }
      for (int64_t b = 0; b < blocks_; ++b) value_block(b, at, int(v), WideValues{s_.values}, done);
    }
  }

  // `count` columns of V, of which there are `left`, then zeros.
  template <class E>
  static void widen_some(const E* from, int64_t left, int64_t count, float* to) {
    for (int64_t d = 0; d < count; d += kLanes) {
      E copy[kLanes] = {};
      if (d < left) std::memcpy(copy, from + d, size_t(std::min<int64_t>(kLanes, left - d)) * sizeof(E));
      store(to + d, load_kv(copy));
    }
  }

  // Scores of block b for its tiles within [t, end): tiles that no row of the block sees are left out.
  template <class E>
  void score_block(int64_t b, const E* const* keys, int64_t t, int64_t end, const E* const* ahead) {
    const Visible seen = blocks_seen_[b].any;
    t = std::max(t, seen.first / kTile);
    end = std::min(end, (seen.end + kTile - 1) / kTile);
    if (t >= end) return;
    const int64_t from = block_start_[b];
    const float* q = s_.q + from * width_;
    float* s = s_.scores + from * kChunk;
    with_rows(int(block_start_[b + 1] - from), [&](auto rows) {
      constexpr int R = decltype(rows)::value;
      ahead ? score<R, true>(q, width_, keys, dim_, s, t, end, ahead) : score<R, false>(q, width_, keys, dim_, s, t, end, ahead);
    });
  }

  // Vectors [at, at + v) of block b's values.
  template <class Values, class Done>
  void value_block(int64_t b, int64_t at, int v, Values values, Done done) {
    const int64_t from = block_start_[b];
    with_rows(int(block_start_[b + 1] - from), [&](auto rows) {
      constexpr int R = decltype(rows)::value, kMost = Values::most(R);
      const auto sum = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        if constexpr (V <= kMost)
          sum_values<R, V>(s_.scores + from * kChunk, values.template columns<V>(at * kLanes), seen_ + from, blocks_seen_[b], from,
                           at * kLanes, done);
      };
      if (v == 8) return sum(Constant<8>());
      if (v == 4) return sum(Constant<4>());
      if (v == 2) return sum(Constant<2>());
      return sum(Constant<1>());
    });
  }

  // Scores become weights relative to each row's maximum of the chunk. In two passes over all rows: the steps of one row wait for
  // each other.
  void weigh() {
    for (int64_t i = 0; i < n_; ++i) {
      m_[i] = -kInf;
      l_[i] = 0.0f;
      if (sees(i)) m_[i] = mask(seen_[i], s_.scores + i * kChunk);
    }
    for (int64_t i = 0; i < n_; ++i)
      if (sees(i)) l_[i] = exponentiate(seen_[i], m_[i], s_.scores + i * kChunk);
  }

  // The first and the last token of the tiles that a row sees.
  static int64_t low(const Visible& seen) { return seen.first / kTile * kTile; }
  static int64_t high(const Visible& seen) { return (seen.end + kTile - 1) / kTile * kTile; }

  // Scores capped, what is not seen -inf; returns the maximum.
  float mask(const Visible& seen, float* s) const {
    if (a_.soft_cap > 0.0f) {
      const F cap = set1(a_.soft_cap);
      for (int64_t t = low(seen); t < high(seen); t += kLanes) store(s + t, mul(cap, tanh(div(load(s + t), cap))));
    }
    if (seen.first > low(seen)) hide(s, seen, low(seen));
    if (seen.end < high(seen)) hide(s, seen, high(seen) - kTile);
    F top = set1(-kInf);
    for (int64_t t = low(seen); t < high(seen); t += kLanes) top = max(top, load(s + t));
    return reduce_max(top);
  }

  // -inf for what is not seen of the tile that begins at t; without a branch, as its length is never the same.
  static void hide(float* s, const Visible& seen, int64_t t) {
    static constexpr float kCount[kTile] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F before = set1(float(seen.first - t)), end = set1(float(seen.end - t)), hidden = set1(-kInf);
    for (int64_t i = 0; i < kTile; i += kLanes) {
      const F index = load(kCount + i);
      store(s + t + i, select_gt(before, index, hidden, select_gt(end, index, load(s + t + i), hidden)));
    }
  }

  static float exponentiate(const Visible& seen, float top, float* s) {
    const F m = set1(top);
    F sum = zero();
    for (int64_t t = low(seen), end = high(seen); t < end; t += kLanes) {
      const F p = exp_nonpositive(sub(load(s + t), m));
      sum = octavo::OCTAVO_NS::add(sum, p);
      store(s + t, p);
    }
    return reduce_add(sum);
  }

  void start() {
    for (int64_t i = 0; i < kMaxRows; ++i) total_m_[i] = -kInf, total_l_[i] = 0.0f;
    std::memset(s_.out, 0, size_t(n_ * width_) * 4);
  }

  // Takes a chunk's maxima and sums into the totals; what merge() then multiplies. Rows that see nothing of the chunk are left alone.
  void absorb(const float* m, const float* l) {
    for (int64_t i = 0; i < n_; i += kLanes) {
      const F before = load(total_m_ + i), now = load(m + i), top = max(now, before);
      store(old_factor_ + i, exp_nonpositive(sub(before, top)));
      store(new_factor_ + i, exp_nonpositive(sub(now, top)));
    }
    for (int64_t i = 0; i < n_; ++i) {
      if (!sees(i)) continue;
      total_m_[i] = m[i] > total_m_[i] ? m[i] : total_m_[i];
      total_l_[i] = total_l_[i] * old_factor_[i] + l[i] * new_factor_[i];
    }
  }

  void write() const {
    each_row([&](int64_t i, int64_t row, int64_t at) {
      float* y = a_.y + row * a_.ldy + at;
      const F inverse = set1(1.0f / total_l_[i]);
      const float* out = s_.out + i * width_;
      int64_t d = 0;
      for (; d + kLanes <= dim_; d += kLanes) store(y + d, mul(load(out + d), inverse));
      if (d < dim_) store_n(y + d, mul(load(out + d), inverse), int(dim_ - d));
    });
  }

  const AttentionArgs& a_;
  const Unit& u_;
  const Unit* next_;
  const Scratch& s_;
  const int64_t dim_, width_, n_, blocks_;
  bool widen_;
  int64_t end_ = 0;                    // chunks from here on are not this thread's
  int64_t block_start_[kMaxRows + 1];  // rows of each block: as even as possible, at most kBlockRows
  Visible seen_[kMaxRows];
  BlockSeen blocks_seen_[kMaxRows];
  alignas(64) float m_[kMaxRows], l_[kMaxRows], total_m_[kMaxRows], total_l_[kMaxRows], old_factor_[kMaxRows], new_factor_[kMaxRows];
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
