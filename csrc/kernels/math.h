// Vector functions of the attention and the sampling kernel.
#pragma once
#include "simd.h"

namespace octavo::OCTAVO_NS {

// The low nine bits of each lane become its sign and exponent.
#if defined(OCTAVO_ISA_avx2)
inline F exponent_of(F v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 23)); }
inline F zero_if_gt(F a, F b, F v) { return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), v); }
#elif defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx512vnni) || defined(OCTAVO_ISA_avx512bf16)
inline F exponent_of(F v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 23)); }
#elif defined(OCTAVO_ISA_neon)
inline float32x4_t exponent_of(float32x4_t v) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(v), 23)); }
inline F exponent_of(F v) { return {exponent_of(v.lo), exponent_of(v.hi)}; }
#else
inline F exponent_of(F v) { return F(U(v) << 23); }
#endif

// 0 where a > b, else v.
#if !defined(OCTAVO_ISA_avx2)
inline F zero_if_gt(F a, F b, F v) { return select_gt(a, b, zero(), v); }
#endif

// e^x for x <= 0, within 2 ulp: exp(0) is exactly 1, below -87.33 it is 0, a NaN stays one. A third less work than exp(), which
// must also reach infinity.
inline F exp_nonpositive(F x) {
  const F bottom = set1(-87.33654f), magic = set1(12583039.0f);  // 1.5 * 2^23 + 127: rounds, and leaves n + 127 in the low bits
  const F t = fma(x, set1(1.44269504088896341f), magic);         // of x below the bottom anything, -inf's a NaN: replaced in the end
  const F n = sub(t, magic);
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return zero_if_gt(bottom, x, mul(p, exponent_of(t)));
}

}  // namespace octavo::OCTAVO_NS
