// Fails one allocation of at least `least` bytes, after `skip` others. Loaded with LD_PRELOAD.
//
// The functions of the C library that allocate memory are replaced. They behave as usual until fail_arm() is called.

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace {

std::atomic<long> remaining{-1};         // allocations until the one that fails; negative: none fails
std::atomic<long> seen{0};               // allocations of at least `least` bytes since fail_arm()
std::atomic<long> failed{0};             // 1 after the allocation has failed
std::atomic<std::size_t> least{SIZE_MAX};

bool refuses(std::size_t size) {
  if (size < least.load(std::memory_order_relaxed)) return false;
  seen++;
  if (remaining.load() < 0 || remaining.fetch_sub(1) != 0) return false;
  failed++;
  errno = ENOMEM;
  return true;
}

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

alignas(16) char early[1 << 16];  // memory for dlsym(), which calls calloc() itself
std::size_t used = 0;

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void fail_arm(std::size_t size, long skip) {
  seen = 0;
  failed = 0;
  remaining = skip;
  least = size;
}

EXPORTED void fail_disarm() {
  least = SIZE_MAX;
  remaining = -1;
}

EXPORTED long fail_seen() { return seen; }

EXPORTED long fail_failed() { return failed; }

EXPORTED void* malloc(std::size_t size) {
  static auto next = real<void* (*)(std::size_t)>("malloc");
  return refuses(size) ? nullptr : next(size);
}

EXPORTED void* calloc(std::size_t count, std::size_t size) {
  static void* (*next)(std::size_t, std::size_t) = nullptr;
  static bool looks = false;
  if (next == nullptr) {
    if (looks) {
      void* found = early + used;
      used += (count * size + 15) / 16 * 16;
      return found;
    }
    looks = true;
    next = real<void* (*)(std::size_t, std::size_t)>("calloc");
  }
  return refuses(count * size) ? nullptr : next(count, size);
}

EXPORTED void* realloc(void* given, std::size_t size) {
  static auto next = real<void* (*)(void*, std::size_t)>("realloc");
  return refuses(size) ? nullptr : next(given, size);
}

EXPORTED int posix_memalign(void** found, std::size_t alignment, std::size_t size) {
  static auto next = real<int (*)(void**, std::size_t, std::size_t)>("posix_memalign");
  return refuses(size) ? ENOMEM : next(found, alignment, size);
}

EXPORTED void* aligned_alloc(std::size_t alignment, std::size_t size) {
  static auto next = real<void* (*)(std::size_t, std::size_t)>("aligned_alloc");
  return refuses(size) ? nullptr : next(alignment, size);
}

EXPORTED void* mmap(void* address, std::size_t size, int protection, int flags, int file, off_t offset) {
  static auto next = real<void* (*)(void*, std::size_t, int, int, int, off_t)>("mmap");
  if ((flags & MAP_ANONYMOUS) && refuses(size)) return MAP_FAILED;
  return next(address, size, protection, flags, file, offset);
}
