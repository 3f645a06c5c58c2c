// Vectors of simd.h for Arm NEON with the dot-product instructions: 8 lanes as two halves, 32 registers of half a vector.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_NS {

constexpr int kLanes = 8;
constexpr int kRegisters = 16;  // 32 of half the width
constexpr bool kPairBf16 = false;

struct F {
  float32x4_t lo, hi;
};
struct I {
  int32x4_t lo, hi;
};
struct B {
  int8x16_t lo, hi;
};

inline F zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline F set1(float s) { return {vdupq_n_f32(s), vdupq_n_f32(s)}; }
inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, F v) {
  vst1q_f32(p, v.lo);
  vst1q_f32(p + 4, v.hi);
}
inline F load_n(const float* p, int n) {
  float copy[8] = {};
  std::memcpy(copy, p, size_t(n) * 4);
  return load(copy);
}
inline void store_n(float* p, F v, int n) {
  float copy[8];
  store(copy, v);
  std::memcpy(p, copy, size_t(n) * 4);
}
inline F add(F a, F b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
inline F sub(F a, F b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
inline F mul(F a, F b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
inline F div(F a, F b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
inline F fma(F a, F b, F c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
inline F neg(F a) { return {vnegq_f32(a.lo), vnegq_f32(a.hi)}; }
inline F abs(F a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
inline F sqrt(F a) { return {vsqrtq_f32(a.lo), vsqrtq_f32(a.hi)}; }
inline F select_gt(F a, F b, F x, F y) {
  return {vbslq_f32(vcgtq_f32(a.lo, b.lo), x.lo, y.lo), vbslq_f32(vcgtq_f32(a.hi, b.hi), x.hi, y.hi)};
}
inline F max(F a, F b) { return select_gt(a, b, a, b); }  // not vmaxq: its NaNs differ
inline F min(F a, F b) { return select_gt(b, a, a, b); }
inline float reduce_add(F v) {
  const float32x4_t s = vaddq_f32(v.lo, v.hi);
  const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
inline float reduce_max(F v) { return vmaxvq_f32(vmaxq_f32(v.lo, v.hi)); }

inline F load_bf16(const uint16_t* p) {
  const uint16x8_t h = vld1q_u16(p);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)), vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))};
}
inline uint32x4_t bf16_bits(float32x4_t v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v), top = vshrq_n_u32(bits, 16);
  const uint32x4_t bias = vaddq_u32(vandq_u32(top, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, bias), 16);
  return vbslq_u32(vceqq_f32(v, v), rounded, vorrq_u32(top, vdupq_n_u32(0x40)));
}
inline void store_bf16(uint16_t* p, F v) { vst1q_u16(p, vcombine_u16(vmovn_u32(bf16_bits(v.lo)), vmovn_u32(bf16_bits(v.hi)))); }
inline F round_bf16(F v) {
  return {vreinterpretq_f32_u32(vshlq_n_u32(bf16_bits(v.lo), 16)), vreinterpretq_f32_u32(vshlq_n_u32(bf16_bits(v.hi), 16))};
}
// The two bf16 of each slot, widened.
inline float32x4_t pair_even_half(int8x16_t w) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_s8(w), 16)); }
inline float32x4_t pair_odd_half(int8x16_t w) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s8(w), vdupq_n_u32(0xffff0000u)));
}
inline F pair_even(B w) { return {pair_even_half(w.lo), pair_even_half(w.hi)}; }
inline F pair_odd(B w) { return {pair_odd_half(w.lo), pair_odd_half(w.hi)}; }
inline F load_f16(const uint16_t* p) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
// e4m3 moved into fp16's place: sign, then exponent and mantissa below its highest exponent bit.
inline F load_f8(const uint8_t* p) {
  const uint16x8_t wide = vshlq_n_u16(vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)))), 7);
  const float16x8_t h = vreinterpretq_f16_u16(vandq_u16(wide, vdupq_n_u16(0xbfff)));
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
inline void load_f8_pair(const uint8_t* p, F& even, F& odd) {
  even = load_f8(p);
  odd = load_f8(p + kLanes);
}

inline F round_even(F v) { return {vrndnq_f32(v.lo), vrndnq_f32(v.hi)}; }
inline void store_i8(int8_t* p, F v) {
  const int16x8_t words = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(v.lo)), vqmovn_s32(vcvtnq_s32_f32(v.hi)));
  vst1_s8(p, vqmovn_s16(words));
}
inline float32x4_t scale_pow2_half(float32x4_t p, float32x4_t n) {
  // In two factors: 2^128 alone is not a float.
  const int32x4_t i = vcvtnq_s32_f32(n), first = vshrq_n_s32(i, 1), second = vsubq_s32(i, first), bias = vdupq_n_s32(127);
  p = vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(first, bias), 23)));
  return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(second, bias), 23)));
}
inline F scale_pow2(F p, F n) { return {scale_pow2_half(p.lo, n.lo), scale_pow2_half(p.hi, n.hi)}; }
inline I bits_max(I m, F v) {
  return {vmaxq_s32(m.lo, vreinterpretq_s32_f32(vabsq_f32(v.lo))), vmaxq_s32(m.hi, vreinterpretq_s32_f32(vabsq_f32(v.hi)))};
}
inline int32_t reduce_max(I v) { return vmaxvq_s32(vmaxq_s32(v.lo, v.hi)); }
inline F to_float(I v) { return {vcvtq_f32_s32(v.lo), vcvtq_f32_s32(v.hi)}; }

inline B load_b(const void* p) {
  const int8_t* bytes = static_cast<const int8_t*>(p);
  return {vld1q_s8(bytes), vld1q_s8(bytes + 16)};
}
inline B dup4(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(word));
  return {all, all};
}
inline B low4(B b) { return {vandq_s8(b.lo, vdupq_n_s8(0x0f)), vandq_s8(b.hi, vdupq_n_s8(0x0f))}; }
inline int8x16_t high4_half(int8x16_t b) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(b), 4)); }
inline B high4(B b) { return {high4_half(b.lo), high4_half(b.hi)}; }

using Table = int8x16_t;
inline Table load_table(const int8_t* p) { return vld1q_s8(p); }
inline B lookup16(Table t, B b) { return {vqtbl1q_s8(t, vreinterpretq_u8_s8(b.lo)), vqtbl1q_s8(t, vreinterpretq_u8_s8(b.hi))}; }

inline I slot_dot(I acc, B w, B x) { return {vdotq_s32(acc.lo, w.lo, x.lo), vdotq_s32(acc.hi, w.hi, x.hi)}; }
using D = I;
inline D dot4_zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline D dot4(D acc, B w, B x) { return slot_dot(acc, w, x); }
inline I dot4_sum(D acc) { return acc; }
using W8 = B;
inline W8 prepare8(B w) { return w; }
inline I dot8_start(int32_t) { return dot4_zero(); }
inline I dot8(I acc, W8 w, B x) { return slot_dot(acc, w, x); }

}  // namespace octavo::OCTAVO_NS
