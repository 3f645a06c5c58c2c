// Where the tiles that a thread reads lie, and which of them it asks for before it needs them.
//
// Knows no products. Decode does so few products a byte that a core needs all the requests to memory that it may hold, all the time, and
// more of them than the hardware makes by itself: so lines are asked for one by one, between the products, in the order in which they
// lie in memory.
#pragma once
#include <algorithm>

#include "kernels/attention_tiles.h"
#include "kernels/attention_units.h"

namespace octavo::OCTAVO_NS {

constexpr int64_t kTogetherBytes = 16384;  // of tiles that many rows pass over at once: half a first cache
constexpr int64_t kAheadBytes = 8192;      // nearer, memory is late; farther, what was asked for is pushed out before it is used

// The tiles of one chunk of a unit that any of its rows sees: [first, end), and of each its number in the pool for the unit's first kv
// head. They are read `together` at a time, kv head by kv head: first all of K, then all of V.
struct ChunkTiles {
  int64_t first = 0, end = 0, heads = 0, together = 1;
  int64_t step = 0;  // from a kv head's tile to the next one's
  int64_t number[kTiles];

  ChunkTiles() = default;
  ChunkTiles(const AttentionArgs& a, const Unit& u, int64_t chunk) : heads(u.kv_heads), step(a.kv.block_size / kTile) {
    const int64_t start = chunk * kChunk, seen = a.window > 0 ? std::max<int64_t>(0, u.position - a.window + 1) : 0;
    first = std::max<int64_t>(0, seen - start) / kTile;
    end = (std::min(kChunk, u.position + u.num_rows - start) + kTile - 1) / kTile;
    // Few rows wait for memory, which likes the order in which the tiles lie; many want long runs of products.
    const int64_t few = std::max(1, 4 / kPerTile), many = std::min(kTiles, kTogetherBytes / tile_bytes(a.kv));
    together = u.rows() <= kFewRows ? few : std::max(few, many);
    const int32_t* blocks = a.block_table + u.seq * a.ld_block_table;
    int64_t index = (start / kTile + first) / step, within = (start / kTile + first) % step;
    for (int64_t t = first; t < end; ++t) {
      number[t] = (blocks[index] * a.kv.num_kv_heads + u.kv_head) * step + within;
      if (++within == step) within = 0, ++index;
    }
  }

  const uint8_t* at(const uint8_t* pool, int64_t bytes, int64_t t, int64_t head) const { return pool + (number[t] + head * step) * bytes; }
};

// A place in the tiles of a chunk and of the one after it, some tiles before the one that is read: block by block, in each kv head by
// kv head, of K and then of V.
class Ahead {
 public:
  explicit Ahead(const KvLayer& kv) : kv_(kv), bytes_(tile_bytes(kv)), distance_(std::max<int64_t>(4, kAheadBytes / bytes_)) {}

  // At the beginning of a unit, of which `asked` tiles have been asked for. `now` and `after` stay the caller's.
  void begin(const ChunkTiles& now, const ChunkTiles& after, int64_t asked) {
    chunks_[0] = &now, chunks_[1] = &after;
    restart();
    while (lead_ < asked && take()) {
    }
    while (lead_ < distance_) {
      const char* tile = take();
      if (!tile) break;
      for (int64_t at = 0; at < bytes_; at += 64) ask_for<1>(tile + at);
    }
  }
  // What was `after` is `now` now.
  void advance(const ChunkTiles& now, const ChunkTiles& after) {
    chunks_[0] = &now, chunks_[1] = &after;
    if (chunk_ == 0) return restart();
    chunk_ = 0;
  }
  // Tiles of `after` that have been asked for.
  int64_t asked() const { return chunk_ == 1 ? lead_ : 0; }

  // What to ask for while a tile is read; null: nothing.
  const char* while_reading() {
    const char* tile = lead_ <= distance_ ? take() : nullptr;
    if (lead_ > 0) --lead_;
    return tile;
  }

 private:
  void restart() {
    chunk_ = 0, lead_ = 0, head_ = 0;
    values_ = false;
    tile_ = chunks_[0]->first;
  }

  const char* take() {
    while (tile_ >= chunks_[chunk_]->end) {
      if (values_ && chunk_ == 1) return nullptr;
      if (values_) chunk_ = 1;
      values_ = !values_;
      tile_ = chunks_[chunk_]->first;
    }
    const ChunkTiles& c = *chunks_[chunk_];
    const uint8_t* tile = c.at(values_ ? kv_.v : kv_.k, bytes_, tile_, head_);
    ++lead_;
    if (++head_ == c.heads) head_ = 0, ++tile_;
    return reinterpret_cast<const char*>(tile);
  }

  const KvLayer& kv_;
  const int64_t bytes_, distance_;  // of a tile; tiles
  const ChunkTiles* chunks_[2];
  int chunk_;    // where the next tile to ask for is, in chunks_, and in that
  bool values_;  // whether it is V's
  int64_t tile_, head_;
  int64_t lead_;  // tiles asked for and not yet read
};

}  // namespace octavo::OCTAVO_NS
