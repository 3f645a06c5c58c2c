#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

namespace octavo {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSharedPerThread = size_t(256) << 10;

const char* op_name(const Instruction& in) {
  switch (in.op) {
    case Op::embed: return "embed";
    case Op::norm: return "norm";
    case Op::quantize: return "quantize";
    case Op::rope: return "rope";
    case Op::act: return "act";
    case Op::add: return "add";
    case Op::gather: return "gather";
    case Op::kv_write: return "kv_write";
    case Op::attention: return "attention";
    case Op::linear: return "linear";
  }
  return "?";
}

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
    : num_layers(layers), num_blocks(blocks), block_size(size), num_kv_heads(kv_heads), head_dim(dim), type(kv_type),
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
  for (const Instruction& in : code_)
    if (in.op == Op::linear) scratch_bytes_ = std::max(scratch_bytes_, kernels_.linear_scratch(in.w->kind, in.w->k));
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

QuantRows Program::quant(const QuantRef& ref) const {
  if (ref.q < 0) return {nullptr, nullptr, nullptr};
  uint8_t* base = arena_.data();
  return {reinterpret_cast<int8_t*>(base + ref.q), reinterpret_cast<float*>(base + ref.scale), reinterpret_cast<float*>(base + ref.sum)};
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

void Program::execute(const Instruction& in, const StepInput& step, int ith, int nth) {
  const int64_t rows = in.stage == 0 ? step.tokens : step.rows;
  const RowsArgs r{rows, in.x.offset < 0 ? nullptr : floats(in.x), in.x.ld, in.y.offset < 0 ? nullptr : out(in.y), in.y.ld, in.width};
  uint8_t* scratch = scratch_[size_t(ith)]->data();
  switch (in.op) {
    case Op::embed:
      return kernels_.embed({rows, step.input_ids, in.w, r.y, r.ldy, in.scale}, ith, nth);
    case Op::norm: {
      const int64_t padded = (in.width + kGroup - 1) / kGroup * kGroup;
      return kernels_.norm({r, in.weight, in.bias, in.eps, in.layer_norm, quant(in.xq), padded, in.store, in.head_dim}, ith, nth);
    }
    case Op::quantize: {
      const int64_t padded = (in.width + kGroup - 1) / kGroup * kGroup;
      return kernels_.quantize_rows(r.x, r.ldx, rows, in.width, padded, in.columns, quant(in.xq), ith, nth);
    }
    case Op::linear: {
      LinearArgs a{};
      a.rows = rows;
      a.x = r.x, a.ldx = r.ldx, a.xq = quant(in.xq), a.w = in.w, a.bias = in.bias, a.y = r.y, a.ldy = r.ldy;
      a.residual = in.b.offset < 0 ? nullptr : floats(in.b), a.ldr = in.b.ld, a.epilogue = in.epilogue;
      a.scratch = scratch, a.scratch_bytes = scratch_bytes_;
      return kernels_.linear(a, ith, nth);
    }
    case Op::rope:
      return kernels_.rope({r, step.positions, in.weight, in.heads, in.head_dim, in.rot}, ith, nth);
    case Op::act:
      return kernels_.act({r, in.kind}, ith, nth);
    case Op::add:
      return kernels_.add({r, floats(in.b), in.b.ld}, ith, nth);
    case Op::gather: {
      RowsArgs picked = r;
      picked.rows = step.rows;
      return kernels_.gather({picked, step.picked}, ith, nth);
    }
    case Op::kv_write:
      return kernels_.kv_write({rows, r.x, r.ldx, floats(in.b), in.b.ld, step.slots, kv_.layer(in.layer)}, ith, nth);
    case Op::attention: {
      AttentionArgs a{};
      a.num_seqs = step.seqs, a.rows = rows, a.num_heads = in.heads;
      a.q = r.x, a.ldq = r.ldx, a.y = r.y, a.ldy = r.ldy;
      a.query_start = step.query_start, a.seq_lens = step.seq_lens;
      a.block_table = step.block_table, a.ld_block_table = step.ld_block_table;
      a.scale = in.scale, a.soft_cap = in.soft_cap, a.window = in.window, a.kv = kv_.layer(in.layer);
      a.scratch = scratch, a.scratch_bytes = scratch_bytes_;
      a.shared = shared_.back()->data(), a.shared_bytes = shared_.back()->bytes();
      return kernels_.attention(a, ith, nth);
    }
  }
}

}  // namespace octavo
