// The record of a channel: events of its operations, and the block that the sidecar of the host reads and writes.
#pragma once

#include <algorithm>
#include <unordered_map>

#include "engine.h"

namespace commplan {

// A part of a record, with the layout of `commplan/recorder/live.py`. Times are nanoseconds of the monotonic clock.
struct Live {
  int64_t moved;    // when an operation last began, moved bytes or ended
  int64_t waits;    // when the oldest unfinished operation began; 0 if there is none
  int64_t parting;  // since when this rank waits for the others to leave; 0 before
  int64_t left;     // 1 if this rank begins no further operation, 2 if it has left
  int64_t of_python[12];  // fields that only Python uses
  // Written by the sidecar. effective: when the verdict applies; 0 if there is none. abandoned: 1 if no rank that this
  // one waits for at its end will leave. text: the verdict, a zero, and the line of the plan that waited.
  int64_t effective, abandoned;
  char text[3952];
};

// Writes the flight record of a rank (recorder.cpp). base: the memory of the mapped file; null to write nothing.
class Recorder {
 public:
  static constexpr int64_t kNameBytes = 128;  // bytes of a name, with a zero at the end
  // Kinds of events, as in `commplan/recorder/file.py`.
  enum Happened : int64_t { kBegin = 1, kEnd = 2, kFailed = 3, kVerdict = 4, kWaited = 5, kRound = 7 };
  explicit Recorder(char* base) : base_(base) {}
  // Adds an event. text: its name. operation: the number of the operation. runs: how often its line has run. nbytes:
  // bytes that it moves. Some kinds use the last two for other numbers.
  void add(Happened kind, const std::string& text, int64_t operation, int64_t runs, int64_t nbytes);
  Live* live() const;  // null without a file
  void release() { base_ = nullptr; }  // stops writing to the memory

 private:
  int64_t name(const std::string& text);  // the index of a name in the record
  char* base_;
  std::unordered_map<std::string, int64_t> names_;  // indices of the names in the record
};

// Records the operations of a channel. The sidecar finds the rank that blocks the others, and writes a verdict.
class Watch {
 public:
  explicit Watch(char* record) : recorder_(record), live_(recorder_.live()) { moved(); }
  int64_t begin(Operation& operation);  // returns its number among the operations of this rank
  void end(Operation& operation);
  void fail();  // all pending operations fail, since the process ends
  // Records how long the program waited for an operation that was started before.
  void waited(int64_t number, int64_t nanoseconds);
  void moved() { put(&Live::moved, now()); }
  void record_progress();  // of the oldest operation, if nothing has moved for a second
  std::string verdict();   // why all pending operations must end; empty if there is no reason
  std::string summary();   // the first line of the verdict, and the line of the plan that waited
  void part() { put(&Live::parting, now()); }  // from now on this rank waits for the others to leave
  void leave(bool leaves) { put(&Live::left, std::max<int64_t>(get(&Live::left), leaves ? 2 : 1)); }
  bool abandoned();  // no rank that it waits for will leave
  void release();    // writes no more

 private:
  // An operation that has not ended. since: when it began, in nanoseconds. number: among the operations of this rank.
  // runs: how often its line has run.
  struct Active {
    Operation* operation;
    int64_t since, number, runs;
  };

  void put(int64_t Live::* field, int64_t value) {
    if (live_ != nullptr) __atomic_store_n(&(live_->*field), value, __ATOMIC_RELAXED);
  }
  int64_t get(int64_t Live::* field) const {
    return live_ == nullptr ? 0 : __atomic_load_n(&(live_->*field), __ATOMIC_ACQUIRE);
  }
  void put_oldest() { put(&Live::waits, active_.empty() ? 0 : active_.front().since); }

  std::mutex mutex_;  // guards the following members
  Recorder recorder_;
  Live* live_;              // null without a record
  int64_t operations_ = 0;  // the number of operations that have begun
  std::vector<Active> active_;  // in the order in which they began
  int64_t recorded_ = 0;        // the operation whose progress was recorded last
  Progress progress_;           // the progress that was recorded last
  std::unordered_map<const std::string*, int64_t> runs_;  // by line of the plan, how often it has run
  bool is_judged_ = false;  // the verdict has been recorded
};

}  // namespace commplan
