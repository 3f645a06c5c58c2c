// How the threads of one kernel divide its work.
#pragma once
#include <cstdint>

namespace octavo::OCTAVO_NS {

struct Span {
  int64_t begin, end;
};

inline Span share(int64_t total, int ith, int nth) { return {total * ith / nth, total * (ith + 1) / nth}; }

// For element-wise kernels: whole rows for each thread, or, with fewer rows than threads, columns of every row in multiples of 16.
struct Patch {
  Span rows, columns;
};

inline Patch patch(int64_t rows, int64_t width, int ith, int nth) {
  if (rows >= nth) return {share(rows, ith, nth), {0, width}};
  const Span tiles = share((width + 15) / 16, ith, nth);
  return {{0, rows}, {tiles.begin * 16, tiles.end * 16 < width ? tiles.end * 16 : width}};
}

}  // namespace octavo::OCTAVO_NS
