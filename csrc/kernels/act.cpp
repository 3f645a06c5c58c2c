// Activations and other functions of single elements.
//
// act: y[i] = act(x[i]) * x[width + i], x [rows][2 * width] (gate, then up), y [rows][width]. unary: y[i] = f(x[i]).
// gate_rows: y[i] = x[i] * (1 / (1 + exp(-gate of the row))). In all of them y may be x.
#include "kernels/decl.h"
#include "kernels/split.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

template <class Act>
void gate(const ActArgs& a, const Patch& p, Act activate) {
  for (int64_t r = p.rows.begin; r < p.rows.end; ++r) {
    const float* x = a.r.x + r * a.r.ldx;
    const float* up = x + a.r.width;
    float* y = a.r.y + r * a.r.ldy;
    int64_t i = p.columns.begin;
    for (; i + kLanes <= p.columns.end; i += kLanes) store(y + i, mul(activate(load(x + i)), load(up + i)));
    if (const int n = int(p.columns.end - i); n > 0) store_n(y + i, mul(activate(load_n(x + i, n)), load_n(up + i, n)), n);
  }
}

template <class Fn>
void each(const RowsArgs& r, int ith, int nth, Fn f) {
  const Patch p = patch(r.rows, r.width, ith, nth);
  for (int64_t row = p.rows.begin; row < p.rows.end; ++row) {
    const float* x = r.x + row * r.ldx;
    float* y = r.y + row * r.ldy;
    int64_t i = p.columns.begin;
    for (; i + kLanes <= p.columns.end; i += kLanes) store(y + i, f(load(x + i), row));
    if (const int n = int(p.columns.end - i); n > 0) store_n(y + i, f(load_n(x + i, n), row), n);
  }
}

}  // namespace

void act(const ActArgs& a, int ith, int nth) {
  const Patch p = patch(a.r.rows, a.r.width, ith, nth);
  if (a.kind == 0)
    gate(a, p, [](F v) { return silu(v); });
  else
    gate(a, p, [](F v) { return gelu_tanh(v); });
}

void unary(const UnaryArgs& a, int ith, int nth) {
  const F factor = set1(a.factor);
  switch (a.kind) {
    case Unary::gelu:
      return each(a.r, ith, nth, [](F v, int64_t) { return gelu_tanh(v); });
    case Unary::scale:
      return each(a.r, ith, nth, [&](F v, int64_t) { return mul(v, factor); });
    case Unary::soft_cap:
      return each(a.r, ith, nth, [&](F v, int64_t) { return mul(factor, tanh(div(v, factor))); });
  }
}

void gate_rows(const GateArgs& a, int ith, int nth) {
  const F one = set1(1.0f);
  each(a.r, ith, nth, [&](F v, int64_t row) { return mul(v, div(one, octavo::OCTAVO_NS::add(one, exp(neg(set1(a.gate[row * a.ldg])))))); });
}

}  // namespace octavo::OCTAVO_NS
