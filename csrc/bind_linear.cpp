// Python bindings of the linear layer: pack, PackedWeight, dequantize, quantize_rows and linear in octavo._native.
//
// Every shape and stride is checked here, before native code touches memory: a violation raises ValueError, a wrong dtype TypeError.
// Sources of weights are read through the buffer protocol, which carries strides in bytes and read-only views of mapped files;
// they are not copied. `isa` "" means the best variant, `threads` 0 the process's pool.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
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

constexpr int64_t kMaxSide = int64_t(1) << 40;  // far beyond any layer; products of sizes stay within 64 bits below it

void require(bool ok, const std::string& what) {
  if (!ok) throw nb::value_error(what.c_str());
}

// A numpy array by the buffer protocol: byte strides, any alignment, read-only or not.
class BufferView {
 public:
  BufferView(nb::handle object, const char* what) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
      PyErr_Clear();
      throw nb::type_error((std::string(what) + ": not an array").c_str());
    }
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  int ndim() const { return view_.ndim; }
  int64_t shape(int i) const { return view_.shape[i]; }
  int64_t stride(int i) const { return view_.strides[i]; }
  const uint8_t* data() const { return static_cast<const uint8_t*>(view_.buf); }
  // The element's code in the struct module; unaligned arrays carry a prefix for byte order ('=').
  char format() const {
    const char* f = view_.format ? view_.format : "B";
    require(*f != '>' && *f != '!', "arrays must have the machine's byte order");
    if (std::strchr("@=<^", *f)) ++f;
    return f[0] != '\0' && f[1] == '\0' ? f[0] : '?';
  }
  void require_format(const char* allowed, const std::string& what) const {
    if (!std::strchr(allowed, format())) throw nb::type_error((what + ": wrong dtype").c_str());
  }

 private:
  Py_buffer view_;
};

const char* code_formats(WeightKind kind) {
  switch (kind) {
    case WeightKind::f32:
      return "f";
    case WeightKind::bf16:
      return "H";
    case WeightKind::f16:
      return "eH";
    case WeightKind::w8:
      return "b";
    case WeightKind::w4:
    case WeightKind::t4:
    case WeightKind::f8:
      return "B";
  }
  return "";
}

// The arrays of one source, held while native code reads them.
struct SourceViews {
  std::unique_ptr<BufferView> codes, scales, offsets;
  Offset offset = Offset::code;
  bool wide() const { return scales && scales->format() == 'f'; }
};

bool is_grouped(WeightKind kind) { return takes_codes(kind) || kind == WeightKind::f8; }
bool has_offsets(WeightKind kind) { return kind == WeightKind::w4 || kind == WeightKind::w8; }

// [rows, groups] of one of the formats
std::unique_ptr<BufferView> group_values(nb::handle object, const BufferView& codes, const char* formats, const char* what) {
  auto view = std::make_unique<BufferView>(object, what);
  view->require_format(formats, what);
  require(view->ndim() == 2 && view->shape(0) == codes.shape(0) && view->shape(1) == codes.shape(1),
          std::string(what) + ": shape must be [rows, groups] of the codes");
  return view;
}

SourceViews read_source(nb::handle item, WeightKind kind) {
  nb::object fields[4] = {nb::none(), nb::none(), nb::none(), nb::none()};
  const size_t count = nb::len(item);
  require(count >= 1 && count <= 4, "a source is (codes, scales, mins, zeros)");
  for (size_t i = 0; i < count; ++i) fields[i] = nb::borrow(item[i]);
  SourceViews s;
  s.codes = std::make_unique<BufferView>(fields[0], "codes");
  s.codes->require_format(code_formats(kind), std::string("codes of kind ") + kind_name(kind));
  const bool quantised = is_grouped(kind);
  require(s.codes->ndim() == (quantised ? 3 : 2),
          quantised ? "codes: shape must be [rows, groups, bytes]" : "codes: shape must be [rows, k]");
  require(fields[1].is_none() != quantised, quantised ? "scales are missing" : "plain weights have no scales");
  const bool mins = !fields[2].is_none(), zeros = !fields[3].is_none();
  require(has_offsets(kind) || !(mins || zeros), "plain weights have no mins and no zeros, nor have f8 and t4");
  require(!(mins && zeros), "a source has mins or zeros, not both");
  if (quantised) s.scales = group_values(fields[1], *s.codes, kind == WeightKind::f8 ? "f" : "eHf", "scales");
  if (mins) s.offsets = group_values(fields[2], *s.codes, "eH", "mins"), s.offset = Offset::min;
  require(!(kind == WeightKind::w8 && s.codes->shape(2) == 16 && (zeros || s.wide())), "groups of 16 have fp16 scales and no zeros");
  if (zeros) s.offsets = group_values(fields[3], *s.codes, "eH", "zeros"), s.offset = Offset::zero;
  return s;
}

// Inputs per scale, told by the codes' last axis; 0 for plain weights.
int group_of(const BufferView& codes, WeightKind kind) {
  if (!is_grouped(kind)) return 0;
  const int64_t width = codes.shape(2), inputs = has_nibbles(kind) ? 2 * width : width;
  require(width <= 1 || codes.stride(2) == 1, "codes: the bytes of a group must be adjacent");
  require(inputs > 0 && inputs < (int64_t(1) << 30) && (inputs % kGroup == 0 || (kind == WeightKind::w8 && inputs == 16)),
          has_nibbles(kind) ? "codes: groups of w4 and t4 hold a multiple of 16 bytes"
                            : "codes: groups hold a multiple of 32 bytes (w8 also 16)");
  return int(inputs);
}

PackSource pack_source(const SourceViews& s) {
  PackSource p{};
  p.rows = s.codes->shape(0);
  p.codes = s.codes->data();
  p.codes_row = s.codes->stride(0);
  p.codes_group = s.codes->stride(1);
  if (s.scales) p.scales = s.scales->data(), p.scales_row = s.scales->stride(0), p.scales_group = s.scales->stride(1);
  if (s.offsets) p.offsets = s.offsets->data(), p.offsets_row = s.offsets->stride(0), p.offsets_group = s.offsets->stride(1);
  return p;
}

using Table = nb::ndarray<const int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::unique_ptr<PackedWeight> pack_weight(const std::string& kind_text, int64_t n, int64_t k, nb::sequence sources, const std::string& isa,
                                          std::optional<Table> numbers) {
  const WeightKind kind = kind_of(kind_text);
  require(numbers.has_value() == (kind == WeightKind::t4), "table: goes with t4, and only with it");
  require(!numbers || numbers->shape(0) == 16, "table: must have 16 numbers");
  require(n >= 1 && k >= 1 && n < kMaxSide && k < kMaxSide / n, "n and k must be positive and sane");
  std::vector<SourceViews> views;
  for (nb::handle item : sources) views.push_back(read_source(item, kind));
  require(!views.empty(), "there must be at least one source");
  const int group = group_of(*views[0].codes, kind);
  int64_t rows = 0;
  const bool wide = views[0].wide();
  Offset offset = Offset::code;
  for (const SourceViews& s : views) {
    rows += s.codes->shape(0);
    require(group_of(*s.codes, kind) == group, "all sources of one weight must have the same group");
    require(s.wide() == wide, "all sources of one weight must have scales of one dtype");
    // In w8 sources with offsets stand beside sources without: those have an offset of 0. In w4 they count from -8 instead.
    require(kind == WeightKind::w4 ? &s == &views[0] || s.offset == offset
                                   : s.offset == offset || s.offset == Offset::code || offset == Offset::code,
            "all sources of one weight must have mins, or all zeros, or none");
    if (s.offset != Offset::code) offset = s.offset;
    require(s.codes->shape(1) == (group ? (k + group - 1) / group : k) && (group <= kGroup || k % group == 0),
            "codes: " + std::to_string(s.codes->shape(1)) + " along the second axis do not make k = " + std::to_string(k));
  }
  require(rows == n, "the sources hold " + std::to_string(rows) + " rows, not n = " + std::to_string(n));

  const KernelTable& table = best_kernels(isa.c_str());
  PackedW shape{};
  shape.kind = kind;
  shape.lanes = table.lanes;
  shape.group = group;
  shape.n = n;
  shape.k = k;
  shape.k_padded = (k + kGroup - 1) / kGroup * kGroup;
  shape.offset = offset;
  shape.wide = wide;
  if (numbers) std::copy_n(numbers->data(), 16, shape.table);
  shape.bytes = table.packed_bytes(shape);
  auto weight = std::make_unique<PackedWeight>(shape, table);
  std::vector<PackSource> parts;
  for (const SourceViews& s : views) parts.push_back(pack_source(s));
  nb::gil_scoped_release release;
  ThreadPool& pool = thread_pool();
  // One source after the other: two may share a panel.
  int64_t first_row = 0;
  for (const PackSource& part : parts) {
    pool.run([&](int ith, int nth) { table.pack(weight->w, part, first_row, ith, nth); });
    first_row += part.rows;
  }
  return weight;
}

template <class T>
struct Owned {
  explicit Owned(size_t count) : data(new T[count]) {}
  template <size_t N>
  nb::ndarray<nb::numpy, T> array(const size_t (&shape)[N]) {
    T* raw = data.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(raw, N, shape, owner);
  }
  std::unique_ptr<T[]> data;
};

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require_rows(const Matrix& m, const char* what) {
  if (m.shape(0) == 0) return;
  require(m.shape(1) <= 1 || m.stride(1) == 1, std::string(what) + ": the elements of a row must be adjacent");
  require(m.shape(0) <= 1 || m.stride(0) >= int64_t(m.shape(1)), std::string(what) + ": rows must not overlap");
}

const KernelTable& kernels_for(const PackedWeight& weight, const std::string& isa) {
  const KernelTable& table = isa.empty() ? *weight.table : best_kernels(isa.c_str());
  require(table.lanes == weight.w.lanes, "the weight was packed for " + std::to_string(weight.w.lanes) + " lanes; '" +
                                             std::string(table.name) + "' has " + std::to_string(table.lanes));
  return table;
}

nb::ndarray<nb::numpy, float> dequantize(const PackedWeight& weight) {
  const PackedW& w = weight.w;
  Owned<float> out(size_t(w.n * w.k));
  {
    nb::gil_scoped_release release;
    float* to = out.data.get();
    thread_pool().run([&](int ith, int nth) {
      for (int64_t row = w.n * ith / nth; row < w.n * (ith + 1) / nth; ++row) weight.table->dequant_row(w, row, to + row * w.k);
    });
  }
  return out.array({size_t(w.n), size_t(w.k)});
}

// Memory filled with 0xff: whatever a kernel forgets to write is a NaN, and nothing it finds there may matter.
template <class T>
std::unique_ptr<T[]> poisoned(size_t count) {
  std::unique_ptr<T[]> p(new T[count]);
  std::memset(p.get(), 0xff, count * sizeof(T));
  return p;
}

struct Quantised {
  Quantised(int64_t rows, int64_t k)
      : k_padded((k + kGroup - 1) / kGroup * kGroup),
        groups(k_padded / kGroup),
        q(poisoned<int8_t>(size_t(rows * k_padded))),
        scale(poisoned<float>(size_t(rows * groups))),
        sum(poisoned<float>(size_t(rows * groups))) {}
  QuantRows rows() const { return {q.get(), scale.get(), sum.get()}; }
  int64_t k_padded, groups;
  std::unique_ptr<int8_t[]> q;
  std::unique_ptr<float[]> scale, sum;
};

ThreadPool& pool_for(int threads, std::unique_ptr<ThreadPool>& own) {
  if (threads <= 0) return thread_pool();
  own = std::make_unique<ThreadPool>(threads);
  return *own;
}

using QuantTuple = std::tuple<nb::ndarray<nb::numpy, int8_t>, nb::ndarray<nb::numpy, float>, nb::ndarray<nb::numpy, float>>;

using Columns = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

QuantTuple quantize_rows(Matrix x, const std::string& isa, int threads, std::optional<Columns> columns) {
  require_rows(x, "x");
  require(x.shape(1) >= 1, "x: rows must not be empty");
  const KernelTable& table = best_kernels(isa.c_str());
  const int64_t rows = int64_t(x.shape(0)), k = int64_t(x.shape(1));
  const int32_t* order = columns ? columns->data() : nullptr;
  require(!columns || int64_t(columns->shape(0)) == k, "columns: must have one for each column of x");
  for (int64_t i = 0; order && i < k; ++i) require(order[i] >= 0 && order[i] < k, "columns: one is outside x");
  Quantised out(rows, k);
  {
    nb::gil_scoped_release release;
    std::unique_ptr<ThreadPool> own;
    pool_for(threads, own).run([&](int ith, int nth) {
      table.quantize_rows(x.data(), x.stride(0), rows, k, out.k_padded, order, out.rows(), ith, nth);
    });
  }
  Owned<int8_t> q(0);
  Owned<float> scale(0), sum(0);
  q.data = std::move(out.q), scale.data = std::move(out.scale), sum.data = std::move(out.sum);
  const size_t r = size_t(rows);
  return {q.array({r, size_t(out.k_padded)}), scale.array({r, size_t(out.groups)}), sum.array({r, size_t(out.groups)})};
}

Epilogue epilogue_of(const std::string& name) {
  if (name == "none") return Epilogue::none;
  if (name == "add") return Epilogue::add;
  if (name == "silu_mul") return Epilogue::silu_mul;
  if (name == "gelu_mul") return Epilogue::gelu_mul;
  if (name == "gelu") return Epilogue::gelu;
  throw std::invalid_argument("unknown epilogue '" + name + "'; known: none, add, silu_mul, gelu_mul, gelu");
}

constexpr size_t kGuard = 256;  // poisoned bytes behind each scratch

struct LinearCall {
  Matrix x;
  const PackedWeight& weight;
  const KernelTable& table;
  LinearArgs args{};
  std::unique_ptr<Quantised> quantised;
  std::vector<std::unique_ptr<uint8_t[]>> scratch;  // one per thread

  LinearCall(Matrix input, const PackedWeight& w, const KernelTable& t) : x(input), weight(w), table(t) {
    require_rows(x, "x");
    require(int64_t(x.shape(1)) == w.w.k, "x: has " + std::to_string(x.shape(1)) + " columns, the weight k = " + std::to_string(w.w.k));
    args.rows = int64_t(x.shape(0));
    args.x = x.data();
    args.ldx = x.stride(0);
    args.w = &w.w;
    if (takes_codes(w.w.kind)) {
      quantised = std::make_unique<Quantised>(args.rows, w.w.k);
      args.xq = quantised->rows();
    }
  }
  void allocate_scratch(int threads) {
    args.scratch_bytes = table.linear_scratch(weight.w.kind, weight.w.k);
    for (int i = 0; i < threads; ++i) scratch.push_back(poisoned<uint8_t>(args.scratch_bytes + kGuard));
  }
  // A kernel must stay within the scratch that it asked for: the guard behind it still holds the poison.
  void check_scratch() const {
    for (const auto& s : scratch)
      for (size_t i = 0; i < kGuard; ++i)
        if (s[args.scratch_bytes + i] != 0xff) throw std::runtime_error("linear: a kernel wrote beyond its scratch");
  }
  void run(ThreadPool& pool) {
    Barrier barrier(pool.size());
    pool.run([&](int ith, int nth) { run_thread(args.w, barrier, ith, nth); });
  }
  // One thread's part of quantisation (if any) and product with a weight of the call's shape, the barrier after each.
  void run_thread(const PackedW* w, Barrier& barrier, int ith, int nth) {
    if (quantised) {
      table.quantize_rows(args.x, args.ldx, args.rows, w->k, quantised->k_padded, nullptr, args.xq, ith, nth);
      barrier.wait();
    }
    LinearArgs own = args;
    own.w = w;
    own.scratch = scratch[size_t(ith)].get();
    table.linear(own, ith, nth);
    barrier.wait();
  }
};

nb::ndarray<nb::numpy, float> linear(Matrix x, const PackedWeight& weight, std::optional<Vector> bias, std::optional<Matrix> residual,
                                     const std::string& epilogue, const std::string& isa, int threads, float scale) {
  LinearCall call(x, weight, kernels_for(weight, isa));
  LinearArgs& a = call.args;
  a.epilogue = epilogue_of(epilogue);
  const bool gated = a.epilogue == Epilogue::silu_mul || a.epilogue == Epilogue::gelu_mul;
  a.scale = scale;
  require(!gated || scale == 1.0f, "a gated epilogue has no scale");
  require(!gated || weight.w.n % 2 == 0, "a gated epilogue needs an even n: gate and up");
  const int64_t width = gated ? weight.w.n / 2 : weight.w.n;
  require(!bias || int64_t(bias->shape(0)) == weight.w.n, "bias: must have n elements");
  require(residual.has_value() == (a.epilogue == Epilogue::add), "residual goes with the epilogue 'add', and only with it");
  if (bias) a.bias = bias->data();
  if (residual) {
    require_rows(*residual, "residual");
    require(int64_t(residual->shape(0)) == a.rows && int64_t(residual->shape(1)) == width, "residual: must have y's shape");
    a.residual = residual->data();
    a.ldr = residual->stride(0);
  }
  Owned<float> y(0);
  y.data = poisoned<float>(size_t(a.rows * width));
  a.y = y.data.get();
  a.ldy = width;
  {
    nb::gil_scoped_release release;
    std::unique_ptr<ThreadPool> own;
    ThreadPool& pool = pool_for(threads, own);
    call.allocate_scratch(pool.size());
    call.run(pool);
    call.check_scratch();
  }
  return y.array({size_t(a.rows), size_t(width)});
}

// Seconds per product of x with each of `weights` in turn, as a program runs them: all threads in one run, barriers between.
double time_linear(Matrix x, const std::vector<const PackedWeight*>& weights, int64_t repeats, const std::string& isa) {
  require(!weights.empty() && repeats >= 1, "there must be a weight and a repeat");
  LinearCall call(x, *weights[0], kernels_for(*weights[0], isa));
  for (const PackedWeight* w : weights) {
    const PackedW &a = weights[0]->w, &b = w->w;
    require(a.n == b.n && a.k == b.k && a.kind == b.kind && a.lanes == b.lanes, "weights must have one shape and kind");
  }
  Owned<float> y(size_t(call.args.rows * call.weight.w.n));
  call.args.y = y.data.get();
  call.args.ldy = call.weight.w.n;
  nb::gil_scoped_release release;
  ThreadPool& pool = thread_pool();
  call.allocate_scratch(pool.size());
  Barrier barrier(pool.size());
  double seconds = 0;
  pool.run([&](int ith, int nth) {
    for (const PackedWeight* w : weights) call.run_thread(&w->w, barrier, ith, nth);  // warm
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < repeats; ++i)
      for (const PackedWeight* w : weights) call.run_thread(&w->w, barrier, ith, nth);
    if (ith == 0) seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  });
  return seconds / double(repeats) / double(weights.size());
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<PackedWeight>(m, "PackedWeight", "A linear layer's weights, re-laid for one number of lanes; made by pack().")
      .def_prop_ro("kind", [](const PackedWeight& p) { return kind_name(p.w.kind); })
      .def_prop_ro("n", [](const PackedWeight& p) { return p.w.n; })
      .def_prop_ro("k", [](const PackedWeight& p) { return p.w.k; })
      .def_prop_ro("group", [](const PackedWeight& p) { return p.w.group; })
      .def_prop_ro("has_mins", [](const PackedWeight& p) { return p.w.offset == Offset::min; })
      .def_prop_ro("has_zeros", [](const PackedWeight& p) { return p.w.offset == Offset::zero; })
      .def_prop_ro("lanes", [](const PackedWeight& p) { return p.w.lanes; })
      .def_prop_ro("nbytes", [](const PackedWeight& p) { return p.w.bytes; });
  m.def("pack", &pack_weight, "kind"_a, "n"_a, "k"_a, "sources"_a, "isa"_a = "", "table"_a.noconvert() = nb::none(),
        "Packs the concatenation of `sources` along n. kind: f32, bf16, f16, w8, w4, f8, t4. A source is (codes, scales, mins, zeros):\n"
        "codes f32 float32 [rows, k]; bf16 uint16 [rows, k]; f16 float16 or uint16 [rows, k]; w8 int8 [rows, groups, group];\n"
        "w4, t4 uint8 [rows, groups, group / 2]; f8 uint8 [rows, groups, group]; scales float16 (or its bits) or float32, mins and zeros "
        "float16\n"
        "[rows, groups], one of them or both None. Views of any strides. table int8 [16], of t4: what its codes stand for.");
  m.def("dequantize", &dequantize, "weight"_a, "float32 [n, k]: code * scale + min, or (code - zero) * scale, or table[code] * scale.");
  m.def("quantize_rows", &quantize_rows, "x"_a.noconvert(), "isa"_a = "", "threads"_a = 0, "columns"_a.noconvert() = nb::none(),
        "Rows of float32 [rows, k] by groups of 32: (q int8 [rows, k_padded], scale [rows, groups], sum of q [rows, groups]).\n"
        "columns int32 [k]: code i is of x[:, columns[i]].");
  m.def(
      "linear", &linear, "x"_a.noconvert(), "weight"_a, "bias"_a.noconvert() = nb::none(), "residual"_a.noconvert() = nb::none(),
      "epilogue"_a = "none", "isa"_a = "", "threads"_a = 0, "scale"_a = 1.0f,
      "y = epilogue((x @ weight.T + bias) * scale), float32 [rows, n] (or [rows, n / 2] for silu_mul and gelu_mul, gate channels first).\n"
      "w4, t4 and w8 quantise x first. epilogue: none, add (residual float32 [rows, n]), silu_mul, gelu_mul, gelu.");
  m.def("time_linear", &time_linear, "x"_a.noconvert(), "weights"_a, "repeats"_a, "isa"_a = "",
        "Seconds per product of x with each weight in turn (one shape and kind), quantisation included: for benchmarks.");
}

}  // namespace octavo
