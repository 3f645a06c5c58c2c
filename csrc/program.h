// A model's forward pass as a flat list of instructions over one arena, replayed without returning to Python.
// Built once by ops/cpu/program.py from the traced model; knows no model and no instruction set.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace octavo {

// Zeroed, page-aligned memory, given by the system page by page as it is touched; huge pages where it has them.
class Arena {
 public:
  explicit Arena(size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* data_;
  size_t bytes_;
};

// The KV pool of all layers: for each layer K of all blocks, then V (see KvLayer for the order within a block).
class KvPool {
 public:
  KvPool(int64_t num_layers, int64_t num_blocks, int64_t block_size, int64_t num_kv_heads, int64_t head_dim, KvType type);
  KvLayer layer(int64_t index) const;
  void copy_blocks(const int32_t* source, const int32_t* target, int64_t count);
  int64_t num_layers, num_blocks, block_size, num_kv_heads, head_dim;
  KvType type;
  size_t bytes() const { return arena_.bytes(); }

 private:
  size_t half_bytes() const;  // K (or V) of one layer
  size_t block_bytes() const;
  Arena arena_;
};

enum class Op : int32_t {
  embed,
  norm,
  quantize,
  linear,
  rope,
  act,
  unary,
  gate_rows,
  add,
  gather,
  kv_write,
  attention,
  route,
  dispatch,
  experts,
  combine
};

// A matrix in the arena: byte offset and floats from row to row. offset -1: absent.
struct Ref {
  int64_t offset = -1;
  int64_t ld = 0;
};

// Quantised rows in the arena: byte offsets of codes, scales and sums.
struct QuantRef {
  int64_t q = -1, scale = 0, sum = 0;
};

// What a mixture's instructions tell each other (see kernels.h): byte offsets in the arena.
struct RouteRef {
  int64_t chosen = -1, weights = -1, place = -1, offsets = -1;
};

using Matrices = std::vector<const PackedW*>;  // of one product, side by side

struct Instruction {
  Op op = Op::embed;
  int stage = 0;      // 0: all tokens of the batch; 1: the head, on the picked rows
  int64_t times = 1;  // rows of x and y for each of them
  Ref x, y, b;        // b: second operand, residual, V, or gates
  QuantRef xq, yq;
  RouteRef route;
  int64_t top_k = 0;
  std::vector<Matrices> experts;
  const PackedW* w = nullptr;
  const float* weight = nullptr;  // norm weight, rope table
  const float* bias = nullptr;
  const int32_t* columns = nullptr;  // quantize: the order that a weight's inputs are stored in
  int64_t width = 0, heads = 0, head_dim = 0, rot = 0, layer = 0, group = 0, window = 0;
  float eps = 0, scale = 1, soft_cap = 0;
  int kind = 0;  // activation, or Unary
  bool layer_norm = false, store = true, pairs = false, by_position = false, renormalise = false;
  Epilogue epilogue = Epilogue::none;
};

// The integers of one step; see octavo/ops/batch.py. slots and block_table: those of group 0; group g's come g * tokens, or
// g * seqs * ld_block_table, later.
struct StepInput {
  int64_t tokens = 0, seqs = 0, ld_block_table = 0, rows = 0;
  const int32_t *input_ids = nullptr, *positions = nullptr, *slots = nullptr, *query_start = nullptr, *seq_lens = nullptr,
                *block_table = nullptr, *picked = nullptr;
};

class Program {
 public:
  Program(const KernelTable& kernels, size_t arena_bytes, const KvPool& kv);
  void append(const Instruction& instruction) { code_.push_back(instruction); }
  void finish();  // sizes the scratch
  // Runs all instructions of a stage on the pool. The caller has checked every index.
  void run(int stage, const StepInput& step, ThreadPool& pool);
  const KernelTable& kernels() const { return kernels_; }
  uint8_t* arena() const { return arena_.data(); }
  size_t arena_bytes() const { return arena_.bytes(); }
  size_t size() const { return code_.size(); }
  const KvPool& kv() const { return kv_; }
  // Seconds spent in each instruction by thread 0, its waiting included, since the last call; empty unless profiling.
  std::vector<std::pair<std::string, double>> take_profile();
  void set_profiling(bool on);

 private:
  void execute(const Instruction& in, const StepInput& step, int ith, int nth);
  void linear(const Instruction& in, const RowsArgs& r, int ith, int nth);
  void attention(const Instruction& in, const RowsArgs& r, const StepInput& step, int ith, int nth);
  void dispatch(const Instruction& in, const RowsArgs& r, int64_t rows, int ith, int nth);
  void experts(const Instruction& in, const RowsArgs& r, int ith, int nth);
  const float* floats(const Ref& ref) const { return reinterpret_cast<const float*>(arena_.data() + ref.offset); }
  float* out(const Ref& ref) const { return reinterpret_cast<float*>(arena_.data() + ref.offset); }
  int32_t* ints(int64_t offset) const { return reinterpret_cast<int32_t*>(arena_.data() + offset); }
  QuantRows quant(const QuantRef& ref, int64_t row = 0, int64_t k_padded = 0) const;

  const KernelTable& kernels_;
  const KvPool& kv_;
  Arena arena_;
  std::vector<Instruction> code_;
  size_t scratch_bytes_ = 0;
  std::vector<Arena*> scratch_;
  std::vector<Arena*> shared_;  // the last one is in use: attention's, for all threads together
  std::vector<double> seconds_;
  bool profiling_ = false;

 public:
  ~Program();
};

}  // namespace octavo
