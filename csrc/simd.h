// The vectors that kernels are written in: one namespace (OCTAVO_NS) per instruction set, the same names in each.
// Knows nothing of kernels. Each simd/<isa>.h supplies the primitives; what is below is shared by all of them.
//
// Types: F holds kLanes floats, I kLanes int32, B 4 * kLanes bytes (four consecutive k of one lane per 32-bit slot).
// Primitives of every variant:
//   load(p) store(p, v)            kLanes floats, no alignment needed
//   load_n(p, n) store_n(p, v, n)  the first n lanes (0 <= n <= kLanes); lanes not loaded are 0, memory beyond is not touched
//   set1(s) zero()
//   add sub mul div fma(a, b, c) neg abs sqrt
//                                  fma = a * b + c, rounded once where the hardware can (everywhere but portable, portable16)
//   max(a, b) = a > b ? a : b      and min(a, b) = a < b ? a : b: the second operand when either is a NaN
//   select_gt(a, b, x, y) = a > b ? x : y
//   reduce_add(v)                  halves folded onto each other: lane i + lane i + L/2, then L/4, ... 1
//   reduce_max(v)                  as max(), folded in the same order; the result is unspecified if a lane is a NaN
//   load_bf16(p) store_bf16(p, v) round_bf16(v) load_f16(p)
//                                  kLanes 16-bit floats; to bf16 rounds half to even, a NaN stays a (quiet) NaN
//   load_f8_pair(p, even, odd)     2 * kLanes e4m3 bytes, all of the first input, then of the second, times 2^-8; its NaN is 1.875
//   round_even(v)                  to the nearest integer, half to even; |v| < 2^22
//   store_i8(p, v)                 kLanes int8 from integral floats within [-128, 127]
//   scale_pow2(p, n)               p * 2^n for integral n in [-126, 128]
//   bits_max(I, F) reduce_max(I)   running maximum of |v| compared as bit patterns: a NaN or infinity is kept, not lost
//   to_float(I)
//   load_b(p) dup4(p)              4 * kLanes bytes; the 4 bytes at p in every 32-bit slot
//   low4(b) high4(b)               nibbles as bytes 0..15
//   Table, load_table(p), lookup16(Table, b)
//                                  16 numbers int8; for each byte 0..15 its number
//   D, dot4_zero(), dot4(D, w, x), dot4_sum(D) -> I
//                                  per slot the sum of w * x, w in 0..15, |x| <= 127, over at most 8 calls of dot4
//   W8, prepare8(b), dot8_start(sum_x) -> I, dot8(I, W8, x) -> I
//                                  per slot the sum of w * x, w int8, |x| <= 127; dot8_start takes the sum of all x that follow
//   pair_even(b) pair_odd(b)       the first and second bf16 of each slot, as floats
//   fma_bf16(acc, w, x)            acc + w.even * x.even + w.odd * x.odd, two bf16 per slot; kPairBf16: by one instruction
// All operations work lane by lane, so that a lane's bits never depend on its neighbours.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifndef OCTAVO_NS
#error "simd.h is for sources that are compiled once per instruction set"
#endif

#if defined(OCTAVO_ISA_portable) || defined(OCTAVO_ISA_portable16)
#include "simd/portable.h"
#elif defined(OCTAVO_ISA_avx2)
#include "simd/avx2.h"
#elif defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx512vnni) || defined(OCTAVO_ISA_avx512bf16)
#include "simd/avx512.h"
#elif defined(OCTAVO_ISA_neon)
#include "simd/neon.h"
#else
#error "unknown instruction set"
#endif

namespace octavo::OCTAVO_NS {

#if !defined(OCTAVO_ISA_avx512bf16)
inline F fma_bf16(F acc, B w, B x) { return fma(pair_odd(w), pair_odd(x), fma(pair_even(w), pair_even(x), acc)); }
#endif

// n lanes of 16-bit floats, through a copy: only for the tail of a row.
inline F load_bf16_n(const uint16_t* p, int n) {
  uint16_t copy[kLanes] = {};
  std::memcpy(copy, p, size_t(n) * 2);
  return load_bf16(copy);
}
inline void store_bf16_n(uint16_t* p, F v, int n) {
  uint16_t copy[kLanes];
  store_bf16(copy, v);
  std::memcpy(p, copy, size_t(n) * 2);
}
inline F load_f16_n(const uint16_t* p, int n) {
  uint16_t copy[kLanes] = {};
  std::memcpy(copy, p, size_t(n) * 2);
  return load_f16(copy);
}

// One float to and from 16 bits, for scalar code; the same rounding as the vectors.
inline float bf16_to_float(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// e^x within 2 ulp. exp(0) is exactly 1; results below the smallest normal float are 0; above the largest, infinity; a NaN
// stays one. x = n ln 2 + r with ln 2 in two parts, the first short enough that n times it is exact without fma.
inline F exp(F x) {
  const F top = set1(89.0f), bottom = set1(-87.33654f);
  const F clamped = min(top, max(bottom, x));  // x is the second operand of max: a NaN passes; then of min: likewise
  const F n = round_even(mul(clamped, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return select_gt(bottom, x, zero(), scale_pow2(p, n));
}

// Within 3 ulp; odd; a NaN stays one. Below 0.625 a polynomial (the other form would cancel), above it by exp.
inline F tanh(F x) {
  const F a = abs(x);
  const F z = mul(x, x);
  F p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const F small = fma(mul(p, z), x, x);
  const F big = sub(set1(1.0f), div(set1(2.0f), add(exp(add(a, a)), set1(1.0f))));
  const F signed_big = select_gt(zero(), x, neg(big), big);
  return select_gt(a, set1(0.625f), signed_big, small);
}

inline F silu(F x) { return div(x, add(set1(1.0f), exp(neg(x)))); }

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
inline F gelu_tanh(F x) {
  const F inner = mul(set1(0.7978845608028654f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

}  // namespace octavo::OCTAVO_NS
