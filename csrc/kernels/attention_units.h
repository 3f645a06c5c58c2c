// The division of a batch's attention into units of work, and of the units among the threads.
//
// Knows no products: which rows, which chunks, whose they are. A unit is some query rows of one sequence and some of its kv heads; "row"
// means one query row of one of the query heads that share a kv head. Which unit a row falls into changes no bit of it.
#pragma once
#include <algorithm>

#include "kernels/attention_tiles.h"

namespace octavo::OCTAVO_NS {

constexpr int64_t kMaxRows = 96;     // of a unit; with head_dim 64 its state and its queries fit into 128 KiB
constexpr int64_t kFewRows = 8;      // of a kv head: up to so many, reading K and V is most of the work
constexpr int64_t kRunBytes = 8192;  // the kv heads of a block lie side by side: memory likes to be read in such runs

inline int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
inline int64_t tile_bytes(const KvLayer& kv) { return kTile * kv.head_dim * (kv.type == KvType::f32 ? 4 : 2); }

struct Unit {
  int64_t seq;
  int64_t kv_head, kv_heads;                             // kv heads [kv_head, kv_head + kv_heads)
  int64_t first_head, num_heads;                         // of each kv head's query heads, [first_head, first_head + num_heads)
  int64_t first_row, num_rows;                           // query rows, in the batch
  int64_t position;                                      // of first_row
  int64_t rows() const { return num_rows * num_heads; }  // of one kv head
  int64_t count() const { return kv_heads * rows(); }
  int64_t first_chunk(int64_t window) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) / kChunk : 0; }
  int64_t end_chunk() const { return (position + num_rows - 1) / kChunk + 1; }
};

// The shape of a batch's units, which depends on the arguments and on the number of threads alone.
struct UnitShape {
  int64_t tile_rows;  // query rows at most
  int64_t kv_heads;   // at most, where the rows are few
};

inline int64_t choose_kv_heads(const AttentionArgs& a, int nth) {
  const int64_t heads = std::min(a.kv.num_kv_heads, std::max<int64_t>(1, kRunBytes / tile_bytes(a.kv)));
  int64_t chunks = 0;
  for (int64_t s = 0; s < a.num_seqs; ++s) chunks += (a.seq_lens[s] + kChunk - 1) / kChunk;
  // Chunks are what threads divide among them. A run is read a fifth faster, as much may be lost by an uneven division.
  const auto most = [&](int64_t pieces) { return (pieces + nth - 1) / nth; };
  return 4 * most(chunks) * heads <= 5 * most(chunks * heads) ? heads : 1;
}

inline UnitShape choose_shape(const AttentionArgs& a, int nth) {
  const int64_t heads = std::min(a.num_heads / a.kv.num_kv_heads, kMaxRows);
  // Many rows use a chunk of K and V well, but each thread should find several units.
  int64_t rows = std::max<int64_t>(1, kMaxRows / heads);
  while (rows > 1 && rows * heads > 24 && (a.rows / rows + a.num_seqs) * a.kv.num_kv_heads < 6 * nth) rows = (rows + 1) / 2;
  return {rows, choose_kv_heads(a, nth)};
}

// Visits every unit, always in the same order.
template <class Fn>
void for_each_unit(const AttentionArgs& a, const UnitShape& shape, Fn f) {
  const int64_t group = a.num_heads / a.kv.num_kv_heads, heads = std::min(group, kMaxRows);
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t begin = a.query_start[s], end = a.query_start[s + 1];
    const int64_t few = std::min(end - begin, shape.tile_rows) * heads;
    const int64_t together = few > 0 && few <= kFewRows ? std::min(shape.kv_heads, kMaxRows / few) : 1;
    for (int64_t h = 0; h < a.kv.num_kv_heads; h += together)
      for (int64_t first = 0; first < group; first += heads)
        for (int64_t row = begin; row < end; row += shape.tile_rows) {
          const int64_t rows = std::min(shape.tile_rows, end - row);
          f(Unit{s, h, std::min(together, a.kv.num_kv_heads - h), first, std::min(heads, group - first), row, rows,
                 a.seq_lens[s] - (end - row)});
        }
  }
}

// About what a token of context costs, in products with one row: reading K and V is worth some six rows.
inline int64_t weight(const Unit& u) { return u.kv_heads * (u.rows() + 6); }

inline int64_t cost(const Unit& u, int64_t window) {
  const int64_t tokens = u.position + u.num_rows - u.first_chunk(window) * kChunk;
  return weight(u) * (tokens + 16);
}

// One chunk's results: maxima, sums of weights, weighted sums of values.
inline int64_t part_floats(int64_t rows, int64_t head_dim) { return 2 * kMaxRows + rows * padded(head_dim); }

// One unit that several threads share: a counter, then the chunks' partial results.
struct Shared {
  uint8_t* base;
  size_t bytes;
  float* parts() const { return reinterpret_cast<float*>(base + 64); }
  bool fits(const Unit& u, int64_t chunks, int64_t head_dim) const {
    return base && 64 + size_t(chunks * part_floats(u.count(), head_dim)) * 4 <= bytes;
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
  // By the middle of the chunk, which lies within the unit's cost: so owners ascend from chunk to chunk and from unit to unit.
  int owner_of_chunk(const Unit& u, int64_t start, int64_t chunk) const {
    const int64_t before = (chunk - u.first_chunk(a_.window)) * kChunk, tokens = std::min(kChunk, u.position + u.num_rows - chunk * kChunk);
    return owner(start + weight(u) * (before + tokens / 2));
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
inline Part part_of(const AttentionArgs& a, const Division& division, const Unit& u, int64_t start, int ith) {
  const int64_t first = u.first_chunk(a.window), end = u.end_chunk();
  const int head = division.owner_of_chunk(u, start, first), tail = division.owner_of_chunk(u, start, end - 1);
  if (head == tail || !division.slot(head).fits(u, end - first, a.kv.head_dim)) {
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

}  // namespace octavo::OCTAVO_NS
