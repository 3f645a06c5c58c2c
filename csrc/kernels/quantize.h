// Quantisation of one row of activations; shared by the quantize and the norm kernel, so that both give the same bits.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {

// One group of kGroup floats (may be unaligned; all readable): q, its scale max|x| / 127, and the sum of q.
inline void quantize_group(const float* x, int8_t* q, float* scale, float* sum) {
  constexpr int kVectors = kGroup / kLanes;
  F v[kVectors];
  for (int i = 0; i < kVectors; ++i) v[i] = load(x + i * kLanes);
  I top = bits_max(I{}, v[0]);
  for (int i = 1; i < kVectors; ++i) top = bits_max(top, v[i]);
  const int32_t bits = reduce_max(top);
  float amax;
  std::memcpy(&amax, &bits, 4);
  const float s = amax / 127.0f;
  if (s == 0.0f || bits >= 0x7f800000) {  // all zero (or too small for a scale), or not finite
    std::memset(q, 0, kGroup);
    *scale = bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    *sum = 0.0f;
    return;
  }
  // The clamp matters only where s is subnormal, too coarse to bring max|x| to 127.
  const F s_all = set1(s), limit = set1(127.0f), low = set1(-127.0f);
  F total = zero();
  for (int i = 0; i < kVectors; ++i) {
    const F code = round_even(max(low, min(limit, div(v[i], s_all))));
    store_i8(q + i * kLanes, code);
    total = octavo::OCTAVO_NS::add(total, code);  // integers far below 2^24: exact in any order
  }
  *scale = s;
  *sum = reduce_add(total);
}

// Groups [first, last) of a row of k floats; codes from k to the next multiple of kGroup are 0.
inline void quantize_groups(const float* x, int64_t k, int64_t first, int64_t last, int8_t* q, float* scale, float* sum) {
  for (int64_t g = first; g < last; ++g) {
    const int64_t start = g * kGroup;
    if (start + kGroup <= k) {
      quantize_group(x + start, q + start, scale + g, sum + g);
      continue;
    }
    float copy[kGroup] = {};
    if (start < k) std::memcpy(copy, x + start, size_t(k - start) * 4);
    quantize_group(copy, q + start, scale + g, sum + g);
  }
}

inline void quantize_row(const float* x, int64_t k, int64_t k_padded, int8_t* q, float* scale, float* sum) {
  quantize_groups(x, k, 0, k_padded / kGroup, q, scale, sum);
}

}  // namespace octavo::OCTAVO_NS
