// A pool of persistent threads that run one function together: thread i is called with (i, n).
// Waiting threads spin briefly (a step has hundreds of instructions, microseconds apart), then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// A barrier for the threads of one run; the last arrival opens it. Spins, then yields.
class Barrier {
 public:
  explicit Barrier(int n) : n_(n) {}
  void wait();

 private:
  const int n_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> generation_{0};
};

class ThreadPool {
 public:
  // n threads, the caller's among them; with `pin`, each is bound to one CPU of the process's affinity mask.
  explicit ThreadPool(int n, bool pin = false);
  ~ThreadPool();
  int size() const { return n_; }
  // Runs fn(i, n) on every thread, the caller as thread 0, and returns when all are done. fn must not throw.
  void run(const std::function<void(int, int)>& fn);

 private:
  void worker(int index, int cpu);
  const int n_;
  std::vector<std::thread> threads_;
  const std::function<void(int, int)>* job_ = nullptr;
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> pending_{0};
  std::atomic<bool> stop_{false};
  std::mutex run_mutex_;  // the callers' turn: two Python threads may step two engines
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
};

// CPUs that this process may use: the affinity mask and the cgroup's quota (v1 and v2), at least 1.
int available_cpus();

}  // namespace octavo
