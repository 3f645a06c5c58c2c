// The kernels of one variant, by the names of KernelTable's members; table.cpp collects them.
#pragma once
#include "kernels.h"

namespace octavo::OCTAVO_NS {

size_t packed_bytes(const PackedW& w);
void pack(const PackedW& w, const PackSource& source, int64_t first_row, int ith, int nth);
void dequant_row(const PackedW& w, int64_t row, float* out);
void quantize_rows(const float* x, int64_t ldx, int64_t rows, int64_t k, int64_t k_padded, const int32_t* columns, QuantRows out, int ith,
                   int nth);
size_t linear_scratch(WeightKind kind, int64_t k);
void linear(const LinearArgs& args, int ith, int nth);
void linear_w4(const LinearArgs& args, int ith, int nth);
void linear_w8(const LinearArgs& args, int ith, int nth);  // w8, t4
void linear_float(const LinearArgs& args, int ith, int nth);  // f32, bf16, f16
size_t linear_w4_scratch(int64_t k);
size_t linear_w8_scratch(int64_t k);
size_t linear_t4_scratch(int64_t k);
size_t linear_float_scratch(int64_t k);

void norm(const NormArgs& args, int ith, int nth);
void rope(const RopeArgs& args, int ith, int nth);
void act(const ActArgs& args, int ith, int nth);
void unary(const UnaryArgs& args, int ith, int nth);
void gate_rows(const GateArgs& args, int ith, int nth);
void embed(const EmbedArgs& args, int ith, int nth);
void add(const AddArgs& args, int ith, int nth);
void gather(const GatherArgs& args, int ith, int nth);
void route(const RouteArgs& args, int ith, int nth);
void dispatch(const DispatchArgs& args, int ith, int nth);
void combine(const CombineArgs& args, int ith, int nth);
void kv_write(const KvWriteArgs& args, int ith, int nth);
size_t attention_scratch(int64_t head_dim);
void attention(const AttentionArgs& args, int ith, int nth);
size_t sample_scratch(int64_t vocab);
void sample(const SampleArgs& args, int ith, int nth);
void logprobs(const LogprobArgs& args, int ith, int nth);
double peak_products(WeightKind kind, int64_t repeats);
void peak_read(const float* data, size_t count, size_t ahead);

}  // namespace octavo::OCTAVO_NS
