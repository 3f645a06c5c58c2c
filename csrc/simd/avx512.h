// Vectors of simd.h for AVX-512 (F, BW, VL, DQ): 16 lanes, 32 registers; with VNNI and BF16 where the variant has them.
#pragma once
// GCC 12 takes the deliberately undefined sources inside its own AVX-512 intrinsics for uninitialized variables.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(OCTAVO_ISA_avx512vnni) || defined(OCTAVO_ISA_avx512bf16)
#define OCTAVO_VNNI 1
#endif

namespace octavo::OCTAVO_NS {

constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#if defined(OCTAVO_ISA_avx512bf16)
constexpr bool kPairBf16 = true;  // two bf16 products per slot and instruction
#else
constexpr bool kPairBf16 = false;
#endif

using F = __m512;
using I = __m512i;
using B = __m512i;

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float s) { return _mm512_set1_ps(s); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline __mmask16 lane_mask(int n) { return __mmask16((1u << n) - 1u); }
inline F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lane_mask(n), p); }
inline void store_n(float* p, F v, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), v); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F neg(F a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
inline F abs(F a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
inline F sqrt(F a) { return _mm512_sqrt_ps(a); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F select_gt(F a, F b, F x, F y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x); }
inline float reduce_add(F v) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(F v) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline F load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// By integers even where vcvtneps2bf16 exists: that instruction flushes subnormals, the other variants do not.
inline __m512i bf16_bits(F v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i top = _mm512_srli_epi32(bits, 16);
  const __m512i bias = _mm512_add_epi32(_mm512_and_si512(top, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), rounded, quiet);
}
inline void store_bf16(uint16_t* p, F v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_bits(v))); }
inline F round_bf16(F v) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(v), 16)); }
// The two bf16 of each slot, widened.
inline F pair_even(B w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
inline F pair_odd(B w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u)))); }
inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// e4m3 moved into fp16's place: sign, then exponent and mantissa below its highest exponent bit.
inline void load_f8_pair(const uint8_t* p, F& even, F& odd) {
  const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 7);
  const __m512i halves = _mm512_and_si512(wide, _mm512_set1_epi16(int16_t(0xbfff)));
  even = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  odd = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

inline F round_even(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void store_i8(int8_t* p, F v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v))); }
inline F scale_pow2(F p, F n) {
  // In two factors: 2^128 alone is not a float.
  const __m512i i = _mm512_cvtps_epi32(n), first = _mm512_srai_epi32(i, 1), second = _mm512_sub_epi32(i, first);
  const __m512i bias = _mm512_set1_epi32(127);
  p = _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(first, bias), 23)));
  return _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(second, bias), 23)));
}
inline I bits_max(I m, F v) { return _mm512_max_epi32(m, _mm512_castps_si512(abs(v))); }
inline int32_t reduce_max(I v) { return _mm512_reduce_max_epi32(v); }
inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }

inline B load_b(const void* p) { return _mm512_loadu_si512(p); }
inline B dup4(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
inline B low4(B b) { return _mm512_and_si512(b, _mm512_set1_epi8(0x0f)); }
inline B high4(B b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(0x0f)); }

using Table = B;
inline Table load_table(const int8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline B lookup16(Table t, B b) { return _mm512_shuffle_epi8(t, b); }

using D = __m512i;
inline D dot4_zero() { return _mm512_setzero_si512(); }
#if defined(OCTAVO_VNNI)
inline D dot4(D acc, B w, B x) { return _mm512_dpbusd_epi32(acc, w, x); }
inline I dot4_sum(D acc) { return acc; }
// dpbusd wants w unsigned: w + 128, which adds 128 * sum(x); the sum starts at minus that.
using W8 = B;
inline W8 prepare8(B w) { return _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80))); }
inline I dot8_start(int32_t sum_x) { return _mm512_set1_epi32(-128 * sum_x); }
inline I dot8(I acc, W8 w, B x) { return _mm512_dpbusd_epi32(acc, w, x); }
#else
// Pairs of products in int16: 8 steps of 2 * 15 * 127 are 30480 at most, so that one widening per 8 steps is enough.
// The empty asm keeps the sums in order: reassociated into trees, they need more registers than there are.
inline D dot4(D acc, B w, B x) {
  acc = _mm512_add_epi16(acc, _mm512_maddubs_epi16(w, x));
  asm("" : "+v"(acc));
  return acc;
}
inline I dot4_sum(D acc) { return _mm512_madd_epi16(acc, _mm512_set1_epi16(1)); }
// maddubs wants one unsigned operand: |w|, with w's sign moved to x. 2 * 128 * 127 fits in int16, a second such pair would not.
struct W8 {
  B magnitude;
  __mmask64 negative;
};
inline W8 prepare8(B w) { return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)}; }
inline I dot8_start(int32_t) { return _mm512_setzero_si512(); }
inline I dot8(I acc, W8 w, B x) {
  const __m512i turned = _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
  const __m512i pairs = _mm512_maddubs_epi16(w.magnitude, turned);
  acc = _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  asm("" : "+v"(acc));
  return acc;
}
#endif

#if defined(OCTAVO_ISA_avx512bf16)
inline F fma_bf16(F acc, B w, B x) { return _mm512_dpbf16_ps(acc, __m512bh(w), __m512bh(x)); }
#endif

}  // namespace octavo::OCTAVO_NS
