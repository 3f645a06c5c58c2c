// Gated activation: y[i] = act(x[i]) * x[width + i], x [rows][2 * width] (gate, then up), y [rows][width]; y may be x.
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

}  // namespace

void act(const ActArgs& a, int ith, int nth) {
  const Patch p = patch(a.r.rows, a.r.width, ith, nth);
  if (a.kind == 0)
    gate(a, p, [](F v) { return silu(v); });
  else
    gate(a, p, [](F v) { return gelu_tanh(v); });
}

}  // namespace octavo::OCTAVO_NS
