// Linux: futexes, affinity masks and transparent huge pages.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../system.h"

namespace cl_system {

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

// Other processes change the word, so the calls are not the private ones.
void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t value, long nanoseconds) {
  const timespec pause = {0, nanoseconds};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &pause, nullptr, 0);
}

void wake_all_shared(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

// The mask has the layout of cpu_set_t: words of 64 bits on the 64-bit systems that have kernels.
bool Processors::of_this_thread() {
  return pthread_getaffinity_np(pthread_self(), sizeof mask, reinterpret_cast<cpu_set_t*>(mask)) == 0;
}

void Processors::pin() const {
  pthread_setaffinity_np(pthread_self(), sizeof mask, reinterpret_cast<const cpu_set_t*>(mask));
}

int Processors::list(int* numbers, int most) const {
  int found = 0;
  for (int processor = 0; processor < kMost && found < most; processor++)
    if (mask[processor / 64] >> processor % 64 & 1) numbers[found++] = processor;
  return found;
}

void pin_to(int processor) {
  Processors one;
  one.mask[processor / 64] = uint64_t(1) << processor % 64;
  one.pin();
}

void use_huge_pages(void* memory, size_t bytes) { madvise(memory, bytes, MADV_HUGEPAGE); }

}  // namespace cl_system
