#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

namespace octavo {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSharedPerThread = size_t(2) << 20;  // for 32 Ki tokens of context, 4 rows and heads of 256; paid when touched

const char* op_name(const Instruction& in) {
  switch (in.op) {
    case Op::embed:
      return "embed";
    case Op::norm:
      return "norm";
    case Op::quantize:
      return "quantize";
    case Op::rope:
      return "rope";
    case Op::act:
      return "act";
    case Op::add:
      return "add";
    case Op::gather:
      return "gather";
    case Op::kv_write:
      return "kv_write";
    case Op::attention:
      return "attention";
    case Op::linear:
      return "linear";
    case Op::unary:
      return "unary";
    case Op::gate_rows:
      return "gate_rows";
    case Op::route:
      return "route";
    case Op::dispatch:
      return "dispatch";
    case Op::experts:
      return "experts";
    case Op::combine:
      return "combine";
  }
  return "?";
}

int64_t pad_k(int64_t k) { return (k + kGroup - 1) / kGroup * kGroup; }

}  // namespace

Arena::Arena(size_t bytes) : bytes_(std::max<size_t>(bytes, 64)) {
  // 64 bytes more: vector loads at the end of the last row may read beyond it.
  void* memory = mmap(nullptr, bytes_ + 64, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (bytes_ >= kHugePage) madvise(memory, bytes_ + 64, MADV_HUGEPAGE);
#endif
  data_ = static_cast<uint8_t*>(memory);
}

Arena::~Arena() { munmap(data_, bytes_ + 64); }

KvPool::KvPool(int64_t layers, int64_t blocks, int64_t size, int64_t kv_heads, int64_t dim, KvType kv_type)
    : num_layers(layers),
      num_blocks(blocks),
      block_size(size),
      num_kv_heads(kv_heads),
      head_dim(dim),
      type(kv_type),
      arena_(size_t(layers) * 2 * half_bytes()) {}

size_t KvPool::block_bytes() const { return size_t(num_kv_heads) * block_size * head_dim * (type == KvType::f32 ? 4 : 2); }
size_t KvPool::half_bytes() const { return size_t(num_blocks) * block_bytes(); }

KvLayer KvPool::layer(int64_t index) const {
  uint8_t* base = arena_.data() + size_t(index) * 2 * half_bytes();
  return {base, base + half_bytes(), type, num_blocks, block_size, num_kv_heads, head_dim};
}

void KvPool::copy_blocks(const int32_t* source, const int32_t* target, int64_t count) {
  const size_t bytes = block_bytes();
  for (int64_t l = 0; l < num_layers; ++l) {
    const KvLayer kv = layer(l);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(kv.k + target[i] * bytes, kv.k + source[i] * bytes, bytes);
      std::memcpy(kv.v + target[i] * bytes, kv.v + source[i] * bytes, bytes);
    }
  }
}

Program::Program(const KernelTable& kernels, size_t arena_bytes, const KvPool& kv) : kernels_(kernels), kv_(kv), arena_(arena_bytes) {}

Program::~Program() {
  for (Arena* scratch : scratch_) delete scratch;
  for (Arena* shared : shared_) delete shared;
}

void Program::finish() {
  scratch_bytes_ = kernels_.attention_scratch(kv_.head_dim);
  const auto need = [&](size_t bytes) { scratch_bytes_ = std::max(scratch_bytes_, bytes); };
  for (const Instruction& in : code_) {
    if (in.op == Op::linear) need(kernels_.linear_scratch(in.w->kind, in.w->k));
    if (in.op == Op::route || in.op == Op::dispatch) need(moe_scratch(in.heads));
    for (const Matrices& matrices : in.experts)
      for (const PackedW* w : matrices) need(kernels_.linear_scratch(w->kind, w->k));
  }
}

void Program::set_profiling(bool on) {
  profiling_ = on;
  seconds_.assign(on ? code_.size() : 0, 0.0);
}

std::vector<std::pair<std::string, double>> Program::take_profile() {
  std::vector<std::pair<std::string, double>> profile;
  for (size_t i = 0; i < seconds_.size(); ++i) {
    std::string name = op_name(code_[i]);
    if (code_[i].op == Op::linear) name += " " + std::to_string(code_[i].w->n) + "x" + std::to_string(code_[i].w->k);
    profile.emplace_back(name, seconds_[i]);
    seconds_[i] = 0;
  }
  return profile;
}

// Quantised rows from `row` on, of k_padded codes each.
QuantRows Program::quant(const QuantRef& ref, int64_t row, int64_t k_padded) const {
  if (ref.q < 0) return {nullptr, nullptr, nullptr};
  uint8_t* base = arena_.data();
  const int64_t group = row * (k_padded / kGroup);
  return {reinterpret_cast<int8_t*>(base + ref.q) + row * k_padded, reinterpret_cast<float*>(base + ref.scale) + group,
          reinterpret_cast<float*>(base + ref.sum) + group};
}

void Program::run(int stage, const StepInput& step, ThreadPool& pool) {
  // One scratch per thread, made on first use, so that the pool may have been replaced since.
  while (scratch_.size() < size_t(pool.size())) scratch_.push_back(new Arena(scratch_bytes_));
  const size_t shared = kSharedPerThread * size_t(pool.size());
  if (shared_.empty() || shared_.back()->bytes() < shared) shared_.push_back(new Arena(shared));
  Barrier barrier(pool.size());
  pool.run([&](int ith, int nth) {
    for (size_t i = 0; i < code_.size(); ++i) {
      const Instruction& in = code_[i];
      if (in.stage != stage) continue;
      if (profiling_ && ith == 0) {
        const auto start = std::chrono::steady_clock::now();
        execute(in, step, ith, nth);
        barrier.wait();
        seconds_[i] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        continue;
      }
      execute(in, step, ith, nth);
      barrier.wait();
    }
  });
}

void Program::linear(const Instruction& in, const RowsArgs& r, int ith, int nth) {
  LinearArgs a{};
  a.rows = r.rows;
  a.x = r.x, a.ldx = r.ldx, a.xq = quant(in.xq), a.w = in.w, a.bias = in.bias, a.y = r.y, a.ldy = r.ldy;
  a.residual = in.b.offset < 0 ? nullptr : floats(in.b), a.ldr = in.b.ld, a.epilogue = in.epilogue, a.scale = in.scale;
  a.scratch = scratch_[size_t(ith)]->data(), a.scratch_bytes = scratch_bytes_;
  kernels_.linear(a, ith, nth);
}

void Program::attention(const Instruction& in, const RowsArgs& r, const StepInput& step, int ith, int nth) {
  AttentionArgs a{};
  a.num_seqs = step.seqs, a.rows = r.rows, a.num_heads = in.heads;
  a.q = r.x, a.ldq = r.ldx, a.y = r.y, a.ldy = r.ldy;
  a.query_start = step.query_start, a.seq_lens = step.seq_lens;
  a.block_table = step.block_table + in.group * step.seqs * step.ld_block_table, a.ld_block_table = step.ld_block_table;
  a.scale = in.scale, a.soft_cap = in.soft_cap, a.window = in.window, a.kv = kv_.layer(in.layer);
  a.scratch = scratch_[size_t(ith)]->data(), a.scratch_bytes = scratch_bytes_;
  a.shared = shared_.back()->data(), a.shared_bytes = shared_.back()->bytes();
  kernels_.attention(a, ith, nth);
}

void Program::dispatch(const Instruction& in, const RowsArgs& r, int64_t rows, int ith, int nth) {
  DispatchArgs a{};
  a.rows = rows, a.experts = in.heads, a.top_k = in.top_k, a.width = in.width;
  a.chosen = ints(in.route.chosen), a.place = ints(in.route.place), a.offsets = ints(in.route.offsets);
  a.x = r.x, a.ldx = r.ldx, a.y = r.y, a.ldy = r.ldy, a.xq = quant(in.xq), a.yq = quant(in.yq), a.k_padded = pad_k(in.width);
  a.scratch = scratch_[size_t(ith)]->data();
  kernels_.dispatch(a, ith, nth);
}

// Experts follow each other without waiting: each thread multiplies its columns of one, then its columns of the next. The threads take
// turns at the shares, for where columns do not divide evenly the same one would always have most.
void Program::experts(const Instruction& in, const RowsArgs& r, int ith, int nth) {
  const int32_t* offsets = ints(in.route.offsets);
  LinearArgs a{};
  a.ldx = r.ldx, a.ldy = r.ldy, a.epilogue = in.epilogue;
  a.scratch = scratch_[size_t(ith)]->data(), a.scratch_bytes = scratch_bytes_;
  for (size_t e = 0, turn = 0; e < in.experts.size(); ++e) {
    const int64_t first = offsets[e];
    a.rows = offsets[e + 1] - first;
    if (a.rows == 0) continue;
    a.y = r.y + first * r.ldy;
    for (const PackedW* w : in.experts[e]) {
      a.w = w;
      a.x = r.x ? r.x + first * r.ldx : nullptr;
      a.xq = takes_codes(w->kind) ? quant(in.xq, first, w->k_padded) : QuantRows{};
      kernels_.linear(a, int((size_t(ith) + turn++) % size_t(nth)), nth);
      a.y += w->n;
    }
  }
}

void Program::execute(const Instruction& in, const StepInput& step, int ith, int nth) {
  const int64_t rows = in.stage == 0 ? step.tokens : step.rows;
  const RowsArgs r{rows * in.times, in.x.offset < 0 ? nullptr : floats(in.x), in.x.ld, in.y.offset < 0 ? nullptr : out(in.y), in.y.ld,
                   in.width};
  switch (in.op) {
    case Op::embed:
      return kernels_.embed({rows, in.by_position ? step.positions : step.input_ids, in.w, r.y, r.ldy, in.scale}, ith, nth);
    case Op::norm:
      return kernels_.norm({r, in.weight, in.bias, in.eps, in.layer_norm, quant(in.xq), pad_k(in.width), in.store, in.head_dim}, ith, nth);
    case Op::quantize:
      return kernels_.quantize_rows(r.x, r.ldx, r.rows, in.width, pad_k(in.width), in.columns, quant(in.xq), ith, nth);
    case Op::linear:
      return linear(in, r, ith, nth);
    case Op::rope:
      return kernels_.rope({r, step.positions, in.weight, in.heads, in.head_dim, in.rot, in.pairs}, ith, nth);
    case Op::act:
      return kernels_.act({r, in.kind}, ith, nth);
    case Op::unary:
      return kernels_.unary({r, Unary(in.kind), in.scale}, ith, nth);
    case Op::gate_rows:
      return kernels_.gate_rows({r, floats(in.b), in.b.ld}, ith, nth);
    case Op::add:
      return kernels_.add({r, floats(in.b), in.b.ld}, ith, nth);
    case Op::gather:
      return kernels_.gather({r, step.picked}, ith, nth);
    case Op::kv_write:
      return kernels_.kv_write({rows, r.x, r.ldx, floats(in.b), in.b.ld, step.slots + in.group * step.tokens, kv_.layer(in.layer)}, ith,
                               nth);
    case Op::attention:
      return attention(in, r, step, ith, nth);
    case Op::route:
      return kernels_.route({rows, r.x, r.ldx, in.heads, in.top_k, in.renormalise, ints(in.route.chosen),
                             reinterpret_cast<float*>(ints(in.route.weights)), scratch_[size_t(ith)]->data()},
                            ith, nth);
    case Op::dispatch:
      return dispatch(in, r, rows, ith, nth);
    case Op::experts:
      return experts(in, r, ith, nth);
    case Op::combine:
      return kernels_.combine({r, in.top_k, reinterpret_cast<const float*>(ints(in.route.weights)), ints(in.route.place),
                               in.b.offset < 0 ? nullptr : floats(in.b), in.b.ld},
                              ith, nth);
  }
}

}  // namespace octavo
