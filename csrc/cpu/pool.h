// A team of threads that run one program together. Operations are separated by barriers, not by fork and join.
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

  // Runs task(argument, thread) on every thread and waits for all; the caller is thread 0. One run at a time.
  void run(void (*task)(void*, int), void* argument);

  // Inside a run: waits until every thread has arrived. Between two barriers, Turns gives out each number once.
  void barrier(int thread);

  // Number of a thread's items taken since the last barrier.
  std::atomic<int64_t>& taken(int thread) { return shares_[thread].taken[generation_.load(std::memory_order_relaxed) & 1]; }

  // Memory of one thread that stays allocated between runs; its contents do not. Null when the system has none.
  void* scratch(int thread, size_t bytes);

  // Memory shared by all threads; call it before the run.
  void* shared(size_t bytes) { return grown(shared_, bytes); }
  void* plan_memory(size_t bytes) { return grown(plan_, bytes); }

 private:
  void work(int thread);
  void end_threads();

  // Two counters, used alternately. While one is in use, each thread clears its other one, which no thread reads until
  // the next barrier.
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

// Gives the numbers 0 to items - 1 to threads, each number once. A thread has its own share; a thread that is done
// takes from the shares of slower ones (work stealing: Blumofe and Leiserson, 1999). Every thread makes its own Turns,
// once between two barriers.
class Turns {
 public:
  // CONTIGUOUS shares read consecutive memory. Their first half is reserved for the owner: it needs no atomic
  // operation, and with two threads no one waits until the other is three times as slow. SPREAD shares suit work that
  // is sorted by cost.
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

  // The result of take() if it were called now; another thread may take it first.
  int64_t peek() {
    if (mine_ > 0) return first_ + (kept_ - mine_) * step_;
    for (; left_ > 0; left_--, share_ = share_ + 1 < threads_ ? share_ + 1 : 0, look()) {
      const int64_t i = kept_ + pool_.taken(share_).load(std::memory_order_relaxed);
      if (i < size_) return first_ + i * step_;
    }
    return items_;
  }

  // Number of items of contiguous shares left for all threads when one has reached `item`, if all threads are equally
  // fast.
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
  int64_t share_, left_;                // the share to take from; and the number of shares not yet found empty
  int64_t first_, step_, size_, kept_;  // numbers of that share, and how many of them are reserved for its owner
  int64_t mine_;                        // reserved numbers of this thread's share that are not taken
};
