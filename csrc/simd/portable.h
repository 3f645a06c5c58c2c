// Vectors of simd.h in plain C++ (GCC and Clang vector extensions), 8 or 16 lanes: runs on any machine.
// fma is a product and a sum, rounded twice.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_NS {

#if defined(OCTAVO_ISA_portable16)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kRegisters = 16;
constexpr bool kPairBf16 = false;  // bf16 products are made in fp32

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef int16_t H __attribute__((vector_size(4 * kLanes)));
typedef int8_t B __attribute__((vector_size(4 * kLanes)));

inline F zero() { return F{}; }
inline F set1(float s) { return F{} + s; }
inline F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
inline F load_n(const float* p, int n) {
  F v{};
  std::memcpy(&v, p, size_t(n) * 4);
  return v;
}
inline void store_n(float* p, F v, int n) { std::memcpy(p, &v, size_t(n) * 4); }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F neg(F a) { return -a; }
inline F abs(F a) { return F(U(a) & 0x7fffffffu); }
inline F sqrt(F a) {
  for (int i = 0; i < kLanes; ++i) a[i] = std::sqrt(a[i]);
  return a;
}
inline F max(F a, F b) { return a > b ? a : b; }
inline F min(F a, F b) { return a < b ? a : b; }
inline F select_gt(F a, F b, F x, F y) { return a > b ? x : y; }
inline float reduce_add(F v) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
  return v[0];
}
inline float reduce_max(F v) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}

inline U load_u16(const uint16_t* p) {
  U v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
}
inline F load_bf16(const uint16_t* p) { return F(load_u16(p) << 16); }
inline U bf16_bits(F v) {
  const U bits = U(v);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U quiet = (bits >> 16) | 0x40u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}
inline void store_bf16(uint16_t* p, F v) {
  const U bits = bf16_bits(v);
  for (int i = 0; i < kLanes; ++i) p[i] = uint16_t(bits[i]);
}
inline F round_bf16(F v) { return F(bf16_bits(v) << 16); }
// The two bf16 of each slot, widened.
inline F pair_even(B w) { return F(U(w) << 16); }
inline F pair_odd(B w) { return F(U(w) & 0xffff0000u); }
inline F load_f16(const uint16_t* p) {
  const U h = load_u16(p);
  // Exponent and mantissa moved into place, then 2^112 corrects the bias, subnormals included; 31 means infinity or NaN.
  const U magnitude = (h & 0x7fffu) << 13;
  const U finite = U(F(magnitude) * 0x1p112f);
  const U special = magnitude | 0x7f800000u;
  const U sign = (h & 0x8000u) << 16;
  return F(((h & 0x7c00u) == 0x7c00u ? special : finite) | sign);
}

// e4m3: exponent and mantissa moved into place, then 2^112 corrects the bias but for 2^8, subnormals included.
inline F load_f8(const uint8_t* p) {
  U v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return F(U(F((v & 0x7fu) << 20) * 0x1p112f) | (v & 0x80u) << 24);
}
inline void load_f8_pair(const uint8_t* p, F& even, F& odd) {
  even = load_f8(p);
  odd = load_f8(p + kLanes);
}

inline F round_even(F v) { return (v + 12582912.0f) - 12582912.0f; }
inline void store_i8(int8_t* p, F v) {
  for (int i = 0; i < kLanes; ++i) p[i] = int8_t(v[i]);
}
inline F scale_pow2(F p, F n) {
  // n sits in the low mantissa bits of n + 1.5 * 2^23; the offset keeps the halving of a negative n a plain shift.
  const U i = U(n + 12582912.0f) - 0x4b400000u + 1024u;
  const U first = i >> 1, second = i - first;
  return p * F((first + (127u - 512u)) << 23) * F((second + (127u - 512u)) << 23);
}
inline I bits_max(I m, F v) {
  const I bits = I(U(v) & 0x7fffffffu);
  return m > bits ? m : bits;
}
inline int32_t reduce_max(I v) {
  int32_t m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}
inline F to_float(I v) { return __builtin_convertvector(v, F); }

inline B load_b(const void* p) {
  B v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline B dup4(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return B(I{} + word);
}
inline B low4(B b) { return b & 0x0f; }
inline B high4(B b) { return B((U(b) >> 4) & 0x0f0f0f0fu); }

struct Table {
  int8_t number[16];
};
inline Table load_table(const int8_t* p) {
  Table t;
  std::memcpy(t.number, p, sizeof t.number);
  return t;
}
inline B lookup16(const Table& t, B b) {
  int8_t bytes[4 * kLanes];
  std::memcpy(bytes, &b, sizeof b);
  for (int8_t& byte : bytes) byte = t.number[byte & 15];
  return load_b(bytes);
}

// Products of bytes fit in int16, and so does the sum of two: 2 * 128 * 127, or 8 steps of 2 * 15 * 127.
inline H pair_dot(B w, B x) {
  const H wide_w = H(w), wide_x = H(x);
  return ((wide_w << 8) >> 8) * ((wide_x << 8) >> 8) + (wide_w >> 8) * (wide_x >> 8);
}
inline I pair_sum(H pairs) { return ((I(pairs) << 16) >> 16) + (I(pairs) >> 16); }
using D = H;
inline D dot4_zero() { return D{}; }
inline D dot4(D acc, B w, B x) { return acc + pair_dot(w, x); }
inline I dot4_sum(D acc) { return pair_sum(acc); }
using W8 = B;
inline W8 prepare8(B w) { return w; }
inline I dot8_start(int32_t) { return I{}; }
inline I dot8(I acc, W8 w, B x) { return acc + pair_sum(pair_dot(w, x)); }

}  // namespace octavo::OCTAVO_NS
