// A linear layer's packed weights as a Python object (octavo._native.PackedWeight): owns the bytes that a PackedW points to.
#pragma once
#include <cstddef>
#include <string>

#include "kernels.h"

namespace octavo {

const char* kind_name(WeightKind kind);
WeightKind kind_of(const std::string& name);  // throws std::invalid_argument with the choices

// Aligned memory for weights, in huge pages where it is large and the system grants them.
class WeightBuffer {
 public:
  explicit WeightBuffer(size_t bytes);  // zeroed; throws std::bad_alloc
  ~WeightBuffer();
  WeightBuffer(const WeightBuffer&) = delete;
  WeightBuffer& operator=(const WeightBuffer&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
  size_t mapped_;
};

struct PackedWeight {
  PackedWeight(const PackedW& shape, const KernelTable& kernels) : buffer(shape.bytes + 64), w(shape), table(&kernels) {
    w.data = buffer.data();
  }
  const PackedW& packed() const { return w; }

  WeightBuffer buffer;
  PackedW w;
  const KernelTable* table;  // the variant that packed it; any with the same number of lanes reads it
};

}  // namespace octavo
