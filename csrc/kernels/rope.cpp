// Rotary position embedding of the first `rot` elements of each head, in halves or in pairs; the rest of a head is copied.
//
// x, y [rows][num_heads * head_dim] fp32, positions [rows], cos_sin [positions][rot]: rot / 2 cosines, then rot / 2 sines.
// y may be x. y[i] = fma(x[i], cos, -(x[i + rot/2] * sin)), y[i + rot/2] = fma(x[i + rot/2], cos, x[i] * sin);
// in pairs likewise with x[2i] and x[2i + 1].
#include "kernels/decl.h"
#include "kernels/split.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

void rotate(const float* x, const float* cosines, const float* sines, float* y, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
    store(y + i, fma(a, c, neg(mul(b, s))));
    store(y + half + i, fma(b, c, mul(a, s)));
  }
  if (i == half) return;
  const int n = int(half - i);
  const F a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cosines + i, n), s = load_n(sines + i, n);
  store_n(y + i, fma(a, c, neg(mul(b, s))), n);
  store_n(y + half + i, fma(b, c, mul(a, s)), n);
}

// The same of neighbours: parted into two vectors, and put together again.
void rotate_pairs(const float* x, const float* cosines, const float* sines, float* y, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int n = int(half - i < kLanes ? half - i : kLanes);
    float first[kLanes] = {}, second[kLanes] = {};
    for (int j = 0; j < n; ++j) first[j] = x[2 * (i + j)], second[j] = x[2 * (i + j) + 1];
    const F a = load(first), b = load(second), c = load_n(cosines + i, n), s = load_n(sines + i, n);
    store(first, fma(a, c, neg(mul(b, s))));
    store(second, fma(b, c, mul(a, s)));
    for (int j = 0; j < n; ++j) y[2 * (i + j)] = first[j], y[2 * (i + j) + 1] = second[j];
  }
}

}  // namespace

void rope(const RopeArgs& a, int ith, int nth) {
  const Span units = share(a.r.rows * a.num_heads, ith, nth);
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t r = unit / a.num_heads, at = unit % a.num_heads * a.head_dim;
    const float* table = a.cos_sin + a.positions[r] * a.rot;
    const float* x = a.r.x + r * a.r.ldx + at;
    float* y = a.r.y + r * a.r.ldy + at;
    a.pairs ? rotate_pairs(x, table, table + a.rot / 2, y, a.rot / 2) : rotate(x, table, table + a.rot / 2, y, a.rot / 2);
    if (x != y && a.rot < a.head_dim) std::memcpy(y + a.rot, x + a.rot, size_t(a.head_dim - a.rot) * 4);
  }
}

}  // namespace octavo::OCTAVO_NS
