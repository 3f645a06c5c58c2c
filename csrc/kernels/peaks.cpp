// What a machine can do at most with this variant's vectors: the limits that benchmarks put kernels beside. Part of no program.
//
// Products are made on registers, with the operations that the linear kernels are written in: multiply-adds into enough independent
// sums that none waits for the one before, one operand held in registers, the other read from the nearest cache.
#include <algorithm>
#include <utility>

#include "decl.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int kRows = 6;  // times kColumns sums: with their operands, all that 16 registers hold
constexpr int kColumns = 2;
constexpr int kSteps = 64;  // between two looks at the operands

// Operands that the compiler must take for new ones at each look, or it would multiply them once.
template <class T>
inline const T* unknown(const T* p) {
  asm volatile("" : "+r"(p));
  return p;
}

// What is summed must be wanted by somebody.
inline void use(float v) { asm volatile("" : : "m"(v)); }

// fn(0), fn(1), ... written out: sums that a loop indexes would live in memory.
template <class Fn, size_t... kIndex>
inline void each(std::index_sequence<kIndex...>, Fn fn) {
  (fn(kIndex), ...);
}

// `repeats` times kSteps multiply-adds of every column of w with every row of x, operands of kWidth elements.
template <int MR, int kWidth, class Sum, class W, class X, class LoadX, class MultiplyAdd, class Value>
void multiply(Sum start, const W (&w)[kColumns], const X* x, int64_t repeats, LoadX load_x, MultiplyAdd multiply_add, Value value) {
  static_assert(kColumns == 2, "written out below");
  constexpr auto rows = std::make_index_sequence<size_t(MR)>{};
  const W left = w[0], right = w[1];
  Sum sum[MR][kColumns];
  each(rows, [&](size_t r) { sum[r][0] = sum[r][1] = start; });
  for (int64_t step = 0; step < repeats * kSteps; ++step) {
    x = unknown(x);
    each(rows, [&](size_t r) {
      const auto one = load_x(x + r * kWidth);
      sum[r][0] = multiply_add(sum[r][0], left, one);
      sum[r][1] = multiply_add(sum[r][1], right, one);
    });
  }
  float total = 0.0f;
  each(rows, [&](size_t r) { total += value(sum[r][0]) + value(sum[r][1]); });
  use(total);
}

constexpr double operations(int rows, int per_vector, int64_t repeats) {
  return 2.0 * double(repeats) * kSteps * rows * kColumns * per_vector;
}

double floats(int64_t repeats) {
  alignas(64) float x[kRows * kLanes];
  std::fill_n(x, kRows * kLanes, 0.5f);
  const F w[kColumns] = {set1(1e-3f), set1(2e-3f)};
  multiply<kRows, kLanes>(
      zero(), w, x, repeats, [](const float* p) { return load(p); }, [](F sum, F a, F b) { return fma(a, b, sum); }, reduce_add);
  return operations(kRows, kLanes, repeats);
}

// Signs alternate within each four bytes, so that sums of 16 bits stay where they are.
struct Bytes {
  Bytes() {
    for (int i = 0; i < kRows * 4 * kLanes; ++i) x[i] = i % 2 == 0 ? 1 : -1;
    std::fill_n(w[0], 4 * kLanes, uint8_t(5));
    std::fill_n(w[1], 4 * kLanes, uint8_t(9));
  }
  alignas(64) int8_t x[kRows * 4 * kLanes];
  alignas(64) uint8_t w[kColumns][4 * kLanes];
};

double nibbles(int64_t repeats) {
  const Bytes bytes;
  const B w[kColumns] = {load_b(bytes.w[0]), load_b(bytes.w[1])};
  multiply<kRows, 4 * kLanes>(
      dot4_zero(), w, bytes.x, repeats, [](const int8_t* p) { return load_b(p); }, [](D sum, B a, B b) { return dot4(sum, a, b); },
      [](D sum) { return reduce_add(to_float(dot4_sum(sum))); });
  return operations(kRows, 4 * kLanes, repeats);
}

double whole_bytes(int64_t repeats) {
  constexpr int kFew = kRegisters == 32 ? kRows : 4;  // a prepared weight may take two registers
  const Bytes bytes;
  const W8 w[kColumns] = {prepare8(load_b(bytes.w[0])), prepare8(load_b(bytes.w[1]))};
  multiply<kFew, 4 * kLanes>(
      dot8_start(0), w, bytes.x, repeats, [](const int8_t* p) { return load_b(p); },
      [](I sum, const W8& a, B b) { return dot8(sum, a, b); }, [](I sum) { return reduce_add(to_float(sum)); });
  return operations(kFew, 4 * kLanes, repeats);
}

// Where there is no instruction for pairs of bf16, kernels widen them and multiply floats.
double pairs(int64_t repeats) {
#if defined(OCTAVO_ISA_avx512bf16)
  alignas(64) uint16_t x[kRows * 2 * kLanes], half[2 * kLanes];
  std::fill_n(x, kRows * 2 * kLanes, float_to_bf16(0.5f));
  std::fill_n(half, 2 * kLanes, float_to_bf16(1e-3f));
  const B w[kColumns] = {load_b(half), load_b(half)};
  multiply<kRows, 2 * kLanes>(
      zero(), w, x, repeats, [](const uint16_t* p) { return load_b(p); }, [](F sum, B a, B b) { return fma_bf16(sum, a, b); }, reduce_add);
  return operations(kRows, 2 * kLanes, repeats);
#else
  return floats(repeats);
#endif
}

}  // namespace

double peak_products(WeightKind kind, int64_t repeats) {
  switch (kind) {
    case WeightKind::bf16:
      return pairs(repeats);
    case WeightKind::w4:
      return nibbles(repeats);
    case WeightKind::w8:
    case WeightKind::t4:
      return whole_bytes(repeats);
    case WeightKind::f32:
    case WeightKind::f16:
    case WeightKind::f8:
      break;
  }
  return floats(repeats);
}

void peak_read(const float* data, size_t count, size_t ahead) {
  constexpr size_t kSums = 8, kStep = kSums * size_t(kLanes);
  F sum[kSums];
  for (F& s : sum) s = zero();
  for (size_t i = 0; i + kStep <= count; i += kStep) {
    const float* p = data + i;
    if (ahead > 0)
      for (size_t line = 0; line < kStep * sizeof(float); line += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead + line);
#pragma GCC unroll 8
    for (size_t s = 0; s < kSums; ++s) sum[s] = octavo::OCTAVO_NS::add(sum[s], load(p + s * kLanes));
  }
  float total = 0.0f;
  for (const F& s : sum) total += reduce_add(s);
  use(total);
}

}  // namespace octavo::OCTAVO_NS
