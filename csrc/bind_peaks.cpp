// Python bindings of the machine's limits: octavo._native.peak_products and .peak_read. Measured on the process's pool, all threads at
// once.
#include <nanobind/stl/string.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <iterator>
#include <new>
#include <string>

#include "bind.h"
#include "kernels.h"
#include "packed.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// A try is shorter than the time slices of a scheduler: on a machine with other work some tries still have all CPUs to themselves.
constexpr double kTrySeconds = 0.002;
constexpr int kLeastTries = 8;
constexpr size_t kMaxBytes = size_t(1) << 40;
constexpr size_t kSlice = size_t(4) << 20;  // of a thread's part of a buffer, read in one go
// Bytes that reading asks for in advance: none, or what the linear kernels do, or some pages.
constexpr size_t kAhead[] = {0, 2048, 8192};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The best of many tries, as work per second: `work(repeats)` returns how much that was.
double best_rate(double seconds, const std::function<double(int64_t)>& work) {
  double best = 0, from = now();
  const double until = from + seconds;
  int64_t repeats = 1;
  for (int tries = 0; tries < kLeastTries || from < until;) {
    const double done = work(repeats), to = now(), taken = std::max(to - from, 1e-9);
    from = to;
    best = std::max(best, done / taken);
    if (taken < kTrySeconds / 2)
      repeats *= 2;  // the first, short ones also warm caches and clocks
    else
      ++tries;
  }
  return best;
}

void require_seconds(double seconds) {
  if (!(seconds > 0 && seconds <= 60)) throw nb::value_error("seconds: must be above 0, and at most 60");
}

double peak_products(const std::string& kind_text, double seconds, const std::string& isa) {
  const WeightKind kind = kind_of(kind_text);
  const KernelTable& table = best_kernels(isa.c_str());
  require_seconds(seconds);
  nb::gil_scoped_release release;
  ThreadPool& pool = thread_pool();
  return best_rate(seconds, [&](int64_t repeats) {
    double done = 0;  // by each thread alike
    pool.run([&](int ith, int) {
      const double own = table.peak_products(kind, repeats);
      if (ith == 0) done = own;
    });
    return done * pool.size();
  });
}

// Memory in pages of the smallest size.
class SmallPages {
 public:
  explicit SmallPages(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_NOHUGEPAGE)
    madvise(data_, bytes_, MADV_NOHUGEPAGE);
#endif
  }
  ~SmallPages() { munmap(data_, bytes_); }
  SmallPages(const SmallPages&) = delete;
  SmallPages& operator=(const SmallPages&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_;
  size_t bytes_;
};

double best_read(uint8_t* data, size_t bytes, double seconds, const KernelTable& table) {
  ThreadPool& pool = thread_pool();
  const size_t share = bytes / size_t(pool.size()) / 4096 * 4096, slice = std::min(share, kSlice), slices = share / slice;
  // Written by the thread that will read it: pages never written are all one and the same.
  pool.run([&](int ith, int) { std::memset(data + size_t(ith) * share, 1, share); });
  double best = 0;
  size_t turn = 0;  // tries go on where the last one ended: what they read must have left the caches
  for (const size_t ahead : kAhead) {
    const double rate = best_rate(seconds / std::size(kAhead), [&](int64_t repeats) {
      pool.run([&](int ith, int) {
        for (size_t i = 0; i < size_t(repeats); ++i) {
          const uint8_t* own = data + size_t(ith) * share + (turn + i) % slices * slice;
          table.peak_read(reinterpret_cast<const float*>(own), slice / sizeof(float), ahead);
        }
      });
      turn = (turn + size_t(repeats)) % slices;
      return double(slice) * double(repeats) * pool.size();
    });
    best = std::max(best, rate);
  }
  return best;
}

double peak_read(size_t bytes, double seconds, bool huge_pages, const std::string& isa) {
  const KernelTable& table = best_kernels(isa.c_str());
  require_seconds(seconds);
  if (bytes / size_t(thread_pool().size()) < 4096 || bytes > kMaxBytes)
    throw nb::value_error("bytes: must be a page a thread at least, and sane");
  nb::gil_scoped_release release;
  if (huge_pages) return best_read(WeightBuffer(bytes).data(), bytes, seconds, table);
  return best_read(SmallPages(bytes).data(), bytes, seconds, table);
}

}  // namespace

void bind_peaks(nb::module_& m) {
  m.def("peak_products", &peak_products, "kind"_a, "seconds"_a = 0.2, "isa"_a = "",
        "Operations per second that the vectors of a variant reach on all threads with operands at hand, a multiply-add counted as two: "
        "the most that\nproducts with weights of the kind can do. The best of several tries.");
  m.def("peak_read", &peak_read, "bytes"_a, "seconds"_a = 0.2, "huge_pages"_a = true, "isa"_a = "",
        "Bytes per second at which all threads read a buffer again and again, each its own part: of memory if `bytes` is far beyond the "
        "caches.\nhuge_pages: as weights are allocated; else in pages of the smallest size. The best of several tries and ways.");
}

}  // namespace octavo
