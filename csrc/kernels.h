// The seam between the program (which knows no instruction set) and the kernels (which know no program).
//
// Every kernel file is compiled once per instruction set into its own namespace and fills the KernelTable of that
// variant. A kernel is called by every thread of the pool with its own `ith` of `nth` and divides the work itself; the
// program waits for all of them before the next instruction.
//
// Contract of all of them: ROWS ARE INDEPENDENT. Row i of a result depends, bit for bit, only on row i of the inputs
// (and on that row's own KV blocks): never on the number of rows, on `nth`, on tile shapes or on its neighbours.
// The order in which the terms of one output element are added is fixed by the element's own indices.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// f8: e4m3 (no infinities), scaled. t4: codes of four bits that stand for int8 numbers of a table, scaled.
enum class WeightKind : int32_t { f32 = 0, bf16 = 1, f16 = 2, w8 = 3, w4 = 4, f8 = 5, t4 = 6 };
constexpr bool has_nibbles(WeightKind kind) { return kind == WeightKind::w4 || kind == WeightKind::t4; }
constexpr bool takes_codes(WeightKind kind) { return has_nibbles(kind) || kind == WeightKind::w8; }  // activations as QuantRows

// What a group of w4 or w8 has beside its scale. code: integers of w4 count from -8 (code - 8), of w8 from 0.
enum class Offset : int32_t { code = 0, min = 1, zero = 2 };

constexpr int kGroup = 32;  // activations are quantised per row and group of 32 inputs

// A linear layer's weights, output-major ([n][k]), re-laid for one variant's lanes by its own `pack_*`.
// Sizes are logical; `k_padded` is k rounded up to 32 with zero codes.
struct PackedW {
  WeightKind kind;
  int32_t lanes;      // output channels interleaved: 8 or 16; a blob fits only variants with the same lanes
  int32_t group;      // inputs per scale: a multiple of 32 that divides k, for w8 also 16; 0 for f32, bf16, f16
  int64_t n, k, k_padded;
  Offset offset;
  bool wide;          // scales are fp32, not fp16 (f8: always)
  uint8_t* data;      // owned by the binding; 64-byte aligned; readable up to `bytes` + 64
  size_t bytes;       // size of data, as told by packed_bytes()
  int8_t table[16];   // t4: what each code stands for
};

// What `pack` reads: numpy arrays, possibly strided views into a mapped file (strides in bytes, may be unaligned).
// w4: codes [n][k/group][group/2] bytes; byte j of each 16 holds element j of its 32 in the low and element j+16 in the high nibble,
//     unsigned 0..15. t4: likewise. w8: codes [n][k/group][group] int8. f8: likewise, e4m3. f32/bf16/f16: codes [n][k], group stride = element size.
// value = code * scale + min, or (code - zero) * scale, or with neither (w4) (code - 8) * scale and (w8, f8) code * scale. t4, which has
// neither: table[code] * scale.
// scales [n][k/group]: fp16, or fp32 where the weight is wide. offsets (minimums or zero points) [n][k/group]: fp16, may be null.
struct PackSource {
  int64_t rows;                  // output channels in this source; merged projections are packed source by source
  const uint8_t* codes;  int64_t codes_row, codes_group;
  const uint8_t* scales; int64_t scales_row, scales_group;
  const uint8_t* offsets; int64_t offsets_row, offsets_group;
};

// Activations quantised for w4, t4 and w8: q = round-half-even(x / scale), scale = max|x| / 127 of each group of 32 (scale 0 and
// q 0 for an all-zero group; a group with a NaN or infinity gives a NaN scale). sum = sum(q) of the group (an integer in
// a float; for w8 with group 16 the kernel sums halves itself). Rows are k_padded wide, padding is zero.
struct QuantRows { int8_t* q; float* scale; float* sum; };  // q [rows][k_padded], scale and sum [rows][k_padded/32]

enum class Epilogue : int32_t { none = 0, add = 1, silu_mul = 2, gelu_mul = 3, gelu = 4 };

// t[r][c] = ((bias[c]) + sum_k x[r][k] * w[c][k]) * scale, where a gated epilogue has no scale
// y[r][c] = t[r][c]                                         (none)
// y[r][c] = residual[r][c] + t[r][c]                        (add; y may be the same memory as residual)
// y[r][c] = act(t[r][c]) * t[r][c + n/2], c < n/2           (silu_mul, gelu_mul (tanh form): gate rows first, then up)
// y[r][c] = gelu(t[r][c])                                   (gelu, tanh form)
// Arithmetic, the definition that ops/reference.py repeats:
//  w4, w8: over the weights' groups ascending; a group is the 32-groups h of activations that it covers (or one half of one, w8 of 16):
//            s = sum over h ascending of sx_h * float(isum_h), isum the sum of q, product and sum rounded apart
//            t = over h ascending fma(sx_h, float(idot_h), t), from 0, or for w4 without minimums and zero points from -8 * s
//            acc = fma(sw, t, acc), then with minimums acc = fma(min, s, acc); a zero point is the minimum -(zero * sw), in fp32
//          integers are exact.
//  t4:     as w8 with the table's numbers for codes, bit for bit.
//  bf16:   x is rounded to bf16 (nearest even), products are summed in fp32.
//  f8:     x is rounded to bf16, a weight is code * scale in fp32, products are summed in fp32.
//  f16, f32: x stays fp32.
struct LinearArgs {
  int64_t rows;
  const float* x; int64_t ldx;   // f32, bf16, f16 kinds (a bf16 kernel rounds x itself, into scratch or on the fly)
  QuantRows xq;                  // w4, t4, w8 kinds
  const PackedW* w;
  const float* bias;             // n floats or null
  float* y; int64_t ldy;
  const float* residual; int64_t ldr;
  Epilogue epilogue;
  uint8_t* scratch; size_t scratch_bytes;  // this thread's own, at least KernelTable::linear_scratch() bytes
  float scale = 1.0f;
};

struct RowsArgs { int64_t rows; const float* x; int64_t ldx; float* y; int64_t ldy; int64_t width; };

struct NormArgs {
  RowsArgs r; const float* weight; const float* bias; float eps;  // y = x / sqrt(mean(x^2) + eps) * weight
  bool layer_norm;                                                // else: (x - mean) / sqrt(var + eps) * weight + bias
  QuantRows xq; int64_t k_padded;                                 // when xq.q is set, the result is also quantised into it
  bool store;                                                     // whether y is written at all
  int64_t head_dim;  // 0: the norm runs over `width`; else over each head_dim slice of it (QK norm), weight has head_dim
};

// Rotary embedding of (x[i], x[i + rot/2]), or with `pairs` of (x[2i], x[2i + 1]), for i < rot/2 of each head; cos_sin [positions][rot]: cos
// then sin.
struct RopeArgs { RowsArgs r; const int32_t* positions; const float* cos_sin; int64_t num_heads, head_dim, rot; bool pairs; };

struct ActArgs { RowsArgs r; int kind; };  // kind 0 silu, 1 gelu tanh; x is [rows][2*width] gate then up, y [rows][width]

// gelu: tanh form; scale: x * factor; soft_cap: factor * tanh(x / factor). y may be x.
enum class Unary : int32_t { gelu = 0, scale = 1, soft_cap = 2 };
struct UnaryArgs { RowsArgs r; Unary kind; float factor; };

struct GateArgs { RowsArgs r; const float* gate; int64_t ldg; };  // y = x * sigmoid(gate[row * ldg]); y may be x

struct EmbedArgs { int64_t rows; const int32_t* ids; const PackedW* w; float* y; int64_t ldy; float scale; };

struct AddArgs { RowsArgs r; const float* b; int64_t ldb; };   // y = x + b

struct GatherArgs { RowsArgs r; const int32_t* index; };       // y[i] = x[index[i]]

// A mixture of experts, in steps: `route` chooses each row's experts; `dispatch` copies the rows, those of one expert side by side; the
// program runs the experts' products on their runs of rows; `combine` adds what comes back. A pair is one row and one of its experts,
// numbered row * top_k + rank.
constexpr size_t moe_scratch(int64_t experts) { return size_t(experts + 16) * 8; }

// The top_k largest logits of each row, ties to the lower id, and their weights: exp(logit - max), divided by the sum over all experts,
// or over the chosen ones if `renormalise`. A row with a NaN has NaN weights, and some experts.
struct RouteArgs {
  int64_t rows; const float* logits; int64_t ld; int64_t experts, top_k; bool renormalise;
  int32_t* chosen; float* weights;         // [rows][top_k]
  uint8_t* scratch;                        // this thread's own, at least moe_scratch(experts) bytes
};

// Row place[p] of y, yq becomes the row of pair p of x, xq; expert e has rows offsets[e]..offsets[e + 1], by ascending pair.
struct DispatchArgs {
  int64_t rows, experts, top_k, width; const int32_t* chosen;
  int32_t* place; int32_t* offsets;        // [rows][top_k], [experts + 1]
  const float* x; int64_t ldx; float* y; int64_t ldy;  // y null: no floats wanted
  QuantRows xq, yq; int64_t k_padded;      // yq.q null: no codes wanted
  uint8_t* scratch;                        // this thread's own, at least moe_scratch(experts) bytes
};

// y[r] = sum over ranks ascending, from 0 and by fma, of weights[r][rank] * x[place[r][rank]]; then residual[r] + that if there is one.
// y may be the same memory as residual.
struct CombineArgs { RowsArgs r; int64_t top_k; const float* weights; const int32_t* place; const float* residual; int64_t ldr; };

enum class KvType : int32_t { f32 = 0, bf16 = 1 };

// One layer's paged KV cache. block_size is a multiple of 16. Within a block, 16-token tiles:
// K is stored transposed, [block][kv_head][tile][head_dim][16]; V is [block][kv_head][tile][16][head_dim].
// slot = block_id * block_size + offset; slot -1: do not write.
struct KvLayer { uint8_t* k; uint8_t* v; KvType type; int64_t num_blocks, block_size, num_kv_heads, head_dim; };

struct KvWriteArgs { int64_t rows; const float* k; int64_t ldk; const float* v; int64_t ldv; const int32_t* slots; KvLayer kv; };

// Causal attention over the paged cache, prefill, chunked prefill and decode in one. The K and V of the batch's own tokens
// have been written before. Sequence s owns query rows query_start[s]..query_start[s+1]; its last row sits at position
// seq_lens[s]-1. window > 0: only the last `window` positions; soft_cap > 0: cap * tanh(score / cap). Invisible positions
// are never read as values: whatever lies in such slots, NaN included, has no effect.
// Order, for each query row and head: the context is cut into chunks of kAttentionChunk absolute positions. In a chunk: scores
// (sum over d ascending of (q * scale) * k by fma), their maximum m, weights exp(score - m), their sum l (lane-wise partial
// sums, folded), and o = sum of weight * value, tokens ascending by fma. Chunks with a visible position are merged in ascending
// order, from M = -inf, L = 0, O = 0: M' = max(M, m), L' = L * exp(M - M') + l * exp(m - M'), O likewise; the result is O * (1 / L).
// As chunks are computed apart, threads may share one sequence: through `shared`, where partial results wait for their turn.
constexpr int64_t kAttentionChunk = 128;
struct AttentionArgs {
  int64_t num_seqs, rows, num_heads;
  const float* q; int64_t ldq; float* y; int64_t ldy;
  const int32_t* query_start; const int32_t* seq_lens; const int32_t* block_table; int64_t ld_block_table;
  float scale, soft_cap; int64_t window;
  KvLayer kv;
  uint8_t* scratch; size_t scratch_bytes;   // this thread's own, at least attention_scratch(head_dim) bytes
  // All threads' own together, 64-byte aligned, zeroed once when it is made (each call leaves the counters zero), 2 MiB a thread
  // are plenty. Null, or too small for a long context: a sequence's kv head is then not shared by threads; no bit changes.
  uint8_t* shared = nullptr; size_t shared_bytes = 0;
};

// Sampling of one row, whole; sample.cpp states the steps and their order (vLLM's). All arrays are the row's own.
struct SampleRow {
  float* logits;                       // [vocab], changed in place
  float temperature;                   // 0: greedy, ties to the lowest id
  int32_t top_k; float top_p, min_p;   // off: 0, 1, 0
  float presence, frequency, repetition;
  uint64_t seed; uint64_t position;    // position: index of the token being sampled in the whole sequence
  const int32_t* bias_ids; const float* bias; int32_t num_bias;
  const int32_t* banned_ids; int32_t num_banned;                 // logit -inf
  const int32_t* allowed_ids; int32_t num_allowed;               // num_allowed 0: all
  const int32_t* output_ids; const int32_t* output_counts; int32_t num_output;  // distinct ids and how often
  const int32_t* prompt_ids; int32_t num_prompt;                                // distinct ids
  int32_t num_logprobs;                // -1: none wanted; else the sampled one plus the best num_logprobs, raw (before all of the above)
};
struct SampleResult {
  int32_t token;       // -1: the row held a NaN or no finite logit: this request fails, alone
  float logprob; int32_t rank;         // of the sampled token; rank from 1
  int32_t* top_ids; float* top_logprobs;  // num_logprobs each, descending, ties by id; the caller's memory
};
struct SampleArgs { int64_t rows, vocab; const SampleRow* in; SampleResult* out; uint8_t* scratch; size_t scratch_bytes; };

// log-probabilities of given tokens (prompt_logprobs, echo): target[r] among logits[r]
struct LogprobArgs { int64_t rows, vocab; const float* logits; int64_t ld; const int32_t* target; int32_t num_top;
  float* logprob; int32_t* rank; int32_t* top_ids; float* top_logprobs; };

struct KernelTable {
  const char* name;   // "portable", "avx2", "avx512", "avx512vnni", "avx512bf16", "neon"; OCTAVO_ISA takes these
  int lanes;
  int (*score)();     // 0: this machine cannot run it; else the higher the better
  size_t (*packed_bytes)(const PackedW&);  // of its shape
  void (*pack)(const PackedW&, const PackSource&, int64_t first_row, int ith, int nth);  // fills rows [first_row, first_row + src.rows)
  void (*dequant_row)(const PackedW&, int64_t row, float* out);
  // columns: k indices, code i is of x[columns[i]]; or null
  void (*quantize_rows)(const float* x, int64_t ldx, int64_t rows, int64_t k, int64_t k_padded, const int32_t* columns, QuantRows, int ith, int nth);
  size_t (*linear_scratch)(WeightKind, int64_t k);
  void (*linear)(const LinearArgs&, int ith, int nth);
  void (*norm)(const NormArgs&, int ith, int nth);
  void (*rope)(const RopeArgs&, int ith, int nth);
  void (*act)(const ActArgs&, int ith, int nth);
  void (*unary)(const UnaryArgs&, int ith, int nth);
  void (*gate_rows)(const GateArgs&, int ith, int nth);
  void (*embed)(const EmbedArgs&, int ith, int nth);
  void (*add)(const AddArgs&, int ith, int nth);
  void (*gather)(const GatherArgs&, int ith, int nth);
  void (*route)(const RouteArgs&, int ith, int nth);
  void (*dispatch)(const DispatchArgs&, int ith, int nth);
  void (*combine)(const CombineArgs&, int ith, int nth);
  void (*kv_write)(const KvWriteArgs&, int ith, int nth);
  size_t (*attention_scratch)(int64_t head_dim);
  void (*attention)(const AttentionArgs&, int ith, int nth);
  size_t (*sample_scratch)(int64_t vocab);
  void (*sample)(const SampleArgs&, int ith, int nth);
  void (*logprobs)(const LogprobArgs&, int ith, int nth);
  // The machine's limits, for benchmarks: each thread by itself. Products as a kind's kernel makes them at best, without weights, scales or rows;
  // returns how many operations those were (a multiply-add is two).
  double (*peak_products)(WeightKind, int64_t repeats);
  void (*peak_read)(const float* data, size_t count, size_t ahead);  // reads all; ahead: bytes from which to prefetch, 0: hardware's own
};

// Each variant is one namespace (OCTAVO_NS) of the same sources; isa.cpp lists them.
const KernelTable* const* kernel_tables(int* count);
const KernelTable& best_kernels(const char* wanted);  // wanted null or "": by score; throws std::invalid_argument with the choices

}  // namespace octavo
