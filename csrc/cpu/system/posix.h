// Systems other than Linux, macOS among them: a condition variable for all words, no affinity, no huge pages.
//
// macOS has calls like futexes, but only since macOS 14.4, and it lets no program choose the processor of a thread.
#pragma once
#include <time.h>

#include <condition_variable>
#include <mutex>

#include "../system.h"

namespace cl_system {

namespace {

// Words of all pools share one condition variable. A thread that wakes for another pool's word sleeps again.
struct Sleepers {
  std::mutex mutex;
  std::condition_variable changed;
};

// It is never destroyed, because threads of a pool may still sleep when the process ends.
Sleepers& sleepers() {
  static Sleepers& all = *new Sleepers;
  return all;
}

}  // namespace

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  std::unique_lock<std::mutex> guard(sleepers().mutex);
  while (word.load() == value) sleepers().changed.wait(guard);
}

// The caller changed the word before it takes the mutex. So a thread that saw the old word holds the mutex until it
// sleeps, and hears of the change.
void wake_all(std::atomic<uint32_t>&) {
  { std::lock_guard<std::mutex> guard(sleepers().mutex); }
  sleepers().changed.notify_all();
}

// No POSIX call sleeps on a word of another process, so a thread looks again after a millisecond, and nobody wakes it.
void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t value, long nanoseconds) {
  const timespec pause = {0, nanoseconds < 1000 * 1000 ? nanoseconds : 1000 * 1000};
  if (word.load() == value) nanosleep(&pause, nullptr);
}

void wake_all_shared(std::atomic<uint32_t>&) {}

bool Processors::of_this_thread() { return false; }

void Processors::pin() const {}

int Processors::list(int*, int) const { return 0; }

void pin_to(int) {}

void use_huge_pages(void*, size_t) {}

}  // namespace cl_system
