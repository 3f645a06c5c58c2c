// Python's view of the program and the KV pool. Every size and index is checked here, before native code uses it.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "bind.h"
#include "packed.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints3 = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PyRef = std::pair<int64_t, int64_t>;                       // byte offset, floats per row; (-1, 0): absent
using PyQuant = std::tuple<int64_t, int64_t, int64_t>;           // byte offsets of codes, scales, sums; (-1, 0, 0): absent
using PyRoute = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // byte offsets of chosen, weights, place, offsets

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

Ref to_ref(const PyRef& r) { return {r.first, r.second}; }
Instruction make(Op op, int stage, Ref x = {}, Ref y = {}, Ref b = {}) {
  Instruction in;
  in.op = op, in.stage = stage, in.x = x, in.y = y, in.b = b;
  return in;
}
QuantRef to_quant(const PyQuant& q) { return {std::get<0>(q), std::get<1>(q), std::get<2>(q)}; }
RouteRef to_route(const PyRoute& r) { return {std::get<0>(r), std::get<1>(r), std::get<2>(r), std::get<3>(r)}; }

void require_range(const int32_t* values, int64_t count, int64_t low, int64_t high, const char* what) {
  for (int64_t i = 0; i < count; ++i) require(values[i] >= low && values[i] < high, what);
}

// A program and what it borrows: the pool, and the Python objects whose memory its instructions point into.
struct PyProgram {
  std::unique_ptr<Program> program;
  nb::object kv, keep;
  int64_t max_tokens, max_rows, vocab, groups, max_positions = INT32_MAX;
  PyRef logits;
  int64_t tokens = 0;  // of the last forward: rows that may be picked

  void append(Instruction in) { program->append(std::move(in)); }

  void require_layer(int64_t layer, int64_t group) const {
    require(layer >= 0 && layer < program->kv().num_layers, "no such layer in the KV pool");
    require(group >= 0 && group < groups, "no such group of layers");
  }

  // One sequence's rows of every group's block table.
  void check_blocks(const StepInput& step, int64_t sequence) const {
    const int64_t size = program->kv().block_size, blocks = (step.seq_lens[sequence] + size - 1) / size;
    require(blocks <= step.ld_block_table, "forward: a block table is too short");
    for (int64_t g = 0; g < groups; ++g)
      require_range(step.block_table + (g * step.seqs + sequence) * step.ld_block_table, blocks, 0, program->kv().num_blocks,
                    "forward: block id outside the KV pool");
  }

  void forward(Ints ids, Ints positions, Ints2 slots, Ints query_start, Ints seq_lens, Ints3 table) {
    StepInput step;
    step.tokens = int64_t(ids.shape(0)), step.seqs = int64_t(seq_lens.shape(0)), step.ld_block_table = int64_t(table.shape(2));
    const KvPool& kv_pool = program->kv();
    require(step.tokens > 0 && step.tokens <= max_tokens, "forward: number of tokens is 0 or above the budget");
    require(int64_t(positions.shape(0)) == step.tokens && int64_t(slots.shape(1)) == step.tokens,
            "forward: ids, positions and slots differ in length");
    require(int64_t(slots.shape(0)) == groups && int64_t(table.shape(0)) == groups,
            "forward: slots or block_table has another number of groups");
    require(int64_t(query_start.shape(0)) == step.seqs + 1 && int64_t(table.shape(1)) == step.seqs,
            "forward: query_start or block_table does not match seq_lens");
    step.input_ids = ids.data(), step.positions = positions.data(), step.slots = slots.data();
    step.query_start = query_start.data(), step.seq_lens = seq_lens.data(), step.block_table = table.data();
    require_range(step.input_ids, step.tokens, 0, vocab, "forward: token id outside the vocabulary");
    require_range(step.positions, step.tokens, 0, max_positions, "forward: position outside the context");
    require_range(step.slots, groups * step.tokens, -1, kv_pool.num_blocks * kv_pool.block_size, "forward: slot outside the KV pool");
    require(step.query_start[0] == 0 && step.query_start[step.seqs] == step.tokens, "forward: query_start does not cover the tokens");
    for (int64_t s = 0; s < step.seqs; ++s) {
      const int64_t rows = step.query_start[s + 1] - step.query_start[s];
      require(rows > 0 && step.seq_lens[s] >= rows, "forward: a sequence is shorter than its rows");
      check_blocks(step, s);
    }
    tokens = step.tokens;
    nb::gil_scoped_release release;
    program->run(0, step, thread_pool());
  }

  nb::ndarray<nb::numpy, float, nb::ndim<2>> head(nb::handle self, Ints picked) {
    StepInput step;
    step.tokens = tokens, step.rows = int64_t(picked.shape(0)), step.picked = picked.data();
    require(step.rows > 0 && step.rows <= max_rows, "logits: number of rows is 0 or above the limit");
    require_range(step.picked, step.rows, 0, tokens, "logits: row outside the last batch");
    {
      nb::gil_scoped_release release;
      program->run(1, step, thread_pool());
    }
    return view(self, logits, step.rows, vocab);
  }

  nb::ndarray<nb::numpy, float, nb::ndim<2>> view(nb::handle self, const PyRef& at, int64_t rows, int64_t width) {
    require(at.first >= 0 && at.first + rows * at.second * 4 <= int64_t(program->arena_bytes()), "view outside the arena");
    float* data = reinterpret_cast<float*>(program->arena() + at.first);
    return nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, {size_t(rows), size_t(width)}, self, {at.second, 1});
  }
};

}  // namespace

void bind_program(nb::module_& m) {
  nb::class_<KvPool>(m, "KvPool")
      .def(
          "__init__",
          [](KvPool* self, int64_t num_layers, int64_t num_blocks, int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
             const std::string& dtype) {
            require(num_layers > 0 && num_blocks > 0 && num_kv_heads > 0 && head_dim > 0, "KvPool: sizes must be positive");
            require(block_size > 0 && block_size % 16 == 0, "KvPool: block_size must be a multiple of 16");
            require(dtype == "float32" || dtype == "bfloat16", "KvPool: dtype must be float32 or bfloat16");
            new (self) KvPool(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype == "float32" ? KvType::f32 : KvType::bf16);
          },
          "num_layers"_a, "num_blocks"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a, "dtype"_a)
      .def_prop_ro("nbytes", &KvPool::bytes)
      .def("copy_blocks", [](KvPool& self, Ints source, Ints target) {
        require(source.shape(0) == target.shape(0), "copy_blocks: source and target differ in length");
        require_range(source.data(), int64_t(source.shape(0)), 0, self.num_blocks, "copy_blocks: block id outside the KV pool");
        require_range(target.data(), int64_t(target.shape(0)), 0, self.num_blocks, "copy_blocks: block id outside the KV pool");
        self.copy_blocks(source.data(), target.data(), int64_t(source.shape(0)));
      });

  nb::class_<PyProgram>(m, "Program")
      .def(
          "__init__",
          [](PyProgram* self, nb::object kv, int64_t arena_bytes, int64_t max_tokens, int64_t max_rows, int64_t vocab, int64_t groups,
             PyRef logits, nb::object keep, const std::string& isa) {
            require(arena_bytes > 0 && max_tokens > 0 && max_rows > 0 && vocab > 0 && groups > 0, "Program: sizes must be positive");
            const KernelTable& kernels = best_kernels(isa.c_str());
            new (self) PyProgram{std::make_unique<Program>(kernels, size_t(arena_bytes), nb::cast<const KvPool&>(kv)),
                                 kv,
                                 keep,
                                 max_tokens,
                                 max_rows,
                                 vocab,
                                 groups,
                                 INT32_MAX,
                                 logits,
                                 0};
          },
          "kv"_a, "arena_bytes"_a, "max_tokens"_a, "max_rows"_a, "vocab"_a, "groups"_a, "logits"_a, "keep"_a, "isa"_a = "")
      .def_prop_ro("isa", [](PyProgram& self) { return self.program->kernels().name; })
      .def_prop_ro("size", [](PyProgram& self) { return self.program->size(); })
      .def_prop_ro("nbytes", [](PyProgram& self) { return self.program->arena_bytes(); })
      .def("embed",
           [](PyProgram& self, const PackedWeight& w, PyRef y, float scale, bool by_position) {
             Instruction in = make(Op::embed, 0);
             in.w = &w.packed(), in.y = to_ref(y), in.scale = scale, in.by_position = by_position;
             if (by_position) self.max_positions = std::min(self.max_positions, w.packed().n);
             self.append(in);
           })
      .def("norm",
           [](PyProgram& self, int stage, PyRef x, PyRef y, Floats weight, Floats bias, int64_t width, float eps, bool layer_norm,
              PyQuant xq, bool store, int64_t head_dim) {
             require(int64_t(weight.shape(0)) == (head_dim ? head_dim : width), "norm: weight does not have the width");
             Instruction in = make(Op::norm, stage, to_ref(x), to_ref(y));
             in.xq = to_quant(xq), in.weight = weight.data(), in.bias = bias.shape(0) ? bias.data() : nullptr;
             in.width = width, in.eps = eps, in.layer_norm = layer_norm, in.store = store, in.head_dim = head_dim;
             self.append(in);
           })
      .def("quantize",
           [](PyProgram& self, int stage, PyRef x, int64_t width, PyQuant xq, int64_t times, Ints columns) {
             Instruction in = make(Op::quantize, stage, to_ref(x));
             in.width = width, in.xq = to_quant(xq), in.times = times;
             if (columns.shape(0)) {
               require(int64_t(columns.shape(0)) == width, "quantize: as many columns as the value is wide");
               require_range(columns.data(), width, 0, width, "quantize: a column outside the value");
               in.columns = columns.data();
             }
             self.append(in);
           })
      .def("linear",
           [](PyProgram& self, int stage, PyRef x, PyQuant xq, const PackedWeight& w, Floats bias, PyRef y, PyRef residual, int epilogue,
              float scale) {
             require(w.packed().lanes == self.program->kernels().lanes, "linear: weight was packed for another instruction set");
             require(bias.shape(0) == 0 || int64_t(bias.shape(0)) == w.packed().n, "linear: bias does not have n values");
             Instruction in = make(Op::linear, stage, to_ref(x), to_ref(y), to_ref(residual));
             in.xq = to_quant(xq), in.w = &w.packed(), in.bias = bias.shape(0) ? bias.data() : nullptr;
             in.epilogue = Epilogue(epilogue), in.scale = scale;
             self.append(in);
           })
      .def("rope",
           [](PyProgram& self, PyRef x, PyRef y, Floats2 table, int64_t heads, int64_t head_dim, bool pairs) {
             Instruction in = make(Op::rope, 0, to_ref(x), to_ref(y));
             in.weight = table.data(), in.rot = int64_t(table.shape(1)), in.heads = heads, in.head_dim = head_dim,
             in.width = heads * head_dim, in.pairs = pairs;
             require(in.rot > 0 && in.rot % 2 == 0 && in.rot <= head_dim, "rope: the table's width must be even and at most head_dim");
             self.max_positions = std::min<int64_t>(self.max_positions, int64_t(table.shape(0)));
             self.append(in);
           })
      .def("act",
           [](PyProgram& self, int stage, PyRef x, PyRef y, int64_t width, int kind, int64_t times) {
             Instruction in = make(Op::act, stage, to_ref(x), to_ref(y));
             in.width = width, in.kind = kind, in.times = times;
             self.append(in);
           })
      .def("unary",
           [](PyProgram& self, int stage, PyRef x, PyRef y, int64_t width, int kind, float factor) {
             require(kind >= int(Unary::gelu) && kind <= int(Unary::soft_cap), "unary: no such function");
             Instruction in = make(Op::unary, stage, to_ref(x), to_ref(y));
             in.width = width, in.kind = kind, in.scale = factor;
             self.append(in);
           })
      .def("gate_rows",
           [](PyProgram& self, int stage, PyRef x, PyRef gate, PyRef y, int64_t width) {
             Instruction in = make(Op::gate_rows, stage, to_ref(x), to_ref(y), to_ref(gate));
             in.width = width;
             self.append(in);
           })
      .def("add",
           [](PyProgram& self, int stage, PyRef x, PyRef b, PyRef y, int64_t width) {
             Instruction in = make(Op::add, stage, to_ref(x), to_ref(y), to_ref(b));
             in.width = width;
             self.append(in);
           })
      .def("gather",
           [](PyProgram& self, PyRef x, PyRef y, int64_t width) {
             Instruction in = make(Op::gather, 1, to_ref(x), to_ref(y));
             in.width = width;
             self.append(in);
           })
      .def("kv_write",
           [](PyProgram& self, PyRef k, PyRef v, int64_t layer, int64_t group) {
             self.require_layer(layer, group);
             Instruction in = make(Op::kv_write, 0, to_ref(k), Ref{}, to_ref(v));
             in.layer = layer, in.group = group;
             self.append(in);
           })
      .def("attention",
           [](PyProgram& self, PyRef q, PyRef y, int64_t heads, int64_t layer, int64_t group, float scale, float soft_cap, int64_t window) {
             self.require_layer(layer, group);
             Instruction in = make(Op::attention, 0, to_ref(q), to_ref(y));
             in.heads = heads, in.layer = layer, in.group = group, in.scale = scale, in.soft_cap = soft_cap, in.window = window;
             self.append(in);
           })
      .def("route",
           [](PyProgram& self, PyRef logits, int64_t experts, int64_t top_k, bool renormalise, PyRoute route) {
             require(top_k > 0 && top_k <= experts, "route: top_k must be between 1 and the number of experts");
             Instruction in = make(Op::route, 0, to_ref(logits));
             in.heads = experts, in.top_k = top_k, in.renormalise = renormalise, in.route = to_route(route);
             self.append(in);
           })
      .def("dispatch",
           [](PyProgram& self, PyRef x, PyQuant xq, PyRef y, PyQuant yq, int64_t width, int64_t experts, int64_t top_k, PyRoute route) {
             Instruction in = make(Op::dispatch, 0, to_ref(x), to_ref(y));
             in.xq = to_quant(xq), in.yq = to_quant(yq), in.width = width, in.heads = experts, in.top_k = top_k, in.route = to_route(route);
             self.append(in);
           })
      .def("experts",
           [](PyProgram& self, PyRef x, PyQuant xq, PyRef y, const std::vector<std::vector<const PackedWeight*>>& experts, int epilogue,
              int64_t top_k, PyRoute route) {
             Instruction in = make(Op::experts, 0, to_ref(x), to_ref(y));
             in.xq = to_quant(xq), in.epilogue = Epilogue(epilogue), in.times = top_k, in.route = to_route(route);
             require(in.epilogue != Epilogue::add, "experts: there is no residual");
             for (const auto& weights : experts) {
               Matrices matrices;
               for (const PackedWeight* w : weights) {
                 require(w->packed().lanes == self.program->kernels().lanes, "experts: weight was packed for another instruction set");
                 matrices.push_back(&w->packed());
               }
               in.experts.push_back(std::move(matrices));
             }
             self.append(std::move(in));
           })
      .def("combine",
           [](PyProgram& self, PyRef x, PyRef y, PyRef residual, int64_t width, int64_t top_k, PyRoute route) {
             Instruction in = make(Op::combine, 0, to_ref(x), to_ref(y), to_ref(residual));
             in.width = width, in.top_k = top_k, in.route = to_route(route);
             self.append(in);
           })
      .def("finish", [](PyProgram& self) { self.program->finish(); })
      .def("forward", &PyProgram::forward, "input_ids"_a, "positions"_a, "slots"_a, "query_start"_a, "seq_lens"_a, "block_table"_a,
           "Runs the model over one batch; int32 arrays as in octavo.ops.batch.Batch.")
      .def(
          "logits", [](nb::handle self, Ints picked) { return nb::cast<PyProgram&>(self).head(self, picked); }, "rows"_a,
          "float32 [R, V] of rows of the last batch: a view that the next call overwrites.")
      .def("view",
           [](nb::handle self, PyRef at, int64_t rows, int64_t width) { return nb::cast<PyProgram&>(self).view(self, at, rows, width); })
      .def("profile", [](PyProgram& self, bool on) { self.program->set_profiling(on); })
      .def("take_profile", [](PyProgram& self) { return self.program->take_profile(); });
}

}  // namespace octavo
