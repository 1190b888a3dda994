// What operating systems do differently: threads that sleep and wake, processors to which threads are pinned, and pages
// of memory. system/linux.h is for Linux. system/posix.h is for every other system; it uses POSIX functions only.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>

namespace cl_system {

// Sleeps while `word` has the `value`. It may also return earlier.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value);
// Wakes all threads that sleep because of `word`. The caller has changed the word.
void wake_all(std::atomic<uint32_t>& word);

// The same for a word in memory that processes share. A thread sleeps for at most `nanoseconds`, below one second.
void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t value, long nanoseconds);
void wake_all_shared(std::atomic<uint32_t>& word);

// Processors on which a thread may run.
struct Processors {
  // Maximum number of processors that Linux supports. Linux refuses to fill a mask that is too small for the machine.
  static constexpr int kMost = 8192;
  uint64_t mask[kMost / 64] = {};  // bit i: processor i

  // Reads the processors of the calling thread. Returns false if the system does not pin threads.
  bool of_this_thread();
  // Lets the calling thread run on these processors only.
  void pin() const;
  // Writes the numbers of the first `most` processors, and returns how many it wrote.
  int list(int* numbers, int most) const;
};

// Lets the calling thread run on one processor only, if the system pins threads.
void pin_to(int processor);

// Asks the system to back memory with huge pages. Without them, small pages are used.
void use_huge_pages(void* memory, size_t bytes);

}  // namespace cl_system
