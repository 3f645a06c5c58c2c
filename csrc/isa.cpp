// Which instruction-set variants this build holds, and which of them a machine gets. Knows only their tables.
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace octavo {

#define OCTAVO_DECLARE(name)      \
  namespace name {                \
  extern const KernelTable table; \
  }
#if defined(OCTAVO_HAS_portable)
OCTAVO_DECLARE(portable)
#endif
#if defined(OCTAVO_HAS_portable16)
OCTAVO_DECLARE(portable16)
#endif
#if defined(OCTAVO_HAS_avx2)
OCTAVO_DECLARE(avx2)
#endif
#if defined(OCTAVO_HAS_avx512)
OCTAVO_DECLARE(avx512)
#endif
#if defined(OCTAVO_HAS_avx512vnni)
OCTAVO_DECLARE(avx512vnni)
#endif
#if defined(OCTAVO_HAS_avx512bf16)
OCTAVO_DECLARE(avx512bf16)
#endif
#if defined(OCTAVO_HAS_neon)
OCTAVO_DECLARE(neon)
#endif

namespace {

const KernelTable* const kTables[] = {
#if defined(OCTAVO_HAS_portable)
    &portable::table,
#endif
#if defined(OCTAVO_HAS_portable16)
    &portable16::table,
#endif
#if defined(OCTAVO_HAS_avx2)
    &avx2::table,
#endif
#if defined(OCTAVO_HAS_avx512)
    &avx512::table,
#endif
#if defined(OCTAVO_HAS_avx512vnni)
    &avx512vnni::table,
#endif
#if defined(OCTAVO_HAS_avx512bf16)
    &avx512bf16::table,
#endif
#if defined(OCTAVO_HAS_neon)
    &neon::table,
#endif
};
constexpr int kCount = int(sizeof kTables / sizeof kTables[0]);

// portable16 scores 0 so that it is never chosen by itself, yet runs on any machine.
bool runs_here(const KernelTable& table) { return table.score() > 0 || std::strcmp(table.name, "portable16") == 0; }

std::string choices() {
  std::string names;
  for (const KernelTable* table : kTables)
    if (runs_here(*table)) names += (names.empty() ? "" : ", ") + std::string(table->name);
  return names;
}

}  // namespace

const KernelTable* const* kernel_tables(int* count) {
  *count = kCount;
  return kTables;
}

const KernelTable& best_kernels(const char* wanted) {
  const bool any = wanted == nullptr || *wanted == '\0';
  const KernelTable* best = nullptr;
  int best_score = 0;
  for (const KernelTable* table : kTables) {
    if (!any && std::strcmp(table->name, wanted) == 0) {
      if (runs_here(*table)) return *table;
      throw std::invalid_argument("this machine cannot run the instruction set '" + std::string(wanted) + "'; it can run: " + choices());
    }
    if (any && table->score() > best_score) {
      best_score = table->score();
      best = table;
    }
  }
  if (best) return *best;
  throw std::invalid_argument("unknown instruction set '" + std::string(any ? "" : wanted) + "'; this machine can run: " + choices());
}

}  // namespace octavo
