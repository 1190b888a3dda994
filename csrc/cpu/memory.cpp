// Memory for the kernels. It is zeroed, and on huge pages if the system has them. Pages are allocated at their first
// use.
#include <sys/mman.h>
#include <unistd.h>

#include "chairlift_cpu.h"
#include "system.h"

namespace {

constexpr size_t kHugePage = size_t(2) << 20;

size_t mapped_bytes(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

void* cl_alloc(size_t bytes) {
  if (bytes == 0) return nullptr;
  size_t size = mapped_bytes(bytes);
  // Maps one page more than needed, so that an aligned range fits in the mapping.
  char* whole = static_cast<char*>(
      mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (whole == MAP_FAILED) return nullptr;
  char* start = whole + (kHugePage - reinterpret_cast<uintptr_t>(whole) % kHugePage) % kHugePage;
  if (start > whole) munmap(whole, start - whole);
  size_t tail = whole + size + kHugePage - (start + size);
  if (tail > 0) munmap(start + size, tail);
  cl_system::use_huge_pages(start, size);
  return start;
}

void cl_free(void* memory, size_t bytes) {
  if (memory) munmap(memory, mapped_bytes(bytes));
}

void cl_release_pages(const void* memory, size_t bytes) {
  uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), start = reinterpret_cast<uintptr_t>(memory), end = start + bytes;
  start = (start + page - 1) / page * page;
  end = end / page * page;
  if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
}
