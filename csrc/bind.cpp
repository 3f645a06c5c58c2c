// The extension module octavo._native.
#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "kernels.h"

namespace nb = nanobind;

namespace octavo {
namespace {
std::unique_ptr<ThreadPool> pool;
}

ThreadPool& thread_pool() {
  if (!pool) pool = std::make_unique<ThreadPool>(available_cpus());
  return *pool;
}

}  // namespace octavo

NB_MODULE(_native, m) {
  using namespace octavo;
  // What is alive when the interpreter ends is freed by the system; the report would only alarm users.
  nb::set_leak_warnings(false);
  m.def("available_cpus", &available_cpus, "CPUs of the affinity mask, capped by the cgroup's quota.");
  m.def(
      "set_num_threads", [](int n, bool pin) { pool = std::make_unique<ThreadPool>(n, pin); }, nb::arg("n"), nb::arg("pin") = false,
      "Replaces the process's thread pool. Not while a program runs.");
  m.def("num_threads", [] { return thread_pool().size(); });
  m.def("isa_names", [] {
    int count = 0;
    const KernelTable* const* tables = kernel_tables(&count);
    std::vector<std::string> names;
    for (int i = 0; i < count; ++i)
      if (tables[i]->score() > 0) names.emplace_back(tables[i]->name);
    return names;
  }, "Instruction-set variants that run on this machine.");
  m.def("best_isa", [] { return std::string(best_kernels("").name); }, "The variant that is chosen where none is asked for.");
  bind_linear(m);
  bind_kernels(m);
  bind_program(m);
  bind_peaks(m);
}
