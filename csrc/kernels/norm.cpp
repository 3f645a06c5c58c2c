// RMS norm, layer norm, and both per head (QK norm), with optional quantisation of the result.
//
// x, y [rows][width] fp32, weight and bias [width], or [head_dim] when the norm runs over each head_dim slice; y may be x.
// Sums are taken over four vectors of lane-wise partial sums: element i belongs to lane i % kLanes of vector (i / kLanes) % 4;
// the vectors are added as (0 + 1) + (2 + 3), then folded. y = (x * (1 / sqrt(mean(x^2) + eps))) * weight, and
// for layer norm ((x - mean) * (1 / sqrt(mean((x - mean)^2) + eps))) * weight + bias by fma.
#include "kernels/decl.h"
#include "kernels/quantize.h"
#include "kernels/split.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

F load_some(const float* p, int64_t n) { return n >= kLanes ? load(p) : load_n(p, int(n)); }

// The first n lanes of v, 0 in the others.
F first_lanes(F v, int64_t n) {
  if (n >= kLanes) return v;
  float copy[kLanes];
  store(copy, v);
  return load_n(copy, int(n));
}

float fold(const F* sums) { return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3]))); }

float sum(const float* x, int64_t n) {
  F sums[4] = {zero(), zero(), zero(), zero()};
  int j = 0;
  for (int64_t i = 0; i < n; i += kLanes, ++j) sums[j % 4] = add(sums[j % 4], load_some(x + i, n - i));
  return fold(sums);
}

float sum_of_squares(const float* x, int64_t n, float center) {
  F sums[4] = {zero(), zero(), zero(), zero()};
  const F c = set1(center);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const F x_v = sub(load(x + i + v * kLanes), c);
      sums[v] = fma(x_v, x_v, sums[v]);
    }
  }
  for (int j = 0; i < n; i += kLanes, ++j) {
    const F v = first_lanes(sub(load_some(x + i, n - i), c), n - i);
    sums[j % 4] = fma(v, v, sums[j % 4]);
  }
  return fold(sums);
}

struct Stats {
  float mean, inverse;
};

Stats measure(const NormArgs& a, const float* x, int64_t n) {
  const float mean = a.layer_norm ? sum(x, n) / float(n) : 0.0f;
  const float square = sum_of_squares(x, n, mean) / float(n);
  return {mean, 1.0f / std::sqrt(square + a.eps)};
}

// Elements [first, first + n) of one normalised slice into out; n is at most kGroup when out is a buffer.
void apply(const NormArgs& a, const Stats& s, const float* x, int64_t first, int64_t n, float* out) {
  const F mean = set1(s.mean), inverse = set1(s.inverse);
  int64_t i = 0;
  if (!a.layer_norm)
    for (; i + kLanes <= n; i += kLanes) store(out + i, mul(mul(load(x + first + i), inverse), load(a.weight + first + i)));
  for (; i < n; i += kLanes) {
    const int64_t left = n - i;
    F v = load_some(x + first + i, left);
    if (a.layer_norm) v = sub(v, mean);
    v = mul(v, inverse);
    const F w = load_some(a.weight + first + i, left);
    v = a.layer_norm && a.bias ? fma(v, w, load_some(a.bias + first + i, left)) : mul(v, w);
    if (left >= kLanes)
      store(out + i, v);
    else
      store_n(out + i, v, int(left));
  }
}

void norm_heads(const NormArgs& a, const float* x, float* y) {
  for (int64_t at = 0; at < a.r.width; at += a.head_dim) apply(a, measure(a, x + at, a.head_dim), x + at, 0, a.head_dim, y + at);
}

// Normalises and quantises group by group, so that nothing but codes is written when y is not wanted.
void norm_quantised(const NormArgs& a, const float* x, float* y, int8_t* q, float* scale, float* group_sum) {
  const Stats s = measure(a, x, a.r.width);
  int64_t first = 0, g = 0;
  for (; first + kGroup <= a.r.width; first += kGroup, ++g) {
    float buffer[kGroup];
    float* out = a.store ? y + first : buffer;
    apply(a, s, x, first, kGroup, out);
    quantize_group(out, q + first, scale + g, group_sum + g);
  }
  for (; first < a.k_padded; first += kGroup, ++g) {
    float buffer[kGroup] = {};
    const int64_t n = a.r.width - first;
    if (n > 0) {
      apply(a, s, x, first, n, buffer);
      if (a.store) std::memcpy(y + first, buffer, size_t(n) * 4);
    }
    quantize_group(buffer, q + first, scale + g, group_sum + g);
  }
}

}  // namespace

void norm(const NormArgs& a, int ith, int nth) {
  const Span rows = share(a.r.rows, ith, nth);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const float* x = a.r.x + r * a.r.ldx;
    float* y = a.r.y + r * a.r.ldy;
    const int64_t groups = a.k_padded / kGroup;
    if (a.head_dim > 0) {
      norm_heads(a, x, y);
      if (a.xq.q) quantize_row(y, a.r.width, a.k_padded, a.xq.q + r * a.k_padded, a.xq.scale + r * groups, a.xq.sum + r * groups);
    } else if (a.xq.q) {
      norm_quantised(a, x, y, a.xq.q + r * a.k_padded, a.xq.scale + r * groups, a.xq.sum + r * groups);
    } else {
      apply(a, measure(a, x, a.r.width), x, 0, a.r.width, y);
    }
  }
}

}  // namespace octavo::OCTAVO_NS
