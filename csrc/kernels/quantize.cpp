// Activations to int8 with one scale per row and group of 32: quantize.h, over rows and groups.
#include "quantize.h"

#include <algorithm>

#include "decl.h"

namespace octavo::OCTAVO_NS {
namespace {

// Groups [first, last) of a row whose inputs are taken in another order.
void quantize_ordered(const float* x, const int32_t* columns, int64_t k, int64_t first, int64_t last, int8_t* q, float* scale, float* sum) {
  for (int64_t g = first; g < last; ++g) {
    float copy[kGroup] = {};
    const int64_t start = g * kGroup, count = std::min<int64_t>(kGroup, k - start);
    for (int64_t j = 0; j < count; ++j) copy[j] = x[columns[start + j]];
    quantize_group(copy, q + start, scale + g, sum + g);
  }
}

}  // namespace

// The unit of work is one group: a single row is divided too.
void quantize_rows(const float* x, int64_t ldx, int64_t rows, int64_t k, int64_t k_padded, const int32_t* columns, QuantRows out, int ith,
                   int nth) {
  const int64_t groups = k_padded / kGroup, units = rows * groups;
  for (int64_t unit = units * ith / nth, end = units * (ith + 1) / nth; unit < end;) {
    const int64_t row = unit / groups, first = unit % groups, last = std::min(groups, first + end - unit);
    int8_t* q = out.q + row * k_padded;
    float *scale = out.scale + row * groups, *sum = out.sum + row * groups;
    if (columns)
      quantize_ordered(x + row * ldx, columns, k, first, last, q, scale, sum);
    else
      quantize_groups(x + row * ldx, k, first, last, q, scale, sum);
    unit += last - first;
  }
}

}  // namespace octavo::OCTAVO_NS
