// This variant's KernelTable, and whether the machine can run it.
#include "decl.h"
#include "simd.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace octavo::OCTAVO_NS {
namespace {

#define OCTAVO_TEXT_(x) #x
#define OCTAVO_TEXT(x) OCTAVO_TEXT_(x)

// __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
int score() {
#if defined(OCTAVO_ISA_portable)
  return 1;
#elif defined(OCTAVO_ISA_avx2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? 10 : 0;
#elif defined(OCTAVO_ISA_avx512) || defined(OCTAVO_ISA_avx512vnni) || defined(OCTAVO_ISA_avx512bf16)
  const bool base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(OCTAVO_ISA_avx512)
  return base ? 20 : 0;
#elif defined(OCTAVO_ISA_avx512vnni)
  return base && __builtin_cpu_supports("avx512vnni") ? 30 : 0;
#else
  return base && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") ? 40 : 0;
#endif
#elif defined(OCTAVO_ISA_neon)
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP) & HWCAP_FPHP) ? 10 : 0;
#else
  return 10;
#endif
#else
  return 0;  // portable16: runs anywhere, chosen only by name
#endif
}

}  // namespace

size_t linear_scratch(WeightKind kind, int64_t k) {
  if (kind == WeightKind::w4) return linear_w4_scratch(k);
  if (kind == WeightKind::w8) return linear_w8_scratch(k);
  if (kind == WeightKind::t4) return linear_t4_scratch(k);
  return linear_float_scratch(k);
}

void linear(const LinearArgs& args, int ith, int nth) {
  if (args.w->kind == WeightKind::w4) return linear_w4(args, ith, nth);
  if (args.w->kind == WeightKind::w8 || args.w->kind == WeightKind::t4) return linear_w8(args, ith, nth);
  linear_float(args, ith, nth);
}

extern const KernelTable table;
const KernelTable table = {
    OCTAVO_TEXT(OCTAVO_NS),
    kLanes,
    score,
    packed_bytes,
    pack,
    dequant_row,
    quantize_rows,
    linear_scratch,
    linear,
    norm,
    rope,
    act,
    unary,
    gate_rows,
    embed,
    add,
    gather,
    route,
    dispatch,
    combine,
    kv_write,
    attention_scratch,
    attention,
    sample_scratch,
    sample,
    logprobs,
    peak_products,
    peak_read,
};

}  // namespace octavo::OCTAVO_NS
