// A mixture of experts apart from its products: the choice of experts, rows sorted by expert, and the weighted sum. See kernels.h.
#include <algorithm>

#include "kernels/decl.h"
#include "kernels/split.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

const float kInf = std::numeric_limits<float>::infinity();

// The largest of `values` that comes after element `last` in the order (value descending, index ascending); last -1: of all.
int32_t next_largest(const float* values, int64_t count, int32_t last) {
  int32_t best = -1;
  for (int32_t i = 0; i < count; ++i) {
    if (last >= 0 && !(values[i] < values[last] || (values[i] == values[last] && i > last))) continue;
    if (best < 0 || values[i] > values[best]) best = i;
  }
  return best;
}

// exps[i] = e^(x[i] - top); returns their sum: lane-wise partial sums, folded.
float exponentials(const float* x, int64_t count, float top, float* exps) {
  const F t = set1(top);
  F sum = zero();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const F e = exp(sub(load(x + i), t));
    store(exps + i, e);
    sum = octavo::OCTAVO_NS::add(sum, e);
  }
  float total = reduce_add(sum);
  if (const int n = int(count - i); n > 0) {
    store_n(exps + i, exp(sub(load_n(x + i, n), t)), n);
    for (; i < count; ++i) total += exps[i];
  }
  return total;
}

void route_row(const RouteArgs& a, const float* x, int32_t* chosen, float* weights) {
  float* values = reinterpret_cast<float*>(a.scratch);
  float* exps = values + a.experts;
  bool is_nan = false;
  for (int64_t i = 0; i < a.experts; ++i) {
    is_nan |= x[i] != x[i];
    values[i] = x[i] != x[i] ? -kInf : x[i];  // so that the order below is one
  }
  int32_t last = -1;
  for (int64_t rank = 0; rank < a.top_k; ++rank) chosen[rank] = last = next_largest(values, a.experts, last);
  const float all = exponentials(x, a.experts, values[chosen[0]], exps);
  float total = a.renormalise ? 0.0f : all;
  for (int64_t rank = 0; a.renormalise && rank < a.top_k; ++rank) total += exps[chosen[rank]];
  if (is_nan) total = std::numeric_limits<float>::quiet_NaN();
  for (int64_t rank = 0; rank < a.top_k; ++rank) weights[rank] = exps[chosen[rank]] / total;
}

void copy_row(const DispatchArgs& a, int64_t from, int64_t to) {
  if (a.y) std::memcpy(a.y + to * a.ldy, a.x + from * a.ldx, size_t(a.width) * 4);
  if (!a.yq.q) return;
  const int64_t groups = a.k_padded / kGroup;
  std::memcpy(a.yq.q + to * a.k_padded, a.xq.q + from * a.k_padded, size_t(a.k_padded));
  std::memcpy(a.yq.scale + to * groups, a.xq.scale + from * groups, size_t(groups) * 4);
  std::memcpy(a.yq.sum + to * groups, a.xq.sum + from * groups, size_t(groups) * 4);
}

}  // namespace

void route(const RouteArgs& a, int ith, int nth) {
  const Span rows = share(a.rows, ith, nth);
  for (int64_t r = rows.begin; r < rows.end; ++r) route_row(a, a.logits + r * a.ld, a.chosen + r * a.top_k, a.weights + r * a.top_k);
}

// Every thread counts all pairs (a few bytes each), so that none waits for another, and copies its own share of the rows.
void dispatch(const DispatchArgs& a, int ith, int nth) {
  int32_t* next = reinterpret_cast<int32_t*>(a.scratch);
  const int64_t pairs = a.rows * a.top_k;
  std::fill_n(next, a.experts, 0);
  for (int64_t p = 0; p < pairs; ++p) ++next[a.chosen[p]];
  int32_t at = 0;
  for (int64_t e = 0; e < a.experts; ++e) {
    const int32_t count = next[e];
    next[e] = at;
    if (ith == 0) a.offsets[e] = at;
    at += count;
  }
  if (ith == 0) a.offsets[a.experts] = at;
  const Span mine = share(pairs, ith, nth);
  for (int64_t p = 0; p < mine.end; ++p) {
    const int32_t place = next[a.chosen[p]]++;
    if (p < mine.begin) continue;
    a.place[p] = place;
    copy_row(a, p / a.top_k, place);
  }
}

void combine(const CombineArgs& a, int ith, int nth) {
  const Patch p = patch(a.r.rows, a.r.width, ith, nth);
  for (int64_t r = p.rows.begin; r < p.rows.end; ++r) {
    const float* weights = a.weights + r * a.top_k;
    const int32_t* place = a.place + r * a.top_k;
    const float* residual = a.residual ? a.residual + r * a.ldr : nullptr;
    float* y = a.r.y + r * a.r.ldy;
    for (int64_t i = p.columns.begin; i < p.columns.end; i += kLanes) {
      const int n = int(std::min<int64_t>(kLanes, p.columns.end - i));
      F sum = zero();
      for (int64_t rank = 0; rank < a.top_k; ++rank) {
        const float* x = a.r.x + place[rank] * a.r.ldx + i;
        sum = fma(set1(weights[rank]), n == kLanes ? load(x) : load_n(x, n), sum);
      }
      if (residual) sum = octavo::OCTAVO_NS::add(n == kLanes ? load(residual + i) : load_n(residual + i, n), sum);
      n == kLanes ? store(y + i, sum) : store_n(y + i, sum, n);
    }
  }
}

}  // namespace octavo::OCTAVO_NS
