// The Python module is bound in parts, one function per source.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "threads.h"

namespace octavo {
void bind_linear(nanobind::module_&);   // packing and products: bind_linear.cpp
void bind_kernels(nanobind::module_&);  // every other kernel, one by one: bind_kernels.cpp
void bind_program(nanobind::module_&);  // the traced program: bind_program.cpp
void bind_peaks(nanobind::module_&);    // the machine's limits: bind_peaks.cpp
ThreadPool& thread_pool();              // the process's pool, made at first use
}  // namespace octavo
