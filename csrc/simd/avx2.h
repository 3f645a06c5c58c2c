// Vectors of simd.h for AVX2 + FMA + F16C: 8 lanes, 16 registers.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_NS {

constexpr int kLanes = 8;
constexpr int kRegisters = 16;
constexpr bool kPairBf16 = false;  // bf16 products are made in fp32

using F = __m256;
using I = __m256i;
using B = __m256i;

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float s) { return _mm256_set1_ps(s); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
inline __m256i lane_mask(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
inline F load_n(const float* p, int n) { return _mm256_maskload_ps(p, lane_mask(n)); }
inline void store_n(float* p, F v, int n) { _mm256_maskstore_ps(p, lane_mask(n), v); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F neg(F a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F sqrt(F a) { return _mm256_sqrt_ps(a); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F select_gt(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline float reduce_add(F v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(F v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// The eight lie in both halves, where one shuffle puts four of them, each over 16 zeros: a widening move and a shift are three operations.
alignas(32) constexpr int8_t kWordsUp[32] = {-1, -1, 0, 1, -1, -1, 2,  3,  -1, -1, 4,  5,  -1, -1, 6,  7,
                                             -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15};
inline F load_bf16(const uint16_t* p) {
  F wide = _mm256_castsi256_ps(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  asm("vpshufb %1, %0, %0" : "+x"(wide) : "m"(kWordsUp));  // the places from memory: kept in a register they push out a sum
  return wide;
}
inline __m256i bf16_bits(F v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i top = _mm256_srli_epi32(bits, 16);
  const __m256i bias = _mm256_add_epi32(_mm256_and_si256(top, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, is_nan);
}
inline void store_bf16(uint16_t* p, F v) {
  const __m256i bits = bf16_bits(v);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline F round_bf16(F v) { return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(v), 16)); }
// The two bf16 of each slot, widened.
inline F pair_even(B w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
inline F pair_odd(B w) { return _mm256_and_ps(_mm256_castsi256_ps(w), _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u)))); }
inline F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// e4m3 moved into fp16's place: sign, then exponent and mantissa below its highest exponent bit.
inline void load_f8_pair(const uint8_t* p, F& even, F& odd) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
  const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbfff)));
  even = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  odd = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}

inline F round_even(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void store_i8(int8_t* p, F v) {
  const __m256i i = _mm256_cvtps_epi32(v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
inline F scale_pow2(F p, F n) {
  // In two factors: 2^128 alone is not a float.
  const __m256i i = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(i, 1), second = _mm256_sub_epi32(i, first);
  const __m256i bias = _mm256_set1_epi32(127);
  p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23)));
}
inline I bits_max(I m, F v) { return _mm256_max_epi32(m, _mm256_castps_si256(abs(v))); }
inline int32_t reduce_max(I v) {
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline F to_float(I v) { return _mm256_cvtepi32_ps(v); }

inline B load_b(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline B dup4(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}
inline B low4(B b) { return _mm256_and_si256(b, _mm256_set1_epi8(0x0f)); }
inline B high4(B b) { return _mm256_and_si256(_mm256_srli_epi16(b, 4), _mm256_set1_epi8(0x0f)); }

using Table = B;
inline Table load_table(const int8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline B lookup16(Table t, B b) { return _mm256_shuffle_epi8(t, b); }

// Pairs of products in int16: 8 steps of 2 * 15 * 127 are 30480 at most, so that one widening per 8 steps is enough.
using D = __m256i;
inline D dot4_zero() { return _mm256_setzero_si256(); }
// The empty asm keeps the sums in order: reassociated into trees, they need more registers than there are.
inline D dot4(D acc, B w, B x) {
  acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x));
  asm("" : "+x"(acc));
  return acc;
}
inline I dot4_sum(D acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
// maddubs wants one unsigned operand: |w|, with w's sign moved to x. 2 * 128 * 127 fits in int16, a second such pair would not.
struct W8 {
  B magnitude, sign;
};
inline W8 prepare8(B w) { return {_mm256_abs_epi8(w), w}; }
inline I dot8_start(int32_t) { return _mm256_setzero_si256(); }
inline I dot8(I acc, W8 w, B x) {
  const __m256i pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(x, w.sign));
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  asm("" : "+x"(acc));
  return acc;
}

}  // namespace octavo::OCTAVO_NS
