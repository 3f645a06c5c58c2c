// Sampling of whole rows of logits: processors, truncation, the draw, and log-probabilities. Knows nothing of requests.
//
// Order of the steps, for one row of `vocab` fp32 logits:
//  1. raw log-probabilities are of the untouched logits
//  2. allowed ids (all others -inf), banned ids (-inf), bias (added)
//  3. repetition penalty over prompt and output ids (l > 0 ? l / r : l * r), then l -= frequency * count, l -= presence, over output ids
//  4. temperature below 1e-5: the largest logit, ties to the lowest id. Otherwise each token has the weight
//     w = floor(exp((l - max) * (1 / temperature)) * 2^30), an integer: sums of weights are exact in any order
//  5. min-p: exp(..) < min_p gives weight 0
//  6. top-k: the first k tokens by (logit descending, id ascending) keep their weight: ties at the edge go to the lowest ids
//  7. top-p: the shortest prefix, in the same order, whose weight is at least top_p * total; at least one token
//  8. with u = 64 bits of Philox(seed, position) and total = the sum of what is left: the first id, ascending, at which the running
//     sum exceeds floor(u * total / 2^64)
// A row that holds a NaN or +inf, or no finite logit after step 3, gets token -1 and nothing else: other rows are not touched.
// Ids outside the vocabulary are ignored.
#include <algorithm>
#include <type_traits>

#include "kernels/decl.h"
#include "kernels/math.h"
#include "kernels/philox.h"
#include "simd.h"

namespace octavo::OCTAVO_NS {
namespace {

constexpr int kBlock = 256;           // tokens whose weights are summed together
constexpr int kFine = 64;             // tokens per recorded maximum
constexpr int kSmallTopK = 256;       // up to here top-k works on a short list of candidates
constexpr float kLikelyNats = 8.5f;   // top-p looks first at the tokens so near to the best one
constexpr int kFewCandidates = 2048;  // and is content with them if they are few and hold the mass
constexpr int kBuckets = 2304;        // 64 to the octave, 36 octaves: below the last one every weight is 0
constexpr float kBucketsPerNat = 92.332482616893657f;
constexpr float kWeightOne = 1073741824.0f;  // 2^30
constexpr float kGreedyBelow = 1e-5f;
constexpr float kFloor = -9999.0f;  // log-probabilities stay finite: JSON has no infinity
const float kInf = std::numeric_limits<float>::infinity();

struct Candidate {
  float logit;
  int32_t id;
  uint32_t weight;
};
bool before(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// One thread's memory.
struct Work {
  float* raw;  // the untouched logits, when they are asked for
  int32_t* weights;
  Candidate* candidates;
  uint64_t* sums;       // per kBlock tokens
  float* maxima;        // per kFine tokens
  float* selection;     // a copy of the maxima that may be reordered; allowed logits
  uint64_t* histogram;  // kBuckets
  uint64_t* seen;       // one bit a token

  // Lays the parts out from `base` and returns the bytes used; with base null only that.
  size_t layout(int64_t vocab, uint8_t* base) {
    const size_t v = round_up(size_t(std::max<int64_t>(vocab, 1)), kBlock);
    size_t used = 0;
    const auto place = [&](auto& part, size_t count) {
      if (base) part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(base + used);
      used += round_up(count * sizeof *part, 64);
    };
    place(raw, v);
    place(weights, v);
    place(candidates, v);
    place(sums, v / kBlock);
    place(maxima, v / kFine);
    place(selection, v);
    place(histogram, kBuckets);
    place(seen, v / 64);
    return used;
  }
};

struct Extent {
  float max;  // -inf: no finite logit
  bool bad;   // a NaN or +inf
};

// The largest logit; with `maxima`, also that of each kFine tokens.
Extent scan(const float* l, int64_t vocab, float* maxima) {
  Extent e{-kInf, false};
  unsigned bad = 0;
  for (int64_t first = 0; first < vocab; first += kFine) {
    const int n = int(std::min<int64_t>(kFine, vocab - first));
    const float* p = l + first;
    float m = -kInf;
    if (n == kFine) {
      F top = load(p);
      for (int i = kLanes; i < kFine; i += kLanes) top = max(top, load(p + i));
      m = reduce_max(top);
    } else {
      for (int i = 0; i < n; ++i) m = p[i] > m ? p[i] : m;
    }
    for (int i = 0; i < n; ++i) bad |= unsigned(!(p[i] < kInf));
    if (maxima) maxima[first / kFine] = m;
    e.max = m > e.max ? m : e.max;
  }
  e.bad = bad != 0;
  return e;
}

int32_t first_of(const float* l, int64_t vocab, float value, const float* maxima) {
  for (int64_t first = 0; first < vocab; first += kFine) {
    if (maxima[first / kFine] != value) continue;
    for (int64_t i = first; i < std::min(vocab, first + kFine); ++i)
      if (l[i] == value) return int32_t(i);
  }
  return -1;
}

// out[i] = exp((l[i] - max) * inv_t); the last vector may leave up to kLanes - 1 arbitrary values behind out[n - 1].
void exp_all(const float* l, int n, float max_l, float inv_t, float* out) {
  const F m = set1(max_l), t = set1(inv_t);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, exp_nonpositive(mul(sub(load(l + i), m), t)));
  if (i < n) store(out + i, exp_nonpositive(mul(sub(load_n(l + i, n - i), m), t)));
}

bool in_vocab(int32_t id, int64_t vocab) { return uint32_t(id) < uint64_t(vocab); }

void allow_only(const SampleRow& r, int64_t vocab, float* kept) {
  // Values first, then the fill: an id may be listed twice. More ids than tokens cannot all be distinct, but must all be read.
  for (int64_t i = 0; i < vocab; ++i) kept[i] = -kInf;
  for (int32_t i = 0; i < r.num_allowed; ++i)
    if (in_vocab(r.allowed_ids[i], vocab)) kept[r.allowed_ids[i]] = r.logits[r.allowed_ids[i]];
  std::memcpy(r.logits, kept, size_t(vocab) * 4);
}

void penalize_repetition(const SampleRow& r, int64_t vocab, uint64_t* seen) {
  std::memset(seen, 0, round_up(size_t(vocab), kBlock) / 8);
  const auto visit = [&](const int32_t* ids, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
      const int32_t id = ids[i];
      if (!in_vocab(id, vocab)) continue;
      const uint64_t bit = uint64_t{1} << (id % 64);
      if (seen[id / 64] & bit) continue;
      seen[id / 64] |= bit;
      float& l = r.logits[id];
      l = l > 0.0f ? l / r.repetition : l * r.repetition;
    }
  };
  visit(r.prompt_ids, r.num_prompt);
  visit(r.output_ids, r.num_output);
}

// Steps 2 and 3. Tells whether any logit was changed.
bool adjust(const SampleRow& r, int64_t vocab, const Work& work) {
  const bool repeat = r.repetition != 1.0f && r.num_prompt + r.num_output > 0;
  const bool count = (r.frequency != 0.0f || r.presence != 0.0f) && r.num_output > 0;
  if (r.num_allowed > 0) allow_only(r, vocab, work.selection);
  for (int32_t i = 0; i < r.num_banned; ++i)
    if (in_vocab(r.banned_ids[i], vocab)) r.logits[r.banned_ids[i]] = -kInf;
  for (int32_t i = 0; i < r.num_bias; ++i)
    if (in_vocab(r.bias_ids[i], vocab)) r.logits[r.bias_ids[i]] += r.bias[i];
  if (repeat) penalize_repetition(r, vocab, work.seen);
  if (count)
    for (int32_t i = 0; i < r.num_output; ++i) {
      if (!in_vocab(r.output_ids[i], vocab)) continue;
      float& l = r.logits[r.output_ids[i]];
      l -= r.frequency * float(r.output_counts[i]);
      l -= r.presence;
    }
  return repeat || count || r.num_allowed > 0 || r.num_banned > 0 || r.num_bias > 0;
}

// How many of the n candidates, in order, it takes to gather `need` (of weights, or of tokens); afterwards the last one taken
// is at that number - 1, and all before it come first in the order. Works on halves: no full sort.
int64_t shortest_prefix(Candidate* c, int64_t n, uint64_t need, bool by_weight) {
  int64_t low = 0, high = n;
  uint64_t have = 0;
  while (high - low > 48) {
    const int64_t middle = (low + high) / 2;
    std::nth_element(c + low, c + middle, c + high, before);
    uint64_t part = 0;
    for (int64_t i = low; i < middle; ++i) part += by_weight ? c[i].weight : 1;
    if (have + part >= need) {
      high = middle;
    } else {
      have += part;
      low = middle;
    }
  }
  std::sort(c + low, c + high, before);
  for (; low < high && have < need; ++low) have += by_weight ? c[low].weight : 1;
  return low;
}

// top_p * total, the least integer that is enough
uint64_t mass_needed(float top_p, uint64_t total) {
  const double need = std::ceil(double(top_p) * double(total));
  return need < 1.0 ? 1 : std::min(total, uint64_t(need));
}

struct Draw {
  float max, inv_t, min_p;
  int32_t top_k;  // 0: off
  float top_p;    // 1: off
  uint64_t bits;
};

uint64_t threshold(uint64_t bits, uint64_t total) { return uint64_t((static_cast<unsigned __int128>(bits) * total) >> 64); }

// Of at most kBlock weights. In halves of 15 bits, whose sums fit into 32: as the loop has no 64-bit sums, it runs as vectors.
uint64_t sum_of(const int32_t* weights, int n) {
  uint32_t low = 0, high = 0;
  for (int i = 0; i < n; ++i) {
    low += uint32_t(weights[i]) & 0x7fffu;
    high += uint32_t(weights[i]) >> 15;
  }
  return uint64_t(low) + (uint64_t(high) << 15);
}

// Weights of n logits, n at most kBlock, and their sum.
uint64_t weigh(const Draw& d, const float* l, int n, int32_t* weights) {
  float ratio[kBlock + kLanes];
  exp_all(l, n, d.max, d.inv_t, ratio);
  const F least = set1(d.min_p), one = set1(kWeightOne);
  for (int i = 0; i < n; i += kLanes) store(ratio + i, mul(select_gt(least, load(ratio + i), zero(), load(ratio + i)), one));
  for (int i = 0; i < n; ++i) weights[i] = int32_t(ratio[i]);
  return sum_of(weights, n);
}

// The n candidates that are left, in any order: step 8.
int32_t draw_from_candidates(const Draw& d, Candidate* c, int64_t n) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += c[i].weight;
  std::sort(c, c + n, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  uint64_t rest = threshold(d.bits, total);
  int64_t i = 0;
  for (; rest >= c[i].weight; ++i) rest -= c[i].weight;
  return c[i].id;
}

// Tokens that reach `bound`.
int64_t collect(const float* l, int64_t vocab, float bound, const Work& work) {
  int64_t n = 0;
  for (int64_t first = 0; first < vocab; first += kFine) {
    if (!(work.maxima[first / kFine] >= bound)) continue;
    for (int64_t i = first; i < std::min(vocab, first + kFine); ++i) {
      work.candidates[n] = {l[i], int32_t(i), 0};
      n += l[i] >= bound && l[i] > -kInf;
    }
  }
  return n;
}

void weigh_candidates(const Draw& d, Candidate* c, int64_t n) {
  float logits[kBlock];
  int32_t weights[kBlock];
  for (int64_t first = 0; first < n; first += kBlock) {
    const int part = int(std::min<int64_t>(kBlock, n - first));
    for (int i = 0; i < part; ++i) logits[i] = c[first + i].logit;
    weigh(d, logits, part, weights);
    for (int i = 0; i < part; ++i) c[first + i].weight = uint32_t(weights[i]);
  }
}

// A small top-k: no token below the k-th largest of the blocks' maxima can be among the first k.
int32_t draw_top_k(const Draw& d, const float* l, int64_t vocab, const Work& work) {
  const int64_t blocks = (vocab + kFine - 1) / kFine;
  float bound = -kInf;
  if (blocks >= d.top_k) {
    std::memcpy(work.selection, work.maxima, size_t(blocks) * 4);
    std::nth_element(work.selection, work.selection + d.top_k - 1, work.selection + blocks, [](float a, float b) { return a > b; });
    bound = work.selection[d.top_k - 1];
  }
  Candidate* c = work.candidates;
  int64_t n = shortest_prefix(c, collect(l, vocab, bound, work), uint64_t(d.top_k), false);
  weigh_candidates(d, c, n);
  if (d.top_p < 1.0f) {
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += c[i].weight;
    n = shortest_prefix(c, n, mass_needed(d.top_p, total), true);
  }
  return draw_from_candidates(d, c, n);
}

// Weights of all tokens, kept if `weights` is given, and their sums by kBlock tokens. Returns the total.
uint64_t weigh_all(const Draw& d, const float* l, int64_t vocab, int32_t* weights, uint64_t* sums) {
  int32_t dropped[kBlock];
  uint64_t total = 0;
  for (int64_t first = 0; first < vocab; first += kBlock) {
    const int n = int(std::min<int64_t>(kBlock, vocab - first));
    sums[first / kBlock] = weigh(d, l + first, n, weights ? weights + first : dropped);
    total += sums[first / kBlock];
  }
  return total;
}

// Step 8 over all tokens. Within the block that the sums point to, the weights are those given, or made again.
int32_t draw_by_sums(const Draw& d, const float* l, int64_t vocab, const int32_t* weights, const uint64_t* sums, uint64_t total) {
  uint64_t rest = threshold(d.bits, total);
  int64_t block = 0;
  for (; rest >= sums[block]; ++block) rest -= sums[block];
  const int64_t first = block * kBlock;
  int32_t again[kBlock];
  if (!weights) weigh(d, l + first, int(std::min<int64_t>(kBlock, vocab - first)), again);
  const int32_t* w = weights ? weights + first : again;
  int64_t i = 0;
  for (; rest >= uint32_t(w[i]); ++i) rest -= uint32_t(w[i]);
  return int32_t(first + i);
}

// The histogram's buckets run from the largest logit downwards; any monotone map would do.
void bucket_block(const Draw& d, const float* l, int n, int32_t* out) {
  const float scale = d.inv_t * kBucketsPerNat;
  for (int i = 0; i < n; ++i) {
    const float at = (d.max - l[i]) * scale;
    out[i] = int32_t(at < float(kBuckets - 1) ? at : float(kBuckets - 1));
  }
}

// Sets to 0 every weight that is not in the shortest prefix whose weights (or whose number of tokens) reach `need`, and
// returns the new total: the bucket in which the prefix ends is found by a histogram, the place in the bucket exactly.
uint64_t keep_prefix(const Draw& d, const float* l, int64_t vocab, uint64_t need, bool by_weight, const Work& work) {
  int32_t at[kBlock];
  std::memset(work.histogram, 0, kBuckets * 8);
  for (int64_t first = 0; first < vocab; first += kBlock) {
    const int n = int(std::min<int64_t>(kBlock, vocab - first));
    bucket_block(d, l + first, n, at);
    if (by_weight)
      for (int i = 0; i < n; ++i) work.histogram[at[i]] += uint32_t(work.weights[first + i]);
    else
      for (int i = 0; i < n; ++i) work.histogram[at[i]] += 1;
  }
  int edge = 0;
  uint64_t have = 0;
  for (; edge < kBuckets - 1 && have + work.histogram[edge] < need; ++edge) have += work.histogram[edge];
  // In the last bucket no token has a weight: an edge there takes in all that have.

  int64_t found = 0;
  uint64_t total = 0;
  for (int64_t first = 0; first < vocab; first += kBlock) {
    const int n = int(std::min<int64_t>(kBlock, vocab - first));
    int32_t* w = work.weights + first;
    bucket_block(d, l + first, n, at);
    unsigned any = 0;
    for (int i = 0; i < n; ++i) any |= unsigned(at[i] == edge);
    for (int i = 0; i < n && any && edge < kBuckets - 1; ++i)
      if (at[i] == edge) work.candidates[found++] = {l[first + i], int32_t(first + i), uint32_t(w[i])};
    for (int i = 0; i < n; ++i) w[i] = at[i] < edge ? w[i] : 0;
    work.sums[first / kBlock] = sum_of(w, n);
    total += work.sums[first / kBlock];
  }
  const int64_t kept = shortest_prefix(work.candidates, found, need - have, by_weight);
  for (int64_t i = 0; i < kept; ++i) {
    const Candidate& c = work.candidates[i];
    work.weights[c.id] = int32_t(c.weight);
    work.sums[c.id / kBlock] += c.weight;
    total += c.weight;
  }
  return total;
}

// Whether few tokens reach `bound`, and their weights reach `need`.
bool few_hold(uint64_t need, const float* l, int64_t vocab, float bound, const Work& work) {
  int64_t count = 0;
  uint64_t mass = 0;
  for (int64_t first = 0; first < vocab && count <= kFewCandidates; first += kFine) {
    if (!(work.maxima[first / kFine] >= bound)) continue;
    const int n = int(std::min<int64_t>(kFine, vocab - first));
    int32_t w[kFine], found = 0;
    for (int i = 0; i < n; ++i) {
      const int32_t is = l[first + i] >= bound;
      found += is;
      w[i] = work.weights[first + i] & -is;
    }
    count += found;
    mass += sum_of(w, n);
  }
  return count <= kFewCandidates && mass >= need;
}

// Top-p without a small top-k. Mostly a few tokens hold the mass: then nothing else is looked at.
int32_t draw_top_p(const Draw& d, const float* l, int64_t vocab, const Work& work) {
  uint64_t total = weigh_all(d, l, vocab, work.weights, work.sums);
  if (d.top_k > 0) total = keep_prefix(d, l, vocab, uint64_t(d.top_k), false, work);
  if (d.top_p < 1.0f) {
    const uint64_t need = mass_needed(d.top_p, total);
    const float bound = d.max - kLikelyNats / d.inv_t;
    if (d.top_k == 0 && few_hold(need, l, vocab, bound, work)) {
      Candidate* c = work.candidates;
      const int64_t n = collect(l, vocab, bound, work);
      for (int64_t i = 0; i < n; ++i) c[i].weight = uint32_t(work.weights[c[i].id]);
      return draw_from_candidates(d, c, shortest_prefix(c, n, need, true));
    }
    total = keep_prefix(d, l, vocab, need, true, work);
  }
  return draw_by_sums(d, l, vocab, work.weights, work.sums, total);
}

int32_t choose(const SampleRow& r, int64_t vocab, float max_l, const Work& work) {
  if (!(r.temperature >= kGreedyBelow)) return first_of(r.logits, vocab, max_l, work.maxima);
  // Not 0 for an infinite temperature: a logit of -inf must stay out.
  const float inv_t = std::max(1.0f / r.temperature, std::numeric_limits<float>::min());
  Draw d{max_l, inv_t, r.min_p < 1.0f ? r.min_p : 1.0f, r.top_k, r.top_p, uniform_bits(r.seed, r.position)};
  if (d.top_k < 0 || d.top_k >= vocab) d.top_k = 0;
  if (d.top_k > 0 && d.top_k <= kSmallTopK) return draw_top_k(d, r.logits, vocab, work);
  if (d.top_k > 0 || d.top_p < 1.0f) return draw_top_p(d, r.logits, vocab, work);
  const uint64_t total = weigh_all(d, r.logits, vocab, nullptr, work.sums);
  return draw_by_sums(d, r.logits, vocab, nullptr, work.sums, total);
}

// log(sum(exp(l - max))), the sum in eight fixed double partial sums
float log_sum(const float* l, int64_t vocab, float max_l) {
  float buffer[kBlock + kLanes];
  double sums[8] = {};
  for (int64_t first = 0; first < vocab; first += kBlock) {
    const int n = int(std::min<int64_t>(kBlock, vocab - first));
    exp_all(l + first, n, max_l, 1.0f, buffer);
    for (int i = n; i % 8 != 0; ++i) buffer[i] = 0.0f;
    for (int i = 0; i < n; i += 8)
      for (int j = 0; j < 8; ++j) sums[j] += double(buffer[i + j]);
  }
  double total = 0;
  for (int j = 0; j < 8; ++j) total += sums[j];
  return float(std::log(total));
}

struct LogprobOut {
  float* logprob;
  int32_t* rank;
  int32_t* top_ids;
  float* top_logprobs;
  int32_t num_top;
};

// The `num` largest logits, descending, ties by id; what is missing (-inf is never listed) stays id -1.
void top_logits(const float* l, int64_t vocab, int32_t num, int32_t* ids, float* values) {
  for (int32_t i = 0; i < num; ++i) ids[i] = -1, values[i] = -kInf;
  if (num <= 0) return;
  for (int64_t first = 0; first < vocab; first += kFine) {
    const int64_t end = std::min(vocab, first + kFine);
    float m = -kInf;
    for (int64_t i = first; i + kLanes <= end; i += kLanes) {
      const float top = reduce_max(load(l + i));
      m = top > m ? top : m;
    }
    for (int64_t i = first + (end - first) / kLanes * kLanes; i < end; ++i) m = l[i] > m ? l[i] : m;
    if (!(m > values[num - 1])) continue;
    for (int64_t i = first; i < end; ++i) {
      if (!(l[i] > values[num - 1])) continue;
      int32_t at = num - 1;
      for (; at > 0 && l[i] > values[at - 1]; --at) ids[at] = ids[at - 1], values[at] = values[at - 1];
      ids[at] = int32_t(i);
      values[at] = l[i];
    }
  }
}

void no_logprobs(const LogprobOut& out) {
  *out.logprob = kFloor;
  *out.rank = 0;
  for (int32_t i = 0; i < out.num_top; ++i) out.top_ids[i] = -1, out.top_logprobs[i] = kFloor;
}

void row_logprobs(const float* l, int64_t vocab, int32_t target, const LogprobOut& out) {
  const Extent e = scan(l, vocab, nullptr);
  if (e.bad || !(e.max > -kInf)) return no_logprobs(out);
  const float rest = log_sum(l, vocab, e.max);
  const auto logprob = [&](float value) { return std::max(kFloor, (value - e.max) - rest); };
  top_logits(l, vocab, out.num_top, out.top_ids, out.top_logprobs);
  for (int32_t i = 0; i < out.num_top; ++i) out.top_logprobs[i] = logprob(out.top_logprobs[i]);
  *out.logprob = kFloor;
  *out.rank = 0;
  if (!in_vocab(target, vocab)) return;
  const float value = l[target];
  int32_t larger = 0;
  for (int64_t i = 0; i < vocab; ++i) larger += l[i] > value;
  *out.logprob = logprob(value);
  *out.rank = larger + 1;
}

void sample_row(const SampleRow& r, SampleResult& result, int64_t vocab, const Work& work) {
  const LogprobOut out{&result.logprob, &result.rank, result.top_ids, result.top_logprobs, std::max(0, r.num_logprobs)};
  no_logprobs(out);
  result.token = -1;
  Extent e = scan(r.logits, vocab, work.maxima);
  if (e.bad || !(e.max > -kInf)) return;
  const float* raw = r.logits;
  if (r.num_logprobs >= 0) {
    std::memcpy(work.raw, r.logits, size_t(vocab) * 4);
    raw = work.raw;
  }
  if (adjust(r, vocab, work)) {
    e = scan(r.logits, vocab, work.maxima);
    if (e.bad || !(e.max > -kInf)) return;
  }
  result.token = choose(r, vocab, e.max, work);
  if (r.num_logprobs >= 0) row_logprobs(raw, vocab, result.token, out);
}

}  // namespace

size_t sample_scratch(int64_t vocab) { return Work{}.layout(vocab, nullptr); }

void sample(const SampleArgs& args, int ith, int nth) {
  Work work{};
  work.layout(args.vocab, args.scratch);
  for (int64_t row = ith; row < args.rows; row += nth) sample_row(args.in[row], args.out[row], args.vocab, work);
}

void logprobs(const LogprobArgs& args, int ith, int nth) {
  for (int64_t row = ith; row < args.rows; row += nth) {
    const int64_t at = row * args.num_top;
    const LogprobOut out{args.logprob + row, args.rank + row, args.top_ids + at, args.top_logprobs + at, args.num_top};
    row_logprobs(args.logits + row * args.ld, args.vocab, args.target[row], out);
  }
}

}  // namespace octavo::OCTAVO_NS
