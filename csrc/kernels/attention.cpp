// Causal grouped-query attention over the paged cache: prefill, chunked prefill and decode in one kernel.
//
// q, y [rows][num_heads * head_dim] fp32; y may be q. The cache's layout and the order of every sum: kernels.h. attention_units.h cuts the
// batch into units; here one is computed, chunk by chunk: all its rows pass over a few tiles of K, then their weights are made,
// then they pass over the tiles of V. Tiles are visited in the order in which they lie in memory as far as a unit goes: block by
// block, within it kv head by kv head.
#include <algorithm>

#include "kernels/attention_ahead.h"
#include "kernels/attention_tiles.h"
#include "kernels/attention_units.h"
#include "kernels/decl.h"
#include "kernels/math.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

// Rows of a kv head from which its tiles are widened into scratch instead of in each use, which takes eight lanes one operation.
constexpr int64_t kWidenAbove = kLanes == 8 ? kMaxRows : 24;
const float kInf = std::numeric_limits<float>::infinity();

struct Scratch {
  float *q, *out, *sums, *scores, *wide;
  size_t layout(int64_t head_dim, uint8_t* base) {
    const int64_t width = padded(head_dim);
    size_t used = 0;
    const auto place = [&](float*& part, int64_t count) {
      if (base) part = reinterpret_cast<float*>(base + used);
      used += size_t(count) * 4;
    };
    place(q, kMaxRows * width);
    place(out, kMaxRows * width);
    place(sums, kMaxRows * width);
    place(scores, kMaxRows * kChunk);
    place(wide, kChunk * width);
    return used + 64;
  }
};

// The chunks that a thread computes of a unit, [first, end); what it reads after them, or null; and how many tiles it has asked for
// already.
struct Stretch {
  int64_t first, end;
  const Part* next;
  int64_t asked;
};

class Worker {
 public:
  Worker(const AttentionArgs& a, const Unit& u, const Scratch& s)
      : a_(a),
        u_(u),
        s_(s),
        dim_(a.kv.head_dim),
        width_(padded(dim_)),
        rows_(u.rows()),
        n_(u.count()),
        blocks_((rows_ + kBlockRows - 1) / kBlockRows),
        tile_bytes_(tile_bytes(a.kv)),
        ahead_(a.kv),
        widen_(dim_ % kLanes != 0 || rows_ > kWidenAbove) {
    for (int64_t b = 0; b <= blocks_; ++b) block_start_[b] = rows_ * b / blocks_;
    each_row([&](int64_t i, int64_t row, int64_t at) {
      const float* q = a.q + row * a.ldq + at;
      for (int64_t d = 0; d < dim_; ++d) s_.q[i * width_ + d] = q[d] * a.scale;
    });
  }

  // Chunks [first, end), merged as they come.
  void run(const Stretch& stretch) {
    start();
    for_each_chunk(stretch, [&](int64_t c) {
      compute(c, s_.sums);
      merge(m_, l_, s_.sums);
    });
    write();
  }

  // The same left apart in `parts`, where `origin` is the unit's first chunk, for merge_parts().
  void run_apart(const Stretch& stretch, int64_t origin, float* parts) {
    for_each_chunk(stretch, [&](int64_t c) {
      float* p = parts + (c - origin) * part_floats(n_, dim_);
      compute(c, p + 2 * kMaxRows);
      std::memcpy(p, m_, size_t(n_) * 4);
      std::memcpy(p + kMaxRows, l_, size_t(n_) * 4);
    });
  }

  void merge_parts(int64_t first, int64_t end, const float* parts) {
    start();
    for (int64_t c = first; c < end; ++c, parts += part_floats(n_, dim_)) {
      look(c);
      merge(parts, parts + kMaxRows, parts + 2 * kMaxRows);
    }
    write();
  }

  // Tiles of the part that comes next that have been asked for.
  int64_t asked() const { return ahead_.asked(); }

 private:
  // f(i, row of the batch, first column) for each row.
  template <class Fn>
  void each_row(Fn f) const {
    const int64_t group = a_.num_heads / a_.kv.num_kv_heads;
    int64_t i = 0;
    for (int64_t k = u_.kv_head; k < u_.kv_head + u_.kv_heads; ++k)
      for (int64_t r = 0; r < u_.num_rows; ++r)
        for (int64_t h = 0; h < u_.num_heads; ++h, ++i) f(i, u_.first_row + r, (k * group + u_.first_head + h) * dim_);
  }

  template <class Fn>
  void for_each_chunk(const Stretch& s, Fn f) {
    const auto following = [&](int64_t c) {
      return c < s.end ? ChunkTiles(a_, u_, c) : s.next ? ChunkTiles(a_, s.next->unit, s.next->from) : ChunkTiles();
    };
    ChunkTiles tiles[2] = {following(s.first), following(s.first + 1)};  // of the chunk, and of what comes after it, by turns
    tiles_ = &tiles[0];
    ahead_.begin(tiles[0], tiles[1], s.asked);
    for (int64_t c = s.first; c < s.end; ++c) {
      f(c);
      if (c + 1 == s.end) break;
      ChunkTiles& free = tiles[(c - s.first) % 2];
      tiles_ = &tiles[(c + 1 - s.first) % 2];
      free = following(c + 2);
      ahead_.advance(*tiles_, free);
    }
  }

  // What each row sees of a chunk, and each block of a kv head's rows: the same for all kv heads.
  void look(int64_t chunk) {
    const int64_t start = chunk * kChunk;
    const bool whole = a_.window == 0 && start + kChunk <= u_.position + 1;
    if (whole && whole_) return;
    whole_ = whole;
    each_row([&](int64_t i, int64_t row, int64_t) {
      const int64_t position = u_.position + row - u_.first_row;
      const int64_t first = a_.window > 0 ? std::max<int64_t>(0, position - a_.window + 1) : 0;
      seen_[i] = {std::max<int64_t>(0, first - start), std::min(kChunk, position + 1 - start)};
    });
    for (int64_t b = 0; b < blocks_; ++b) blocks_seen_[b] = common(seen_ + block_start_[b], block_start_[b + 1] - block_start_[b]);
  }
  bool sees(int64_t i) const { return seen_[i].first < seen_[i].end; }

  // One chunk: its maxima into m_, the sums of its weights into l_, the weighted sums of its values into `sums`.
  void compute(int64_t chunk, float* sums) {
    look(chunk);
    std::memset(sums, 0, size_t(n_ * width_) * 4);
    if (a_.kv.type == KvType::f32)
      compute_as<float>(sums);
    else
      compute_as<uint16_t>(sums);
  }

  template <class E>
  void compute_as(float* sums) {
    for_each_tiles<E>(a_.kv.k, [&](Tiles<E>& tiles, int64_t t, int64_t count, int64_t head) {
      if (!widen_) return score_head(tiles, t, count, head);
      Tiles<float> wide;
      widen(tiles, count, kTile * dim_, kTile * dim_, wide);
      score_head(wide, t, count, head);
    });
    weigh();
    for_each_tiles<E>(a_.kv.v, [&](Tiles<E>& tiles, int64_t t, int64_t count, int64_t head) {
      if (!widen_) return add_head(tiles, dim_, t, count, head, sums);
      Tiles<float> wide;
      widen(tiles, count, dim_, width_, wide);
      add_head(wide, width_, t, count, head, sums);
    });
  }

  // f(tiles, first of them in the chunk, how many, kv head of the unit) for all tiles of the chunk in K or V.
  template <class E, class Fn>
  void for_each_tiles(const uint8_t* pool, Fn f) {
    Tiles<E> tiles;
    for (int64_t t = tiles_->first; t < tiles_->end; t += tiles_->together) {
      const int64_t count = std::min(tiles_->together, tiles_->end - t);
      for (int64_t head = 0; head < u_.kv_heads; ++head) {
        for (int64_t i = 0; i < count; ++i) {
          const uint8_t* tile = tiles_->at(pool, tile_bytes_, t + i, head);
          const char* next = ahead_.while_reading();
          tiles.at[i] = reinterpret_cast<const E*>(tile);
          tiles.next[i] = next ? next : reinterpret_cast<const char*>(tile);
        }
        f(tiles, t, count, head);
      }
    }
  }

  // The tiles in fp32, in scratch: rows of `row` elements become `wide_row` floats, the rest of them zeros.
  template <class E>
  void widen(const Tiles<E>& tiles, int64_t count, int64_t row, int64_t wide_row, Tiles<float>& wide) const {
    float* to = s_.wide;
    for (int64_t t = 0; t < count; ++t) {
      wide.at[t] = to;
      wide.next[t] = reinterpret_cast<const char*>(to);
      const E* from = tiles.at[t];
      for (int64_t r = 0; r < kTile * dim_; r += row, from += row, to += wide_row) {
        int64_t d = 0;
        for (; d + kLanes <= row; d += kLanes) {
          ask_for<1>(tiles.next[t] + size_t(r + d) * sizeof(E));
          store(to + d, load_kv(from + d));
        }
        if (d < wide_row) widen_end(from + d, row - d, wide_row - d, to + d);
      }
    }
  }

  // The last `left` elements of a row, fewer than a vector, then zeros up to `count`.
  template <class E>
  static void widen_end(const E* from, int64_t left, int64_t count, float* to) {
    for (int64_t d = 0; d < count; d += kLanes) {
      E copy[kLanes] = {};
      if (d < left) std::memcpy(copy, from + d, size_t(std::min<int64_t>(kLanes, left - d)) * sizeof(E));
      store(to + d, load_kv(copy));
    }
  }

  // Scores of one kv head's rows with the chunk's tiles [t, t + count).
  template <class E>
  void score_head(Tiles<E>& tiles, int64_t t, int64_t count, int64_t head) const {
    for (int64_t b = 0; b < blocks_; ++b) {
      const int64_t from = head * rows_ + block_start_[b];
      const Visible seen = blocks_seen_[b].any;
      if (seen.first >= (t + count) * kTile || seen.end <= t * kTile) continue;
      const float* q = s_.q + from * width_;
      float* s = s_.scores + from * kChunk + t * kTile;
      const int64_t needed = std::min(count, (seen.end + kTile - 1) / kTile - t);
      with_rows(int(block_start_[b + 1] - block_start_[b]),
                [&](auto rows) { score<decltype(rows)::value>(q, width_, tiles, needed, dim_, s); });
      if (b == 0) nothing_more(tiles, count);
    }
  }

  // The same with values, in rows of `width`, which are added to `sums`.
  template <class E>
  void add_head(Tiles<E>& tiles, int64_t width, int64_t t, int64_t count, int64_t head, float* sums) const {
    const ValueTiles<E> values{tiles, t * kTile, count, width};
    for (int64_t b = 0; b < blocks_; ++b) {
      const Visible seen = blocks_seen_[b].any;
      if (seen.first >= (t + count) * kTile || seen.end <= t * kTile) continue;
      add_block(values, b, head, sums);
      if (b == 0) nothing_more(tiles, count);
    }
  }

  template <class E>
  static void nothing_more(Tiles<E>& tiles, int64_t count) {
    for (int64_t i = 0; i < count; ++i) tiles.next[i] = reinterpret_cast<const char*>(tiles.at[i]);
  }

  template <class E>
  void add_block(const ValueTiles<E>& tiles, int64_t b, int64_t head, float* sums) const {
    const int64_t from = head * rows_ + block_start_[b];
    with_rows(int(block_start_[b + 1] - block_start_[b]), [&](auto rows) {
      add<decltype(rows)::value>(s_.scores + from * kChunk, tiles, seen_ + from, blocks_seen_[b], sums + from * width_, width_);
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
    std::fill_n(total_m_, n_, -kInf);
    std::fill_n(total_l_, n_, 0.0f);
    std::memset(s_.out, 0, size_t(n_ * width_) * 4);
  }

  // Takes a chunk's results into the totals. Rows that see nothing of the chunk are left alone.
  void merge(const float* m, const float* l, const float* sums) {
    alignas(64) float before[kMaxRows], now[kMaxRows];
    for (int64_t i = 0; i < n_; i += kLanes) {
      const F old_m = load(total_m_ + i), new_m = load(m + i), top = max(new_m, old_m);
      store(before + i, exp_nonpositive(sub(old_m, top)));
      store(now + i, exp_nonpositive(sub(new_m, top)));
    }
    for (int64_t i = 0; i < n_; ++i) {
      if (!sees(i)) continue;
      total_m_[i] = m[i] > total_m_[i] ? m[i] : total_m_[i];
      total_l_[i] = total_l_[i] * before[i] + l[i] * now[i];
      const F old_factor = set1(before[i]), factor = set1(now[i]);
      for (int64_t d = i * width_; d < (i + 1) * width_; d += kLanes)
        store(s_.out + d, fma(load(s_.out + d), old_factor, mul(load(sums + d), factor)));
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
  const Scratch& s_;
  const int64_t dim_, width_;
  const int64_t rows_, n_;  // of a kv head, of all
  const int64_t blocks_;    // of a kv head's rows
  const int64_t tile_bytes_;
  const ChunkTiles* tiles_ = nullptr;  // of the chunk
  Ahead ahead_;
  const bool widen_;
  bool whole_ = false;                 // every row sees all of the chunk
  int64_t block_start_[kMaxRows + 1];  // rows of each block: as even as possible, at most kBlockRows
  Visible seen_[kMaxRows];
  BlockSeen blocks_seen_[kMaxRows];
  alignas(64) float m_[kMaxRows], l_[kMaxRows], total_m_[kMaxRows], total_l_[kMaxRows];
};

// Returns how many tiles of `next` have been asked for; of this part that are `asked`.
int64_t run_part(const AttentionArgs& a, const Division& division, const Part& part, const Part* next, int64_t asked,
                 const Scratch& scratch) {
  Worker worker(a, part.unit, scratch);
  const Stretch stretch{part.from, part.to, next, asked};
  if (part.sharers == 1) {
    worker.run(stretch);
    return worker.asked();
  }
  const int64_t first = part.unit.first_chunk(a.window), end = part.unit.end_chunk();
  const Shared shared = division.slot(part.head);
  worker.run_apart(stretch, first, shared.parts());
  if (shared.last_of(part.sharers)) worker.merge_parts(first, end, shared.parts());
  return worker.asked();
}

}  // namespace

size_t attention_scratch(int64_t head_dim) { return Scratch{}.layout(head_dim, nullptr); }

void attention(const AttentionArgs& a, int ith, int nth) {
  Scratch scratch{};
  scratch.layout(a.kv.head_dim, a.scratch);
  const UnitShape shape = choose_shape(a, nth);
  int64_t total = 0;
  for_each_unit(a, shape, [&](const Unit& u) { total += cost(u, a.window); });
  const Division division(a, total, nth);
  int64_t start = 0;
  Part parts[2];  // one is computed when the next is known
  int count = 0;
  int64_t asked = 0;
  for_each_unit(a, shape, [&](const Unit& u) {
    const Part part = part_of(a, division, u, start, ith);
    start += cost(u, a.window);
    if (part.from >= part.to) return;
    parts[count % 2] = part;
    if (count++ > 0) asked = run_part(a, division, parts[count % 2], &part, asked, scratch);
  });
  if (count > 0) run_part(a, division, parts[(count - 1) % 2], nullptr, asked, scratch);
}

}  // namespace octavo::OCTAVO_NS
