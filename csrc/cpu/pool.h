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

  // Inside a run: wait until every thread has come here. Then next() starts again.
  void barrier();

  // Inside a run: a thread begins with the work of its own number, so that it can be fetched beforehand, and goes on with
  // the numbers behind those of all threads, each given to one thread only, so that a slow thread takes less work.
  int64_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // Memory of one thread that outlives the run; its contents don't. Null when the system has none.
  void* scratch(int thread, size_t bytes);

  // The same, for all threads together: call them before the run.
  void* shared(size_t bytes) { return grown(shared_, bytes); }
  void* plan_memory(size_t bytes) { return grown(plan_, bytes); }

 private:
  void work(int thread);
  void end_threads();

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
  alignas(64) std::atomic<int64_t> next_{num_threads_};
};
