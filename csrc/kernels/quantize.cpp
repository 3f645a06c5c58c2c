// Activations to int8 with one scale per row and group of 32: quantize.h, over rows and groups.
#include "quantize.h"

#include <algorithm>

#include "decl.h"

namespace octavo::OCTAVO_NS {

// The unit of work is one group: a single row is divided too.
void quantize_rows(const float* x, int64_t ldx, int64_t rows, int64_t k, int64_t k_padded, QuantRows out, int ith, int nth) {
  const int64_t groups = k_padded / kGroup, units = rows * groups;
  for (int64_t unit = units * ith / nth, end = units * (ith + 1) / nth; unit < end;) {
    const int64_t row = unit / groups, first = unit % groups, last = std::min(groups, first + end - unit);
    quantize_groups(x + row * ldx, k, first, last, out.q + row * k_padded, out.scale + row * groups, out.sum + row * groups);
    unit += last - first;
  }
}

}  // namespace octavo::OCTAVO_NS
