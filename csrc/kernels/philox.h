// Philox4x32-10 (Salmon et al. 2011): a counter-based generator. A draw is a pure function of (seed, position), so a
// request's random numbers do not depend on its batch, on what was drawn before, or on a restart.
#pragma once
#include <cstdint>

namespace octavo {
namespace OCTAVO_NS {

struct PhiloxBlock {
  uint32_t x[4];
};

inline PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.x[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter.x[2];
    counter = {{uint32_t(b >> 32) ^ counter.x[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ counter.x[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// 64 uniform bits: key = seed, counter = (position, 0); the first two output words, the first one low.
inline uint64_t uniform_bits(uint64_t seed, uint64_t position) {
  const PhiloxBlock counter = {{uint32_t(position), uint32_t(position >> 32), 0, 0}};
  const PhiloxBlock out = philox4x32(counter, uint32_t(seed), uint32_t(seed >> 32));
  return uint64_t{out.x[1]} << 32 | out.x[0];
}

}  // namespace OCTAVO_NS
}  // namespace octavo
