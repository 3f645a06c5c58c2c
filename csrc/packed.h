// A linear layer's packed weights as a Python object (octavo._native.PackedWeight): owns the bytes that a PackedW points to.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "kernels.h"

namespace octavo {

const char* kind_name(WeightKind kind);
WeightKind kind_of(const std::string& name);  // throws std::invalid_argument with the choices

// Zeroed, 64-byte aligned memory for weights, in huge pages where the system grants them: a decode step streams over all of a
// model's weights, and small pages would cost it translations. Small buffers share mappings; a copy shares the memory.
class WeightBuffer {
 public:
  explicit WeightBuffer(size_t bytes);  // throws std::bad_alloc
  uint8_t* data() const { return data_; }

 private:
  struct Mapping;
  std::shared_ptr<Mapping> mapping_;
  uint8_t* data_;
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
