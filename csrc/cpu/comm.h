// Processes that run one program together, each with its own columns of the weights. They share memory: some of their
// buffers, and the counters by which they wait for each other. Each process is a rank of the communicator.
#pragma once
#include <stdint.h>

#include <atomic>

#include "chairlift_cpu.h"

struct cl_comm {
 public:
  static constexpr int kMaxRanks = 64;

  // Counters in shared memory that only one rank writes. Memory of zeros is their initial state.
  struct alignas(64) Member {
    std::atomic<uint32_t> met;       // number of meetings at which this rank has arrived
    std::atomic<uint32_t> sent;      // number of messages that this rank has sent; only rank 0 sends
    std::atomic<uint32_t> received;  // number of messages that this rank has read
    std::atomic<uint32_t> asleep;    // number of ranks that sleep until one of these counters changes
    std::atomic<uint32_t> beats;     // changes ten times a second while this rank sleeps
  };
  struct Shared {
    Member members[kMaxRanks];
    alignas(64) std::atomic<uint32_t> broken;  // 1: a rank has ended or does not answer, and nobody waits any more
  };

  cl_comm(void* shared, int rank, int size, const int32_t* lives, int num_lives, double patience);

  // Waits until every rank has called it as often as this rank. What a rank wrote before is then visible to all. One
  // thread of each rank calls it. Returns false if the communicator is broken.
  bool meet();

  // Rank 0: tells the others that there is a message. They must have read the one before; wait_for_readers waits for
  // that. Other ranks: wait_for_message waits for the next message, however long it takes; read says that it was read.
  bool wait_for_readers();
  void send();
  bool wait_for_message();
  void read();

  // Rank 0, between two steps: whether the other ranks live. It ends the communicator if a rank has ended, or has neither
  // beaten nor read a message for `patience` seconds in which rank 0 looked all the time.
  bool look();

  bool ended() const { return broken_; }

  // Wakes every rank that waits; its function returns false, now and in the future.
  void end();

  // Whether a meeting of this rank has returned false. Unlike the end itself, it changes during meetings only. So all
  // threads of a pool see the same after the barrier that follows a meeting.
  bool left() const { return left_; }

  // Seconds that this rank has waited in meetings, and number of meetings.
  double waited() const { return waited_; }
  int64_t meetings() const { return meetings_; }

 private:
  // Waits until `word`, a counter of `owner`, is at least `value`. Seconds of patience, in which this rank was not
  // stopped itself; 0: no limit.
  bool wait(Member& owner, std::atomic<uint32_t>& word, uint32_t value, double patience);
  void changed(std::atomic<uint32_t>& word);
  bool somebody_ended() const;

  Shared& shared_;
  const int rank_, size_, num_lives_;
  int32_t lives_[kMaxRanks];  // sockets, one per process whose end this rank must notice
  const double patience_;
  double looked_ = 0.0;             // time of the last look
  uint32_t signs_[kMaxRanks] = {};  // beats and messages read of each rank, and the time of the look at which they changed
  double seen_[kMaxRanks] = {};
  uint32_t turn_ = 0;
  std::atomic<bool> broken_{false};
  bool left_ = false;
  double waited_ = 0.0;
  int64_t meetings_ = 0;
};
