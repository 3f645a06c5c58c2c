#include "threads.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Some microseconds: longer than the gap that a balanced instruction leaves. Then the CPU is offered to others at each look (which costs next to
// nothing when nobody wants it): the thread that is waited for may need this very CPU, and where it shares one with the waiting thread,
// every further spin is added to every instruction.
constexpr int kBarrierSpins = 256;
// Between two steps a worker waits for Python, some 100 microseconds: it spins that long before it sleeps.
constexpr int kIdleSpins = 1 << 14;

std::vector<int> affinity() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int i = 0; i < CPU_SETSIZE; ++i)
      if (CPU_ISSET(i, &set)) cpus.push_back(i);
#endif
  if (cpus.empty())
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) cpus.push_back(int(i));
  return cpus;
}

void pin_to(int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // refused in some sandboxes: then the thread floats
#else
  (void)cpu;
#endif
}

double cgroup_cpus() {
  double quota = 0, period = 0;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2) {
    std::string first;
    if (v2 >> first >> period; first != "max" && period > 0) return std::strtod(first.c_str(), nullptr) / period;
  }
  std::ifstream q("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), p("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (q >> quota && p >> period && quota > 0 && period > 0) return quota / period;
  return 1e9;
}

}  // namespace

int available_cpus() {
  const double limit = std::min<double>(double(affinity().size()), std::ceil(cgroup_cpus()));
  return std::max(1, int(limit));
}

void Barrier::wait() {
  if (n_ == 1) return;
  const unsigned generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    return;
  }
  int spins = 0;
  while (generation_.load(std::memory_order_acquire) == generation) {
    relax();
    // The other thread may wait for this very CPU (a busy or a smaller machine): let it have it.
    if (++spins >= kBarrierSpins) std::this_thread::yield();
  }
}

ThreadPool::ThreadPool(int n, bool pin) : n_(std::max(1, n)) {
  const std::vector<int> cpus = affinity();
  const bool bind = pin && int(cpus.size()) >= n_;
  for (int i = 1; i < n_; ++i) threads_.emplace_back(&ThreadPool::worker, this, i, bind ? cpus[size_t(i)] : -1);
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int, int)>& fn) {
  std::lock_guard<std::mutex> turn(run_mutex_);
  if (n_ == 1) return fn(0, 1);
  job_ = &fn;
  pending_.store(n_ - 1, std::memory_order_relaxed);
  // Sequentially consistent on both sides: a worker either sees the new epoch before it sleeps or is counted as a sleeper.
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  fn(0, n_);
  int spins = 0;
  while (pending_.load(std::memory_order_acquire) > 0) {
    relax();
    if (++spins >= kBarrierSpins) std::this_thread::yield();
  }
}

void ThreadPool::worker(int index, int cpu) {
  if (cpu >= 0) pin_to(cpu);
  unsigned seen = 0;
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen && ++spins < kIdleSpins) relax();
    if (epoch_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    (*job_)(index, n_);
    pending_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace octavo
