// Embedding: y[r] = w[ids[r]] * scale, w packed like any linear layer's [vocab][width] weights.
//
// An id outside the table gives a row of NaN: it reads nothing, and the sampler refuses that request alone.
#include "kernels/decl.h"
#include "kernels/split.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {

void embed(const EmbedArgs& a, int ith, int nth) {
  const Span rows = share(a.rows, ith, nth);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    float* y = a.y + r * a.ldy;
    if (a.ids[r] < 0 || a.ids[r] >= a.w->n) {
      for (int64_t i = 0; i < a.w->k; ++i) y[i] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    dequant_row(*a.w, a.ids[r], y);
    if (a.scale != 1.0f)
      for (int64_t i = 0; i < a.w->k; ++i) y[i] *= a.scale;
  }
}

}  // namespace octavo::OCTAVO_NS
