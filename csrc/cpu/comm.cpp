#include "comm.h"

#include <poll.h>
#include <time.h>

#include <algorithm>
#include <new>

#include "isa/processor.h"
#include "system.h"

namespace {

// A rank waits actively for as long as a thread of a pool does. Then it sleeps, and looks at the other processes after
// each pause.
constexpr double kSpinning = 50e-6;
constexpr int kPausesPerLook = 32;
constexpr long kPauseNanoseconds = 100 * 1000 * 1000;
// Maximum number of seconds that a rank counts as waited between two looks. After a longer time it was stopped itself or
// had no processor, so it knows nothing about the others: a container was paused, for example.
constexpr double kMostSeconds = 0.2;
// Maximum number of seconds between two looks of rank 0 that count as looking all the time.
constexpr double kLookSeconds = 2.0;

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

bool reached(uint32_t count, uint32_t value) { return int32_t(count - value) >= 0; }

}  // namespace

cl_comm::cl_comm(void* shared, int rank, int size, const int32_t* lives, int num_lives, double patience)
    : shared_(*static_cast<Shared*>(shared)), rank_(rank), size_(size), num_lives_(num_lives), patience_(patience) {
  for (int i = 0; i < num_lives; i++) lives_[i] = lives[i];
}

bool cl_comm::meet() {
  left_ = broken_;
  if (left_) return false;
  turn_++;
  meetings_++;
  Member& own = shared_.members[rank_];
  own.met.store(turn_);
  changed(own.met);
  const double start = seconds();
  bool all = true;
  for (int rank = 0; rank < size_ && all; rank++) {
    Member& other = shared_.members[rank];
    if (rank != rank_) all = wait(other, other.met, turn_, patience_);
  }
  waited_ += seconds() - start;
  left_ = !all;
  return all;
}

bool cl_comm::wait_for_readers() {
  const uint32_t sent = shared_.members[0].sent.load(std::memory_order_relaxed);
  for (int rank = 1; rank < size_; rank++) {
    Member& reader = shared_.members[rank];
    if (!wait(reader, reader.received, sent, patience_)) return false;
  }
  return true;
}

void cl_comm::send() {
  Member& own = shared_.members[0];
  own.sent.fetch_add(1);
  changed(own.sent);
}

bool cl_comm::wait_for_message() {
  Member& sender = shared_.members[0];
  return wait(sender, sender.sent, shared_.members[rank_].received.load(std::memory_order_relaxed) + 1, 0.0);
}

void cl_comm::read() {
  Member& own = shared_.members[rank_];
  own.received.fetch_add(1);
  changed(own.received);
}

bool cl_comm::look() {
  const double now = seconds();
  const bool again = now - looked_ < kLookSeconds;
  looked_ = now;
  bool hangs = false;
  for (int rank = 1; rank < size_; rank++) {
    const Member& other = shared_.members[rank];
    const uint32_t signs = other.beats.load(std::memory_order_relaxed) + other.received.load(std::memory_order_relaxed);
    if (!again || signs != signs_[rank]) signs_[rank] = signs, seen_[rank] = now;
    hangs |= now - seen_[rank] > patience_;
  }
  if (hangs || shared_.broken.load() || somebody_ended()) end();
  return !broken_;
}

void cl_comm::end() {
  broken_ = true;
  shared_.broken.store(1);
  for (int rank = 0; rank < size_; rank++) {
    Member& member = shared_.members[rank];
    cl_system::wake_all_shared(member.met);
    cl_system::wake_all_shared(member.sent);
    cl_system::wake_all_shared(member.received);
  }
}

void cl_comm::changed(std::atomic<uint32_t>& word) {
  if (shared_.members[rank_].asleep.load() > 0) cl_system::wake_all_shared(word);
}

// A rank that is about to sleep first says so, then looks at the counter again. A rank that changes a counter looks for
// sleepers afterwards. So no wake-up is lost. A rank that is killed while it sleeps leaves a count behind, which costs
// system calls only, and the communicator ends anyway.
bool cl_comm::wait(Member& owner, std::atomic<uint32_t>& word, uint32_t value, double patience) {
  if (reached(word.load(std::memory_order_acquire), value)) return !broken_;
  const double start = seconds();
  for (int spin = 1; spin % kPausesPerLook || seconds() - start < kSpinning; spin++) {
    if (reached(word.load(std::memory_order_acquire), value)) return !broken_;
    pause_processor();
  }
  owner.asleep.fetch_add(1);
  double slept = 0.0, before = start;
  for (uint32_t seen = word.load(); !reached(seen, value) && !broken_; seen = word.load()) {
    shared_.members[rank_].beats.fetch_add(1, std::memory_order_relaxed);
    const double now = seconds();
    slept += std::min(now - before, kMostSeconds);
    before = now;
    if (shared_.broken.load() || somebody_ended() || (patience > 0.0 && slept > patience)) {
      end();
      break;
    }
    cl_system::sleep_while_shared(word, seen, kPauseNanoseconds);
  }
  owner.asleep.fetch_sub(1);
  return !broken_;
}

bool cl_comm::somebody_ended() const {
  pollfd looks[kMaxRanks];
  for (int i = 0; i < num_lives_; i++) looks[i] = pollfd{lives_[i], 0, 0};
  return poll(looks, nfds_t(num_lives_), 0) > 0;  // without asking, the system reports POLLHUP, POLLERR and POLLNVAL
}

extern "C" int64_t cl_comm_bytes(void) { return int64_t(sizeof(cl_comm::Shared)); }

extern "C" cl_comm* cl_comm_create(void* shared, int32_t rank, int32_t size, const int32_t* lives, int32_t num_lives,
                                   double patience) {
  if (size < 1 || size > cl_comm::kMaxRanks || rank < 0 || rank >= size || num_lives < 0 || num_lives > cl_comm::kMaxRanks)
    return nullptr;
  return new (std::nothrow) cl_comm(shared, rank, size, lives, num_lives, patience);
}

extern "C" void cl_comm_destroy(cl_comm* comm) { delete comm; }
extern "C" int32_t cl_comm_meet(cl_comm* comm) { return comm->meet() ? 0 : -2; }
extern "C" int32_t cl_comm_wait_for_readers(cl_comm* comm) { return comm->wait_for_readers() ? 0 : -2; }
extern "C" void cl_comm_send(cl_comm* comm) { comm->send(); }
extern "C" int32_t cl_comm_wait_for_message(cl_comm* comm) { return comm->wait_for_message() ? 0 : -2; }
extern "C" void cl_comm_read(cl_comm* comm) { comm->read(); }
extern "C" int32_t cl_comm_look(cl_comm* comm) { return comm->look() ? 0 : -2; }
extern "C" int32_t cl_comm_ended(const cl_comm* comm) { return comm->ended() ? -2 : 0; }
extern "C" void cl_comm_end(cl_comm* comm) { comm->end(); }
extern "C" double cl_comm_waited(const cl_comm* comm) { return comm->waited(); }
extern "C" int64_t cl_comm_meetings(const cl_comm* comm) { return comm->meetings(); }
