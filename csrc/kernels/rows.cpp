// Rows added and rows picked.
//
// add: y = x + b, all [rows][width] fp32; y may be x or b. gather: y[r] = x[index[r]]; y must not overlap x, the caller keeps
// index below the rows of x, and a negative index gives a row of NaN.
#include "kernels/decl.h"
#include "kernels/split.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {

void add(const AddArgs& a, int ith, int nth) {
  const Patch p = patch(a.r.rows, a.r.width, ith, nth);
  for (int64_t r = p.rows.begin; r < p.rows.end; ++r) {
    const float* x = a.r.x + r * a.r.ldx;
    const float* b = a.b + r * a.ldb;
    float* y = a.r.y + r * a.r.ldy;
    for (int64_t i = p.columns.begin; i < p.columns.end; ++i) y[i] = x[i] + b[i];
  }
}

void gather(const GatherArgs& a, int ith, int nth) {
  const Span rows = share(a.r.rows, ith, nth);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    float* y = a.r.y + r * a.r.ldy;
    if (a.index[r] >= 0) {
      std::memcpy(y, a.r.x + a.index[r] * a.r.ldx, size_t(a.r.width) * 4);
      continue;
    }
    for (int64_t i = 0; i < a.r.width; ++i) y[i] = std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace octavo::OCTAVO_NS
