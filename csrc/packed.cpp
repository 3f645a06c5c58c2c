// Memory and names of packed weights.
#include "packed.h"

#include <sys/mman.h>

#include <mutex>
#include <new>
#include <stdexcept>

namespace octavo {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSlab = size_t(32) << 20;  // shared by weights of up to a quarter of it

struct KindName {
  WeightKind kind;
  const char* name;
};
constexpr KindName kKinds[] = {{WeightKind::f32, "f32"}, {WeightKind::bf16, "bf16"}, {WeightKind::f16, "f16"}, {WeightKind::w8, "w8"},
                               {WeightKind::w4, "w4"},   {WeightKind::f8, "f8"},     {WeightKind::t4, "t4"}};

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

const char* kind_name(WeightKind kind) {
  for (const KindName& k : kKinds)
    if (k.kind == kind) return k.name;
  return "?";
}

WeightKind kind_of(const std::string& name) {
  std::string choices;
  for (const KindName& k : kKinds) {
    if (name == k.name) return k.kind;
    choices += (choices.empty() ? "" : ", ") + std::string(k.name);
  }
  throw std::invalid_argument("unknown weight kind '" + name + "'; known: " + choices);
}

// A zeroed mapping that starts and ends at a huge page, and the part of it that is taken. Pages cost nothing until touched.
struct WeightBuffer::Mapping {
  explicit Mapping(size_t wanted) : bytes(round_up(wanted, kHugePage)) {
    void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t start = reinterpret_cast<uintptr_t>(p), aligned = round_up(start, kHugePage);
    if (aligned > start) munmap(p, aligned - start);
    data = reinterpret_cast<uint8_t*>(aligned);
    if (const size_t rest = start + kHugePage - aligned; rest > 0) munmap(data + bytes, rest);
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes, MADV_HUGEPAGE);  // a wish: refused where huge pages are off
#endif
  }
  ~Mapping() { munmap(data, bytes); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint8_t* data;
  const size_t bytes;
  size_t used = 0;
};

WeightBuffer::WeightBuffer(size_t bytes) {
  // The slab that small weights are cut from. Held weakly: it lives as long as any weight in it.
  static std::mutex mutex;
  static std::weak_ptr<Mapping> current;
  if (bytes > kSlab / 4) {
    mapping_ = std::make_shared<Mapping>(bytes);
    data_ = mapping_->data;
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  mapping_ = current.lock();
  if (!mapping_ || mapping_->used + bytes > mapping_->bytes) {
    mapping_ = std::make_shared<Mapping>(kSlab);
    current = mapping_;
  }
  data_ = mapping_->data + mapping_->used;
  mapping_->used += round_up(bytes, 64);
}

}  // namespace octavo
