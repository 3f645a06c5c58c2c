// Writes the keys and values of new tokens into one layer's paged cache, in the layout of KvLayer (kernels.h).
//
// k, v [rows][num_kv_heads * head_dim] fp32; slots [rows]. bf16 caches round to nearest even. A slot outside the pool, -1
// among them, writes nothing.
#include "kernels/decl.h"
#include "kernels/split.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int64_t kTile = 16;

void convert(float x, float* out) { *out = x; }
void convert(float x, uint16_t* out) { *out = float_to_bf16(x); }

template <class T>
void write(const KvWriteArgs& a, const Span& rows) {
  const KvLayer& kv = a.kv;
  const int64_t dim = kv.head_dim, tiles = kv.block_size / kTile;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const int64_t slot = a.slots[r];
    if (slot < 0 || slot >= kv.num_blocks * kv.block_size) continue;
    const int64_t block = slot / kv.block_size, tile = slot % kv.block_size / kTile, lane = slot % kTile;
    for (int64_t h = 0; h < kv.num_kv_heads; ++h) {
      const int64_t start = ((block * kv.num_kv_heads + h) * tiles + tile) * dim * kTile;
      T* k = reinterpret_cast<T*>(kv.k) + start + lane;
      T* v = reinterpret_cast<T*>(kv.v) + start + lane * dim;
      const float* k_row = a.k + r * a.ldk + h * dim;
      const float* v_row = a.v + r * a.ldv + h * dim;
      for (int64_t d = 0; d < dim; ++d) convert(k_row[d], k + d * kTile);
      for (int64_t d = 0; d < dim; ++d) convert(v_row[d], v + d);
    }
  }
}

}  // namespace

void kv_write(const KvWriteArgs& a, int ith, int nth) {
  const Span rows = share(a.rows, ith, nth);
  if (a.kv.type == KvType::f32)
    write<float>(a, rows);
  else
    write<uint16_t>(a, rows);
}

}  // namespace octavo::OCTAVO_NS
