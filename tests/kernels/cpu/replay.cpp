// Makes recorded calls of the kernels again (see recorded_calls.py), with the best path of this processor, and compares
// the memory that they leave behind bit by bit. Arguments: files of calls. Prints a line for each file that differs, and
// a count and the path (a cl_isa) at the end; the exit code is 1 if any differs.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <string>
#include <vector>

#include "chairlift_cpu.h"

struct Region {
  std::vector<char> memory;
  int64_t offset, element, scratch, size;
  char* at() { return memory.data() + offset; }
};

struct File {
  std::vector<char> content;
  size_t at = 0;
  int64_t number() {
    int64_t value;
    copy(&value, 8);
    return value;
  }
  void copy(void* to, size_t bytes) {
    if (at + bytes > content.size()) {
      fprintf(stderr, "a file is too short\n");
      exit(2);
    }
    memcpy(to, content.data() + at, bytes);
    at += bytes;
  }
};

static File read(const char* path) {
  FILE* stream = fopen(path, "rb");
  if (!stream) {
    perror(path);
    exit(2);
  }
  File file;
  fseek(stream, 0, SEEK_END);
  file.content.resize(size_t(ftell(stream)));
  rewind(stream);
  if (fread(file.content.data(), 1, file.content.size(), stream) != file.content.size()) exit(2);
  fclose(stream);
  return file;
}

static bool is_nan(const char* at, int64_t element) {
  uint32_t bits = 0;
  memcpy(&bits, at, size_t(element));
  if (element == 2) bits <<= 16;
  return (bits & 0x7fffffff) > 0x7f800000;
}

// Offset of the first element that differs, or -1. A NaN equals every NaN, because processors give it other signs.
static int64_t difference(const char* found, const char* expected, int64_t size, int64_t element) {
  if (memcmp(found, expected, size_t(size)) == 0) return -1;
  for (int64_t i = 0; i + element <= size; i += element)
    if (memcmp(found + i, expected + i, size_t(element)) != 0 &&
        (element == 1 || !is_nan(found + i, element) || !is_nan(expected + i, element)))
      return i;
  return -1;
}

static int best_isa() {
  const int32_t supported = cl_supported_isas();
  if (!supported) {
    fprintf(stderr, "this processor runs no path of this build\n");
    exit(2);
  }
  return 31 - __builtin_clz(uint32_t(supported));
}

static cl_pool* pool_of(int64_t threads) {
  static std::map<int64_t, cl_pool*> pools;
  cl_pool*& pool = pools[threads];
  if (!pool) pool = cl_pool_create(int32_t(threads), 0);
  return pool;
}

typedef std::vector<int64_t> Arguments;
template <typename T>
static T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

static int64_t call(int64_t function, cl_pool* pool, const Arguments& a) {
  if (function == 2)
    return cl_sample(pool, pointer<float>(a[0]), a[1], int32_t(a[2]), int32_t(a[3]), pointer<cl_sampling_row>(a[4]), best_isa());
  cl_program program = *pointer<cl_program>(a[0]);
  program.isa = best_isa();
  if (function == 0) return cl_run(pool, &program, pointer<cl_batch>(a[1]), int32_t(a[2]));
  return cl_head(pool, &program, pointer<void>(a[1]), a[2], pointer<int32_t>(a[3]), pointer<int32_t>(a[4]), int32_t(a[5]),
                 pointer<cl_op>(a[6]), pointer<cl_sampling_row>(a[7]), pointer<float>(a[8]), a[9]);
}

static std::string replay(const char* path) {
  File file = read(path);
  const int64_t function = file.number(), threads = file.number();
  std::vector<Region> regions(size_t(file.number()));
  for (Region& region : regions) {
    const int64_t modulo = file.number();
    region.element = file.number(), region.scratch = file.number(), region.size = file.number();
    region.memory.resize(size_t(region.size + 128));
    region.offset = (modulo - int64_t(reinterpret_cast<uintptr_t>(region.memory.data()) % 64) + 64) % 64;
    file.copy(region.at(), size_t(region.size));
  }
  std::vector<char*> relocated;
  std::vector<int64_t> original;
  for (int64_t left = file.number(); left > 0; left--) {
    Region& region = regions[size_t(file.number())];
    char* at = region.at() + file.number();
    Region& target = regions[size_t(file.number())];
    const int64_t to = reinterpret_cast<int64_t>(target.at() + file.number());
    int64_t before;
    memcpy(&before, at, 8);
    memcpy(at, &to, 8);
    relocated.push_back(at);
    original.push_back(before);
  }
  Arguments arguments;
  for (int64_t left = file.number(); left > 0; left--) {
    const int64_t is_address = file.number(), first = file.number(), offset = file.number();
    arguments.push_back(is_address ? reinterpret_cast<int64_t>(regions[size_t(first)].at() + offset) : first);
  }
  std::vector<std::vector<char>> expected;
  for (Region& region : regions) expected.emplace_back(region.at(), region.at() + region.size);
  const int64_t result = call(function, pool_of(threads), arguments);
  for (size_t i = 0; i < relocated.size(); i++) memcpy(relocated[i], &original[i], 8);
  for (size_t i = 0; i < relocated.size(); i++)
    for (size_t r = 0; r < regions.size(); r++)
      if (relocated[i] >= regions[r].at() && relocated[i] < regions[r].at() + regions[r].size)
        memcpy(expected[r].data() + (relocated[i] - regions[r].at()), &original[i], 8);
  for (int64_t left = file.number(); left > 0; left--) {
    const size_t changed = size_t(file.number());
    file.copy(expected[changed].data(), expected[changed].size());
  }
  if (result != file.number()) return "another result of the function";
  for (size_t i = 0; i < regions.size(); i++) {
    Region& region = regions[i];
    if (region.scratch) continue;
    const int64_t at = difference(region.at(), expected[i].data(), region.size, region.element);
    if (at < 0) continue;
    uint32_t ours = 0, theirs = 0;
    memcpy(&ours, region.at() + at, size_t(region.element));
    memcpy(&theirs, expected[i].data() + at, size_t(region.element));
    char text[160];
    snprintf(text, sizeof text, "region %zu differs from element %lld of %lld on: %x, expected %x", i,
             static_cast<long long>(at / region.element), static_cast<long long>(region.size / region.element), ours, theirs);
    return text;
  }
  return "";
}

int main(int count, char** paths) {
  int differing = 0;
  for (int i = 1; i < count; i++) {
    const std::string problem = replay(paths[i]);
    if (!problem.empty()) printf("%s: %s\n", paths[i], problem.c_str());
    differing += !problem.empty();
  }
  printf("%d of %d calls differ, path %d\n", differing, count - 1, count > 1 ? best_isa() : -1);
  return differing > 0;
}
