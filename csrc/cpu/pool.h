// Threads that run one program together. Each thread runs every operation on its part of the data, and waits at a
// barrier between two operations. So threads are not started and joined for each operation.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "chairlift_cpu.h"

struct cl_pool {
 public:
  static constexpr int kMaxThreads = 256;

  cl_pool(int num_threads, bool pin);
  ~cl_pool();
  cl_pool(const cl_pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs task(argument, thread) on every thread and waits until all are done. The caller is thread 0. Concurrent calls
  // run one after another.
  void run(void (*task)(void*, int), void* argument);

  // Waits until every thread of the run has called it. The item counters of Turns begin at 0 again.
  void barrier(int thread);

  // Number of items taken from this thread's share since the last barrier, by any thread.
  std::atomic<int64_t>& taken(int thread) { return shares_[thread].taken[generation_.load(std::memory_order_relaxed) & 1]; }

  // Scratch memory of one thread, of at least `bytes` bytes, or null if the system has none. It stays allocated between
  // runs, but its contents may change.
  void* scratch(int thread, size_t bytes);

  // Memory that all threads of a run share. Call this before the run starts.
  void* shared(size_t bytes) { return grown(shared_, bytes); }
  void* plan_memory(size_t bytes) { return grown(plan_, bytes); }

 private:
  void work(int thread);
  void end_threads();

  // Two counters, used alternately: each barrier switches to the other one. A thread clears its unused counter when it
  // arrives at a barrier, before any thread can read that counter.
  struct alignas(64) Share {
    std::atomic<int64_t> taken[2] = {};
  };

  struct alignas(64) Scratch {
    void* memory = nullptr;
    size_t bytes = 0;
  };

  static void* grown(Scratch& scratch, size_t bytes);

  const int num_threads_;
  bool pin_;
  int processors_[kMaxThreads];
  std::mutex one_run_;
  void (*task_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  bool stop_ = false;
  Scratch scratch_[kMaxThreads], shared_, plan_;
  std::thread threads_[kMaxThreads];
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> asleep_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> waiting_{0};
  alignas(64) std::atomic<int32_t> arrived_{0};
  Share shares_[kMaxThreads];
};

// Distributes the items 0 to items - 1 among threads: each item goes to one thread. Each thread has a share of the
// items. A thread whose share is empty takes items from the shares of other threads (work stealing: Blumofe and
// Leiserson, 1999). Each thread makes its own Turns object, at most one between two barriers.
class Turns {
 public:
  // CONTIGUOUS: a share is a range of items, so that a thread reads consecutive memory. The first half of a share is
  // reserved for its own thread, which takes those items without an atomic operation. With two threads, neither waits
  // unless the other is more than three times as slow. SPREAD: a share is every threads-th item, and nothing is
  // reserved. This suits items that are sorted by cost.
  enum Shares { CONTIGUOUS, SPREAD };

  Turns(cl_pool& pool, int thread, int64_t items, Shares shares)
      : pool_(pool), items_(items), threads_(pool.num_threads()), shares_(shares), share_(thread), left_(threads_) {
    look();
    mine_ = kept_;
  }

  // First item of the contiguous share number `share`.
  static int64_t begin(int64_t items, int64_t share, int64_t threads) { return items * share / threads; }

  // Takes the next item and returns it, or `items` if there is none left.
  int64_t take() {
    for (;;) {
      const int64_t number = peek();
      if (number == items_) return items_;
      if (mine_ > 0) {
        mine_--;
        return number;
      }
      const int64_t i = kept_ + pool_.taken(share_).fetch_add(1, std::memory_order_relaxed);
      if (i < size_) return first_ + i * step_;
    }
  }

  // Returns the item that take() would return now. Another thread may take that item before this thread does.
  int64_t peek() {
    if (mine_ > 0) return first_ + (kept_ - mine_) * step_;
    for (; left_ > 0; left_--, share_ = share_ + 1 < threads_ ? share_ + 1 : 0, look()) {
      const int64_t i = kept_ + pool_.taken(share_).load(std::memory_order_relaxed);
      if (i < size_) return first_ + i * step_;
    }
    return items_;
  }

  // Estimated number of items that no thread has taken yet, when one thread has reached `item` of its own contiguous
  // share. Assumes that all threads are equally fast.
  int64_t left(int64_t item) const {
    const int64_t share = ((item + 1) * threads_ - 1) / items_;
    return (begin(items_, share + 1, threads_) - item) * threads_;
  }

 private:
  void look() {
    first_ = shares_ == CONTIGUOUS ? begin(items_, share_, threads_) : share_;
    step_ = shares_ == CONTIGUOUS ? 1 : threads_;
    size_ = shares_ == CONTIGUOUS ? begin(items_, share_ + 1, threads_) - first_ : (items_ - share_ + threads_ - 1) / threads_;
    kept_ = shares_ == CONTIGUOUS ? size_ / 2 : 0;
  }

  cl_pool& pool_;
  const int64_t items_, threads_;
  const Shares shares_;
  int64_t share_, left_;  // index of the share to take from; number of shares that this thread has not found empty
  // The share from which this thread now takes items: its first item, the distance between its items, its number of
  // items, and the number of items reserved for the thread that owns the share.
  int64_t first_, step_, size_, kept_;
  int64_t mine_;  // number of reserved items of this thread's own share that it has not taken yet
};
