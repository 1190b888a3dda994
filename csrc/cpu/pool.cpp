#include "pool.h"

#include <chrono>
#include <new>

#include "isa/processor.h"
#include "system.h"

using cl_system::Processors;

namespace {

// Time that a thread waits actively before it sleeps. It is longer than threads wait for each other inside a step, and
// far shorter than the pause between two requests of an idle server. A clock measures it, because a pause instruction
// takes 40 cycles on one processor and 140 on another.
constexpr std::chrono::microseconds kSpinning{50};
constexpr int kPausesPerLook = 32;

// Waits until `word` differs from `value`. The waiting thread first increments `sleepers`, then checks the word again.
// The waking thread first changes the word, then checks `sleepers`. So no wake-up is lost.
void wait_for_change(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, uint32_t value) {
  const auto start = std::chrono::steady_clock::now();
  for (int spin = 1; spin % kPausesPerLook || std::chrono::steady_clock::now() - start < kSpinning; spin++) {
    if (word.load(std::memory_order_acquire) != value) return;
    pause_processor();
  }
  sleepers.fetch_add(1);
  while (word.load() == value) cl_system::sleep_while(word, value);
  sleepers.fetch_sub(1);
}

}  // namespace

cl_pool::cl_pool(int num_threads, bool pin) : num_threads_(num_threads), pin_(pin) {
  Processors allowed;
  pin_ = pin_ && allowed.of_this_thread();
  const int found = allowed.list(processors_, num_threads_);
  for (int i = found; i < num_threads_; i++) processors_[i] = processors_[found ? i % found : 0];
  try {
    for (int thread = 1; thread < num_threads_; thread++) threads_[thread] = std::thread(&cl_pool::work, this, thread);
  } catch (...) {  // a thread could not be started: ends the started threads, because no destructor runs
    end_threads();
    throw;
  }
}

cl_pool::~cl_pool() {
  end_threads();
  for (Scratch& scratch : scratch_) cl_free(scratch.memory, scratch.bytes);
  for (Scratch* scratch : {&shared_, &plan_}) cl_free(scratch->memory, scratch->bytes);
}

void cl_pool::end_threads() {
  stop_ = true;
  epoch_.fetch_add(1);
  cl_system::wake_all(epoch_);
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.join();
}

void cl_pool::work(int thread) {
  if (pin_) cl_system::pin_to(processors_[thread]);
  for (uint32_t epoch = 0;; epoch++) {
    wait_for_change(epoch_, asleep_, epoch);
    if (stop_) return;
    task_(argument_, thread);
    barrier(thread);
  }
}

void cl_pool::run(void (*task)(void*, int), void* argument) {
  std::lock_guard<std::mutex> guard(one_run_);
  Processors before;
  // The caller is pinned only during a run, because threads that Python starts from it would inherit the pinning.
  bool pinned = pin_ && before.of_this_thread();
  if (pinned) cl_system::pin_to(processors_[0]);
  task_ = task;
  argument_ = argument;
  epoch_.fetch_add(1);
  if (asleep_.load() > 0) cl_system::wake_all(epoch_);
  task(argument, 0);
  barrier(0);
  if (pinned) before.pin();
}

void cl_pool::barrier(int thread) {
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  shares_[thread].taken[(generation + 1) & 1].store(0, std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1);
    if (waiting_.load() > 0) cl_system::wake_all(generation_);
  } else {
    wait_for_change(generation_, waiting_, generation);
  }
}

void* cl_pool::grown(Scratch& scratch, size_t bytes) {
  if (scratch.bytes < bytes) {
    cl_free(scratch.memory, scratch.bytes);
    scratch.memory = cl_alloc(bytes);
    scratch.bytes = scratch.memory ? bytes : 0;
  }
  return scratch.memory;
}

void* cl_pool::scratch(int thread, size_t bytes) { return grown(scratch_[thread], bytes); }

extern "C" cl_pool* cl_pool_create(int32_t num_threads, int32_t pin) {
  if (num_threads < 1 || num_threads > cl_pool::kMaxThreads) return nullptr;
  try {
    return new (std::nothrow) cl_pool(num_threads, pin != 0);
  } catch (...) {
    return nullptr;  // a thread could not be started
  }
}

extern "C" void cl_pool_destroy(cl_pool* pool) { delete pool; }
