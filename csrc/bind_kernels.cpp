// Python bindings of every kernel but the linear layer's: octavo._native.sample and .logprobs for the engine, and the
// submodule .kernels with each kernel by itself, for tests and for the comparison with the reference.
//
// Every shape, stride and id is checked here, before native code touches memory; a violation raises ValueError. Arrays are never
// copied or converted: a wrong dtype raises TypeError. `isa` "" means the best variant, `threads` 0 the process's pool.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind.h"
#include "kernels.h"
#include "packed.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T, size_t N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::device::cpu>;
template <class T>
using Dense = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = Array<const float, 2>;
using MatrixOut = Array<float, 2>;

void require(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}

template <class A>
void require_rows(const A& a, const char* what) {
  require(a.shape(1) <= 1 || a.stride(1) == 1, what);
  require(a.shape(0) <= 1 || a.stride(0) >= int64_t(a.shape(1)), what);
}

RowsArgs rows_of(const Matrix& x, const MatrixOut& y, int64_t x_width, int64_t y_width) {
  require_rows(x, "x: rows must be dense and must not overlap");
  require_rows(y, "y: rows must be dense and must not overlap");
  require(int64_t(x.shape(1)) == x_width && int64_t(y.shape(1)) == y_width, "x or y has the wrong width");
  require(x.shape(0) == y.shape(0), "x and y must have the same number of rows");
  return {int64_t(x.shape(0)), x.data(), x.stride(0), y.data(), y.stride(0), y_width};
}

// Runs fn(ith, nth, scratch) on every thread, without the interpreter's lock; each thread gets its own 64-byte aligned scratch.
template <class Fn>
void run_threads(int threads, size_t scratch_bytes, Fn fn, bool poison = false) {
  nb::gil_scoped_release release;
  std::unique_ptr<ThreadPool> own = threads > 0 ? std::make_unique<ThreadPool>(threads) : nullptr;
  ThreadPool& pool = own ? *own : thread_pool();
  const size_t stride = (scratch_bytes + 127) / 64 * 64;
  const size_t total = stride * size_t(pool.size()) + 64;
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[total]);
  if (poison) std::fill_n(memory.get(), total, uint8_t(0xff));  // every float in it is a NaN
  uint8_t* base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
  pool.run([&](int ith, int nth) { fn(ith, nth, base + size_t(ith) * stride); });
}

template <class T, size_t N>
nb::ndarray<nb::numpy, T> owned(std::unique_ptr<T[]> data, const size_t (&shape)[N]) {
  T* raw = data.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(raw, N, shape, owner);
}

// ---- rows ----

using MaybeRow = std::optional<Dense<const float>>;

QuantRows quant_rows(const std::optional<Array<int8_t, 2>>& q, const std::optional<MatrixOut>& scale, const std::optional<MatrixOut>& sum,
                     int64_t rows, int64_t width) {
  if (!q) return {nullptr, nullptr, nullptr};
  require(scale && sum, "q, scale and sum go together");
  const int64_t k = int64_t(q->shape(1)), groups = k / kGroup;
  require(k % kGroup == 0 && k >= width, "q: its width must be a multiple of 32, at least that of x");
  require(int64_t(q->shape(0)) == rows && q->stride(1) == 1 && q->stride(0) == k, "q: must be dense with the rows of x");
  for (const MatrixOut* a : {&*scale, &*sum})
    require(int64_t(a->shape(0)) == rows && int64_t(a->shape(1)) == groups && a->stride(1) == 1 && a->stride(0) == groups,
            "scale and sum: must be dense [rows, width of q / 32]");
  return {q->data(), scale->data(), sum->data()};
}

void bind_norm(nb::module_& m) {
  m.def(
      "norm",
      [](Matrix x, MatrixOut y, Dense<const float> weight, float eps, MaybeRow bias, bool layer_norm, int64_t head_dim,
         std::optional<Array<int8_t, 2>> q, std::optional<MatrixOut> scale, std::optional<MatrixOut> sum, bool store,
         const std::string& isa, int threads) {
        const int64_t width = int64_t(x.shape(1)), over = head_dim > 0 ? head_dim : width;
        NormArgs a{};
        a.r = rows_of(x, y, width, width);
        require(head_dim >= 0 && (head_dim == 0 || width % head_dim == 0), "head_dim must divide the width");
        require(int64_t(weight.shape(0)) == over && (!bias || int64_t(bias->shape(0)) == over), "weight or bias has the wrong length");
        a.weight = weight.data();
        a.bias = bias ? bias->data() : nullptr;
        a.eps = eps;
        a.layer_norm = layer_norm;
        a.xq = quant_rows(q, scale, sum, a.r.rows, width);
        a.k_padded = q ? int64_t(q->shape(1)) : 0;
        a.store = store;
        a.head_dim = head_dim;
        const KernelTable& kernels = best_kernels(isa.c_str());
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.norm(a, ith, nth); });
      },
      "x"_a.noconvert(), "y"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "bias"_a.noconvert() = nb::none(), "layer_norm"_a = false,
      "head_dim"_a = 0, "q"_a.noconvert() = nb::none(), "scale"_a.noconvert() = nb::none(), "sum"_a.noconvert() = nb::none(),
      "store"_a = true, "isa"_a = "", "threads"_a = 0, "RMS norm or layer norm of the rows of x into y, or quantised into q, scale, sum.");
}

void bind_rows(nb::module_& m) {
  m.def(
      "rope",
      [](Matrix x, MatrixOut y, Dense<const int32_t> positions, Matrix cos_sin, int64_t head_dim, bool pairs, const std::string& isa,
         int threads) {
        const int64_t width = int64_t(x.shape(1)), rot = int64_t(cos_sin.shape(1));
        RopeArgs a{};
        a.r = rows_of(x, y, width, width);
        require(head_dim > 0 && width % head_dim == 0, "head_dim must divide the width");
        require(rot > 0 && rot % 2 == 0 && rot <= head_dim, "cos_sin: its width must be even and at most head_dim");
        require(cos_sin.stride(1) == 1 && cos_sin.stride(0) == rot, "cos_sin: must be dense");
        require(int64_t(positions.shape(0)) == a.r.rows, "positions: one for each row");
        for (int64_t i = 0; i < a.r.rows; ++i)
          require(positions(i) >= 0 && positions(i) < int64_t(cos_sin.shape(0)), "positions: outside of cos_sin");
        a.positions = positions.data();
        a.cos_sin = cos_sin.data();
        a.num_heads = width / head_dim;
        a.head_dim = head_dim;
        a.rot = rot;
        a.pairs = pairs;
        const KernelTable& kernels = best_kernels(isa.c_str());
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.rope(a, ith, nth); });
      },
      "x"_a.noconvert(), "y"_a.noconvert(), "positions"_a.noconvert(), "cos_sin"_a.noconvert(), "head_dim"_a, "pairs"_a = false,
      "isa"_a = "", "threads"_a = 0);
  m.def(
      "act",
      [](Matrix x, MatrixOut y, int kind, const std::string& isa, int threads) {
        require(kind == 0 || kind == 1, "kind: 0 (silu) or 1 (gelu tanh)");
        const ActArgs a{rows_of(x, y, int64_t(y.shape(1)) * 2, int64_t(y.shape(1))), kind};
        const KernelTable& kernels = best_kernels(isa.c_str());
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.act(a, ith, nth); });
      },
      "x"_a.noconvert(), "y"_a.noconvert(), "kind"_a = 0, "isa"_a = "", "threads"_a = 0);
  m.def(
      "unary",
      [](Matrix x, MatrixOut y, int kind, float factor, const std::string& isa, int threads) {
        require(kind >= int(Unary::gelu) && kind <= int(Unary::soft_cap), "kind: 0 (gelu tanh), 1 (scale) or 2 (soft cap)");
        const UnaryArgs a{rows_of(x, y, int64_t(x.shape(1)), int64_t(x.shape(1))), Unary(kind), factor};
        const KernelTable& kernels = best_kernels(isa.c_str());
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.unary(a, ith, nth); });
      },
      "x"_a.noconvert(), "y"_a.noconvert(), "kind"_a, "factor"_a = 1.0f, "isa"_a = "", "threads"_a = 0);
  m.def(
      "gate_rows",
      [](Matrix x, Matrix gate, MatrixOut y, const std::string& isa, int threads) {
        const int64_t width = int64_t(x.shape(1));
        require(gate.shape(0) == x.shape(0) && gate.shape(1) == 1, "gate: [rows, 1]");
        require(gate.shape(0) <= 1 || gate.stride(0) > 0, "gate: rows must not overlap");
        const GateArgs a{rows_of(x, y, width, width), gate.data(), gate.stride(0)};
        const KernelTable& kernels = best_kernels(isa.c_str());
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.gate_rows(a, ith, nth); });
      },
      "x"_a.noconvert(), "gate"_a.noconvert(), "y"_a.noconvert(), "isa"_a = "", "threads"_a = 0);
  m.def(
      "add",
      [](Matrix x, Matrix b, MatrixOut y, const std::string& isa, int threads) {
        const int64_t width = int64_t(x.shape(1));
        require(b.shape(0) == x.shape(0) && int64_t(b.shape(1)) == width, "x and b must have the same shape");
        require_rows(b, "b: rows must be dense and must not overlap");
        const AddArgs a{rows_of(x, y, width, width), b.data(), b.stride(0)};
        const KernelTable& kernels = best_kernels(isa.c_str());
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.add(a, ith, nth); });
      },
      "x"_a.noconvert(), "b"_a.noconvert(), "y"_a.noconvert(), "isa"_a = "", "threads"_a = 0);
  m.def(
      "gather",
      [](Matrix x, MatrixOut y, Dense<const int32_t> index, const std::string& isa, int threads) {
        require_rows(x, "x: rows must be dense and must not overlap");
        require_rows(y, "y: rows must be dense and must not overlap");
        require(x.shape(1) == y.shape(1) && index.shape(0) == y.shape(0), "y: one row for each index, as wide as x");
        for (size_t i = 0; i < index.shape(0); ++i) require(index(i) < int64_t(x.shape(0)), "index: beyond the rows of x");
        GatherArgs a{{int64_t(y.shape(0)), x.data(), x.stride(0), y.data(), y.stride(0), int64_t(x.shape(1))}, index.data()};
        const KernelTable& kernels = best_kernels(isa.c_str());
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.gather(a, ith, nth); });
      },
      "x"_a.noconvert(), "y"_a.noconvert(), "index"_a.noconvert(), "isa"_a = "", "threads"_a = 0);
}

// ---- mixtures of experts ----

using IdsOut = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowOut = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DenseOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void bind_experts(nb::module_& m) {
  m.def(
      "route",
      [](Matrix logits, IdsOut chosen, DenseOut weights, bool renormalise, const std::string& isa, int threads) {
        require_rows(logits, "logits: rows must be dense and must not overlap");
        const int64_t rows = int64_t(logits.shape(0)), experts = int64_t(logits.shape(1)), top_k = int64_t(chosen.shape(1));
        require(top_k > 0 && top_k <= experts, "chosen: from one to all experts of a row");
        require(int64_t(chosen.shape(0)) == rows && int64_t(weights.shape(0)) == rows && int64_t(weights.shape(1)) == top_k,
                "chosen, weights: [rows, top_k]");
        const RouteArgs a{rows, logits.data(), logits.stride(0), experts, top_k, renormalise, chosen.data(), weights.data(), nullptr};
        const KernelTable& kernels = best_kernels(isa.c_str());
        const auto run = [&](int ith, int nth, uint8_t* scratch) {
          RouteArgs mine = a;
          mine.scratch = scratch;
          kernels.route(mine, ith, nth);
        };
        run_threads(threads, moe_scratch(experts), run, true);
      },
      "logits"_a.noconvert(), "chosen"_a.noconvert(), "weights"_a.noconvert(), "renormalise"_a, "isa"_a = "", "threads"_a = 0);
  m.def(
      "dispatch",
      [](Matrix x, Array<const int32_t, 2> chosen, IdsOut place, RowOut offsets, MatrixOut y, const std::string& isa, int threads) {
        require_rows(x, "x: rows must be dense and must not overlap");
        require_rows(y, "y: rows must be dense and must not overlap");
        DispatchArgs a{};
        a.rows = int64_t(chosen.shape(0)), a.top_k = int64_t(chosen.shape(1)), a.experts = int64_t(offsets.shape(0)) - 1;
        a.width = int64_t(x.shape(1));
        require(a.experts > 0, "offsets: one more than there are experts");
        require(chosen.stride(1) == 1 && chosen.stride(0) == a.top_k, "chosen: must be dense");
        require(place.shape(0) == chosen.shape(0) && place.shape(1) == chosen.shape(1), "place: like chosen");
        require(x.shape(0) == chosen.shape(0) && y.shape(0) == x.shape(0) * chosen.shape(1) && y.shape(1) == x.shape(1),
                "y: a row for each pair");
        for (int64_t i = 0; i < a.rows * a.top_k; ++i)
          require(chosen.data()[i] >= 0 && chosen.data()[i] < a.experts, "chosen: no such expert");
        a.chosen = chosen.data(), a.place = place.data(), a.offsets = offsets.data();
        a.x = x.data(), a.ldx = x.stride(0), a.y = y.data(), a.ldy = y.stride(0);
        const KernelTable& kernels = best_kernels(isa.c_str());
        const auto run = [&](int ith, int nth, uint8_t* scratch) {
          DispatchArgs mine = a;
          mine.scratch = scratch;
          kernels.dispatch(mine, ith, nth);
        };
        run_threads(threads, moe_scratch(a.experts), run, true);
      },
      "x"_a.noconvert(), "chosen"_a.noconvert(), "place"_a.noconvert(), "offsets"_a.noconvert(), "y"_a.noconvert(), "isa"_a = "",
      "threads"_a = 0);
  m.def(
      "combine",
      [](Matrix x, Array<const float, 2> weights, Array<const int32_t, 2> place, MatrixOut y, std::optional<Matrix> residual,
         const std::string& isa, int threads) {
        require_rows(x, "x: rows must be dense and must not overlap");
        require_rows(y, "y: rows must be dense and must not overlap");
        const int64_t rows = int64_t(y.shape(0)), top_k = int64_t(place.shape(1));
        require(y.shape(1) == x.shape(1) && place.shape(0) == y.shape(0), "y: a row for each row of place, as wide as x");
        require(weights.shape(0) == place.shape(0) && weights.shape(1) == place.shape(1), "weights: like place");
        require(weights.stride(1) == 1 && weights.stride(0) == top_k && place.stride(1) == 1 && place.stride(0) == top_k,
                "weights, place: must be dense");
        for (int64_t i = 0; i < rows * top_k; ++i)
          require(place.data()[i] >= 0 && place.data()[i] < int64_t(x.shape(0)), "place: beyond the rows of x");
        if (residual) {
          require_rows(*residual, "residual: rows must be dense and must not overlap");
          require(residual->shape(0) == y.shape(0) && residual->shape(1) == y.shape(1), "residual: like y");
        }
        const RowsArgs r{rows, x.data(), x.stride(0), y.data(), y.stride(0), int64_t(y.shape(1))};
        const CombineArgs a{
            r, top_k, weights.data(), place.data(), residual ? residual->data() : nullptr, residual ? residual->stride(0) : 0};
        const KernelTable& kernels = best_kernels(isa.c_str());
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.combine(a, ith, nth); });
      },
      "x"_a.noconvert(), "weights"_a.noconvert(), "place"_a.noconvert(), "y"_a.noconvert(), "residual"_a.noconvert() = nb::none(),
      "isa"_a = "", "threads"_a = 0);
}

// ---- attention ----

// k [num_blocks, kv_heads, block_size / 16, head_dim, 16], v [num_blocks, kv_heads, block_size / 16, 16, head_dim]; fp32, or
// bf16 as uint16.
using Cache = nb::ndarray<nb::ndim<5>, nb::c_contig, nb::device::cpu>;

KvLayer kv_layer(const Cache& k, const Cache& v) {
  KvLayer kv{};
  require(k.dtype() == v.dtype() && (k.dtype() == nb::dtype<float>() || k.dtype() == nb::dtype<uint16_t>()),
          "k_cache, v_cache: float32, or bfloat16 as uint16");
  kv.type = k.dtype() == nb::dtype<float>() ? KvType::f32 : KvType::bf16;
  for (int i = 0; i < 3; ++i) require(k.shape(size_t(i)) == v.shape(size_t(i)), "k_cache and v_cache do not match");
  require(k.shape(4) == 16 && v.shape(3) == 16 && k.shape(3) == v.shape(4), "k_cache: [.., head_dim, 16]; v_cache: [.., 16, head_dim]");
  kv.k = static_cast<uint8_t*>(k.data());
  kv.v = static_cast<uint8_t*>(v.data());
  kv.num_blocks = int64_t(k.shape(0));
  kv.num_kv_heads = int64_t(k.shape(1));
  kv.block_size = int64_t(k.shape(2)) * 16;
  kv.head_dim = int64_t(k.shape(3));
  require(kv.head_dim % 8 == 0 && kv.head_dim >= 8 && kv.head_dim <= 256, "head_dim: a multiple of 8, at most 256");
  return kv;
}

void check_sequences(const AttentionArgs& a, int64_t blocks_per_row) {
  require(a.query_start[0] == 0 && a.query_start[a.num_seqs] == a.rows, "query_start: must run from 0 to the number of rows");
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t rows = int64_t(a.query_start[s + 1]) - a.query_start[s];
    require(rows >= 0 && a.seq_lens[s] >= rows, "query_start must ascend, and a sequence be at least as long as its rows");
    const int64_t blocks = (a.seq_lens[s] + a.kv.block_size - 1) / a.kv.block_size;
    require(blocks <= blocks_per_row, "block_table: too short for a sequence");
    for (int64_t b = 0; rows > 0 && b < blocks; ++b) {
      const int32_t id = a.block_table[s * a.ld_block_table + b];
      require(id >= 0 && id < a.kv.num_blocks, "block_table: an id outside the pool");
    }
  }
}

// Runs `repeat` times on poisoned scratch, and checks that the counters in the shared memory are left as they were found.
void run_attention(const KernelTable& kernels, AttentionArgs a, int threads, bool share, int repeat) {
  const int nth = threads > 0 ? threads : thread_pool().size();
  const size_t slot_bytes = 256 << 10, scratch_bytes = kernels.attention_scratch(a.kv.head_dim);
  const std::unique_ptr<uint8_t[]> memory(share ? new uint8_t[slot_bytes * size_t(nth) + 64]() : nullptr);
  if (share) {
    a.shared = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
    a.shared_bytes = slot_bytes * size_t(nth);
  }
  Barrier barrier(nth);
  const auto run = [&](int ith, int n, uint8_t* scratch) {
    AttentionArgs mine = a;
    mine.scratch = scratch;
    mine.scratch_bytes = scratch_bytes;
    for (int i = 0; i < repeat; ++i) {
      kernels.attention(mine, ith, n);
      barrier.wait();
    }
  };
  run_threads(threads, scratch_bytes, run, true);
  for (int i = 0; share && i < nth; ++i) {
    int32_t counter;
    std::memcpy(&counter, a.shared + size_t(i) * slot_bytes, 4);
    if (counter != 0) throw std::runtime_error("attention left a counter of its shared memory behind");
  }
}

void bind_attention(nb::module_& m) {
  m.def(
      "kv_write",
      [](Matrix k, Matrix v, Dense<const int32_t> slots, Cache k_cache, Cache v_cache, const std::string& isa, int threads) {
        const KvLayer kv = kv_layer(k_cache, v_cache);
        const int64_t width = kv.num_kv_heads * kv.head_dim;
        require_rows(k, "k: rows must be dense and must not overlap");
        require_rows(v, "v: rows must be dense and must not overlap");
        require(int64_t(k.shape(1)) == width && int64_t(v.shape(1)) == width, "k, v: [rows, kv_heads * head_dim]");
        require(k.shape(0) == slots.shape(0) && v.shape(0) == slots.shape(0), "slots: one for each row of k and v");
        const KvWriteArgs a{int64_t(k.shape(0)), k.data(), k.stride(0), v.data(), v.stride(0), slots.data(), kv};
        const KernelTable& kernels = best_kernels(isa.c_str());
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.kv_write(a, ith, nth); });
      },
      "k"_a.noconvert(), "v"_a.noconvert(), "slots"_a.noconvert(), "k_cache"_a.noconvert(), "v_cache"_a.noconvert(), "isa"_a = "",
      "threads"_a = 0);
  m.def(
      "attention",
      [](Matrix q, MatrixOut y, Dense<const int32_t> query_start, Dense<const int32_t> seq_lens, Array<const int32_t, 2> block_table,
         Cache k_cache, Cache v_cache, float scale, float soft_cap, int64_t window, const std::string& isa, int threads, bool share,
         int repeat) {
        AttentionArgs a{};
        a.kv = kv_layer(k_cache, v_cache);
        const int64_t width = int64_t(q.shape(1));
        const RowsArgs r = rows_of(q, y, width, width);
        require(width % a.kv.head_dim == 0 && width / a.kv.head_dim % a.kv.num_kv_heads == 0,
                "q: heads must be a multiple of the kv heads");
        require(query_start.shape(0) == seq_lens.shape(0) + 1, "query_start: one more entry than seq_lens");
        require(block_table.shape(0) == seq_lens.shape(0), "block_table: one row for each sequence");
        require_rows(block_table, "block_table: rows must be dense");
        a.num_seqs = int64_t(seq_lens.shape(0));
        a.rows = r.rows;
        a.num_heads = width / a.kv.head_dim;
        a.q = r.x, a.ldq = r.ldx, a.y = r.y, a.ldy = r.ldy;
        a.query_start = query_start.data(), a.seq_lens = seq_lens.data();
        a.block_table = block_table.data(), a.ld_block_table = block_table.stride(0);
        a.scale = scale, a.soft_cap = soft_cap, a.window = window;
        check_sequences(a, int64_t(block_table.shape(1)));
        run_attention(best_kernels(isa.c_str()), a, threads, share, repeat);
      },
      "q"_a.noconvert(), "y"_a.noconvert(), "query_start"_a.noconvert(), "seq_lens"_a.noconvert(), "block_table"_a.noconvert(),
      "k_cache"_a.noconvert(), "v_cache"_a.noconvert(), "scale"_a, "soft_cap"_a = 0.0f, "window"_a = 0, "isa"_a = "", "threads"_a = 0,
      "share"_a = true, "repeat"_a = 1,
      "Paged attention of the rows of q into y; `repeat` times, for benchmarks, `share`: see AttentionArgs.");
}

// ---- sampling ----

using Ids = Dense<const int32_t>;
using Ragged = std::optional<std::tuple<Ids, Ids>>;  // (offsets [rows + 1], ids)

struct Slice {
  const int32_t* ids = nullptr;
  int64_t begin = 0;
  int32_t count = 0;
};

void check_offsets(const Ids& offsets, int64_t rows, size_t size) {
  require(int64_t(offsets.shape(0)) == rows + 1 && offsets(0) >= 0, "offsets: one more than there are rows, from 0");
  for (int64_t r = 0; r < rows; ++r) require(offsets(r + 1) >= offsets(r), "offsets: must ascend");
  require(size_t(offsets(rows)) <= size, "offsets: beyond the end of the values");
}

Slice slice(const Ragged& ragged, int64_t row) {
  if (!ragged) return {};
  const auto& [offsets, ids] = *ragged;
  return {ids.data() + offsets(row), offsets(row), offsets(row + 1) - offsets(row)};
}

struct LogprobArrays {
  size_t rows, k;
  std::unique_ptr<float[]> logprob, top_logprobs;
  std::unique_ptr<int32_t[]> rank, top_ids;
  LogprobArrays(size_t rows, size_t k)
      : rows(rows),
        k(k),
        logprob(new float[rows]),
        top_logprobs(new float[rows * k]),
        rank(new int32_t[rows]),
        top_ids(new int32_t[rows * k]) {
    std::fill_n(top_ids.get(), rows * k, -1);
    std::fill_n(top_logprobs.get(), rows * k, -9999.0f);
  }
  nb::tuple release() {
    return nb::make_tuple(owned(std::move(logprob), {rows}), owned(std::move(rank), {rows}), owned(std::move(top_ids), {rows, k}),
                          owned(std::move(top_logprobs), {rows, k}));
  }
};

template <class T>
T at(const Dense<const T>& values, int64_t row) {
  return values.data()[row];
}

nb::tuple sample_rows(MatrixOut logits, Dense<const float> temperature, Dense<const int32_t> top_k, Dense<const float> top_p,
                      Dense<const float> min_p, Dense<const float> presence, Dense<const float> frequency, Dense<const float> repetition,
                      Dense<const uint64_t> seed, Dense<const uint64_t> position, Dense<const int32_t> num_logprobs,
                      std::optional<std::tuple<Ids, Ids, Dense<const float>>> bias, Ragged banned, Ragged allowed,
                      std::optional<std::tuple<Ids, Ids, Ids>> outputs, Ragged prompts, const std::string& isa, int threads) {
  require_rows(logits, "logits: rows must be dense and must not overlap");
  const int64_t rows = int64_t(logits.shape(0)), vocab = int64_t(logits.shape(1));
  require(vocab > 0, "logits: the vocabulary is empty");
  for (size_t n : {temperature.shape(0), top_k.shape(0), top_p.shape(0), min_p.shape(0), presence.shape(0), frequency.shape(0),
                   repetition.shape(0), seed.shape(0), position.shape(0), num_logprobs.shape(0)})
    require(int64_t(n) == rows, "parameters: one value for each row of logits");
  Ragged bias_ids, output_ids;
  if (bias) {
    bias_ids = std::make_tuple(std::get<0>(*bias), std::get<1>(*bias));
    require(std::get<2>(*bias).shape(0) == std::get<1>(*bias).shape(0), "bias: one value for each id");
  }
  if (outputs) {
    output_ids = std::make_tuple(std::get<0>(*outputs), std::get<1>(*outputs));
    require(std::get<2>(*outputs).shape(0) == std::get<1>(*outputs).shape(0), "outputs: one count for each id");
  }
  for (const Ragged* ragged : {&bias_ids, &banned, &allowed, &output_ids, &prompts})
    if (*ragged) check_offsets(std::get<0>(**ragged), rows, std::get<1>(**ragged).shape(0));

  int32_t most = -1;
  for (int64_t r = 0; r < rows; ++r) {
    require(at(num_logprobs, r) <= vocab, "num_logprobs: more than the vocabulary");
    most = std::max(most, at(num_logprobs, r));
  }
  const size_t k = size_t(std::max(most, 0));
  LogprobArrays found{size_t(rows), k};
  std::vector<SampleRow> in(size_t(rows), SampleRow{});
  std::vector<SampleResult> out(size_t(rows), SampleResult{});
  for (int64_t r = 0; r < rows; ++r) {
    SampleRow& s = in[size_t(r)];
    s.logits = logits.data() + r * logits.stride(0);
    s.temperature = at(temperature, r), s.top_k = at(top_k, r), s.top_p = at(top_p, r), s.min_p = at(min_p, r);
    s.presence = at(presence, r), s.frequency = at(frequency, r), s.repetition = at(repetition, r);
    s.seed = at(seed, r), s.position = at(position, r), s.num_logprobs = at(num_logprobs, r);
    const Slice b = slice(bias_ids, r), n = slice(banned, r), a = slice(allowed, r), o = slice(output_ids, r), p = slice(prompts, r);
    s.bias_ids = b.ids, s.num_bias = b.count, s.bias = bias ? std::get<2>(*bias).data() + b.begin : nullptr;
    s.banned_ids = n.ids, s.num_banned = n.count;
    s.allowed_ids = a.ids, s.num_allowed = a.count;
    s.output_ids = o.ids, s.num_output = o.count, s.output_counts = outputs ? std::get<2>(*outputs).data() + o.begin : nullptr;
    s.prompt_ids = p.ids, s.num_prompt = p.count;
    out[size_t(r)].top_ids = found.top_ids.get() + size_t(r) * k;
    out[size_t(r)].top_logprobs = found.top_logprobs.get() + size_t(r) * k;
  }

  const KernelTable& kernels = best_kernels(isa.c_str());
  const size_t scratch_bytes = kernels.sample_scratch(vocab);
  run_threads(threads, scratch_bytes, [&](int ith, int nth, uint8_t* scratch) {
    kernels.sample({rows, vocab, in.data(), out.data(), scratch, scratch_bytes}, ith, nth);
  });

  std::unique_ptr<int32_t[]> tokens(new int32_t[size_t(rows)]);
  for (size_t r = 0; r < size_t(rows); ++r) {
    tokens[r] = out[r].token;
    found.logprob[r] = out[r].logprob;
    found.rank[r] = out[r].rank;
  }
  nb::object logprobs = most >= 0 ? nb::object(found.release()) : nb::none();
  return nb::make_tuple(owned(std::move(tokens), {size_t(rows)}), logprobs);
}

nb::tuple row_logprobs(Matrix logits, Ids targets, int32_t num_top, const std::string& isa, int threads) {
  require_rows(logits, "logits: rows must be dense and must not overlap");
  const int64_t rows = int64_t(logits.shape(0)), vocab = int64_t(logits.shape(1));
  require(vocab > 0, "logits: the vocabulary is empty");
  require(int64_t(targets.shape(0)) == rows, "targets: one for each row of logits");
  require(num_top >= 0 && num_top <= vocab, "num_top: from 0 to the vocabulary");
  LogprobArrays found{size_t(rows), size_t(num_top)};
  const LogprobArgs a{rows,
                      vocab,
                      logits.data(),
                      logits.stride(0),
                      targets.data(),
                      num_top,
                      found.logprob.get(),
                      found.rank.get(),
                      found.top_ids.get(),
                      found.top_logprobs.get()};
  const KernelTable& kernels = best_kernels(isa.c_str());
  run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { kernels.logprobs(a, ith, nth); });
  return found.release();
}

void bind_sampling(nb::module_& m) {
  m.def("sample", &sample_rows, "logits"_a.noconvert(), "temperature"_a.noconvert(), "top_k"_a.noconvert(), "top_p"_a.noconvert(),
        "min_p"_a.noconvert(), "presence"_a.noconvert(), "frequency"_a.noconvert(), "repetition"_a.noconvert(), "seed"_a.noconvert(),
        "position"_a.noconvert(), "num_logprobs"_a.noconvert(), "bias"_a.noconvert() = nb::none(), "banned"_a.noconvert() = nb::none(),
        "allowed"_a.noconvert() = nb::none(), "outputs"_a.noconvert() = nb::none(), "prompts"_a.noconvert() = nb::none(), "isa"_a = "",
        "threads"_a = 0,
        "Samples one token for each row of logits [rows, vocab] float32, which are changed in place.\n\n"
        "The parameters are arrays [rows]: float32, top_k and num_logprobs int32 (-1: none), seed and position uint64. Lists are ragged:\n"
        "offsets int32 [rows + 1] into flat arrays: bias (offsets, ids, values float32), banned, allowed and prompts (offsets, ids),\n"
        "outputs (offsets, ids, counts); ids int32, distinct within a row. Returns (token ids int32 [rows], None), or, if any row wants\n"
        "log-probabilities, (token ids, (logprob [rows], rank [rows], top ids [rows, k], top logprobs [rows, k])) with k the largest\n"
        "num_logprobs; entries that a row did not ask for are -1 and -9999. Token -1: the row held a NaN or no finite logit.");
  m.def("logprobs", &row_logprobs, "logits"_a.noconvert(), "targets"_a.noconvert(), "num_top"_a, "isa"_a = "", "threads"_a = 0,
        "Log-probability and rank of targets int32 [rows] among logits float32 [rows, vocab], and the num_top best of each row:\n"
        "(logprob [rows], rank [rows], top ids [rows, num_top], top logprobs [rows, num_top]). A row with a NaN has rank 0.");
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::module_ kernels = m.def_submodule("kernels", "Each kernel by itself, on numpy arrays; results go into the arrays given.");
  bind_norm(kernels);
  bind_rows(kernels);
  bind_experts(kernels);
  bind_attention(kernels);
  kernels.def(
      "embed",
      [](Dense<const int32_t> ids, const PackedWeight& weight, MatrixOut y, float scale, const std::string& isa, int threads) {
        require_rows(y, "y: rows must be dense and must not overlap");
        const KernelTable& table = best_kernels(isa.c_str());
        const PackedW& w = weight.packed();
        require(w.lanes == table.lanes, "weight: packed for another number of lanes");
        require(y.shape(0) == ids.shape(0) && int64_t(y.shape(1)) == w.k, "y: one row for each id, as wide as the table");
        const EmbedArgs a{int64_t(ids.shape(0)), ids.data(), &w, y.data(), y.stride(0), scale};
        run_threads(threads, 0, [&](int ith, int nth, uint8_t*) { table.embed(a, ith, nth); });
      },
      "ids"_a.noconvert(), "weight"_a, "y"_a.noconvert(), "scale"_a = 1.0f, "isa"_a = "", "threads"_a = 0);
  bind_sampling(m);
}

}  // namespace octavo
