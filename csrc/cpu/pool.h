// A team of threads that walks one program together: no fork and join per operation, only barriers.
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

  // Run task(argument, thread) on every thread and wait for all; the caller is thread 0. One run at a time.
  void run(void (*task)(void*, int), void* argument);

  // Inside a run: wait until every thread has come here. Between two of these, Turns hands out numbers once.
  void barrier(int thread);

  // How many numbers of a thread's share are taken since the last barrier.
  std::atomic<int64_t>& taken(int thread) { return shares_[thread].taken[generation_.load(std::memory_order_relaxed) & 1]; }

  // Memory of one thread that outlives the run; its contents don't. Null when the system has none.
  void* scratch(int thread, size_t bytes);

  // The same, for all threads together: call them before the run.
  void* shared(size_t bytes) { return grown(shared_, bytes); }
  void* plan_memory(size_t bytes) { return grown(plan_, bytes); }

 private:
  void work(int thread);
  void end_threads();

  // By turns: while one is in use, each thread clears the other of its own, which nobody looks at until the next barrier.
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

// Numbers 0 to items - 1, each given to one thread only. A thread has a share of its own; whoever is done takes what slower
// threads have left of theirs (work stealing: Blumofe and Leiserson, 1999). Every thread makes its own of these, once between
// two barriers.
class Turns {
 public:
  // CONTIGUOUS shares make one long read of what lies in order. Half of one nobody else may take: no need to ask then, and
  // of two threads none waits until the other is three times as slow. SPREAD ones suit work sorted by what it costs.
  enum Shares { CONTIGUOUS, SPREAD };

  Turns(cl_pool& pool, int thread, int64_t items, Shares shares)
      : pool_(pool), items_(items), threads_(pool.num_threads()), shares_(shares), share_(thread), left_(threads_) {
    look();
    mine_ = kept_;
  }

  // The first number of a contiguous share.
  static int64_t begin(int64_t items, int64_t share, int64_t threads) { return items * share / threads; }

  // The next number, or `items` when none is left.
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

  // What take() would return now; another thread may still be faster.
  int64_t peek() {
    if (mine_ > 0) return first_ + (kept_ - mine_) * step_;
    for (; left_ > 0; left_--, share_ = share_ + 1 < threads_ ? share_ + 1 : 0, look()) {
      const int64_t i = kept_ + pool_.taken(share_).load(std::memory_order_relaxed);
      if (i < size_) return first_ + i * step_;
    }
    return items_;
  }

  // How many of contiguous shares are left for all threads when one has come to `item`, if all are equally fast.
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
  int64_t share_, left_;                // the share to take from, and how many have not been found empty
  int64_t first_, step_, size_, kept_;  // of that share: its numbers, and how many of them are its thread's alone
  int64_t mine_;                        // of this thread's own, not taken yet
};
