// What drives operations: the calling thread, or one thread that works while others compute. Both poll,
// since MPI moves bytes only while it is called, and both soon sleep between polls: a rank that waits for its
// peers leaves its core to them.
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "engine.h"

namespace commplan {
namespace {

// Nanoseconds. Who has called waits for nothing else and may look often; the thread beside a computation may not.
constexpr int64_t kCaller = 1'000'000, kBeside = 20'000;
// Of the operations that take the same way (to a rank, or from one) the first that have so much to move go on
// abreast, the others wait for their turn: every look costs a system call, and what is under way at once ends at
// once, late. The first operation of all is among them on every rank.
constexpr int64_t kAbreast = 4 << 20;
constexpr int64_t kShortest = 10'000, kLongest = 250'000, kBulk = 50'000;

constexpr uint64_t kSlice = 100'000;  // nanoseconds
constexpr int kAbove = 5;            // levels of niceness

// Gives way to others at first, then sleeps, longer and longer. Where many messages are under way there is
// always one that can wait: then it sleeps at once.
class Patience {
 public:
  explicit Patience(int64_t spin) : spin_(spin) {}
  void moved(bool bulk) {
    since_ = 0;
    bulk_ = bulk;
    pause_ = bulk ? kBulk : kShortest;
  }
  void wait() {
    if (!bulk_) {
      int64_t at = now();
      if (since_ == 0) since_ = at;
      if (at - since_ < spin_) {
        sched_yield();
        return;
      }
    }
    exact_.get();
    doze(pause_);
    pause_ = std::min(pause_ * 5 / 4, kLongest);
  }

 private:
  // Linux rounds sleeps of ordinary threads up by 50 us.
  class Exact {
   public:
    ~Exact() {
#if defined(PR_SET_TIMERSLACK)
      if (before_ > 0) prctl(PR_SET_TIMERSLACK, before_, 0, 0, 0);
#endif
    }
    void get() {
      if (before_ >= 0) return;
      before_ = 0;
#if defined(PR_SET_TIMERSLACK)
      before_ = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
      prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
#endif
    }

   private:
    int before_ = -1;
  };

  const int64_t spin_;
  int64_t since_ = 0, pause_ = kShortest;
  bool bulk_ = false;
  Exact exact_;
};

// The progress thread sleeps nearly always and works for microseconds, under computation that has every core. What
// it asks for is to be let in soon when it wakes: short slices (Linux 6.12), and priority where that is allowed.
void be_let_in_soon() {
#if defined(SYS_sched_setattr)
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } wanted{};
  wanted.size = sizeof wanted;
  wanted.nice = getpriority(PRIO_PROCESS, 0);
  wanted.runtime = kSlice;
  syscall(SYS_sched_setattr, 0, &wanted, 0);
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), wanted.nice - kAbove);
#endif
}

}  // namespace

struct Channel::Flight {
  int64_t handle;
  std::unique_ptr<Operation> operation;
  bool ended;
};

Channel::Channel(MPI_Comm comm, bool together) : comm(comm), together_(together) {
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  int* bound = nullptr;
  int found = 0, size = 0;
  MPI_Comm_get_attr(comm, MPI_TAG_UB, &bound, &found);
  if (found) tags_ = static_cast<int64_t>(*bound) + 1;
  MPI_Comm_size(comm, &size);
  sent_.resize(size);
  received_.resize(size);
}

Channel::~Channel() { stop(); }

int64_t Channel::reserve_sends(int rank, int64_t count) {
  sent_[rank] += count;
  return sent_[rank] - count;
}

int64_t Channel::reserve_receives(int rank, int64_t count) {
  received_[rank] += count;
  return received_[rank] - count;
}

std::unique_ptr<char[]> Channel::take(int64_t nbytes, int64_t* capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto best = buffers_.end();
  for (auto it = buffers_.begin(); it != buffers_.end(); ++it) {
    if (it->first >= nbytes && (best == buffers_.end() || it->first < best->first)) best = it;
  }
  std::unique_ptr<char[]> buffer;
  *capacity = nbytes;
  if (best != buffers_.end()) {
    *capacity = best->first;
    buffer = std::move(best->second);
    buffers_.erase(best);
    kept_ -= *capacity;
  }
  used_ += *capacity;
  most_ = std::max(most_, used_);
  for (; kept_ + used_ > most_; buffers_.erase(buffers_.begin())) kept_ -= buffers_.front().first;
  if (!buffer) buffer.reset(new char[nbytes]);
  return buffer;
}

void Channel::give(std::unique_ptr<char[]> buffer, int64_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  used_ -= capacity;
  kept_ += capacity;
  buffers_.emplace_back(capacity, std::move(buffer));
}

std::string Channel::broken() {
  std::lock_guard<std::mutex> lock(mutex_);
  return broken_;
}

void Channel::fail(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  broken_ = error;
  fails_ = true;
}

void Channel::uses(MPI_Comm other) {
  std::lock_guard<std::mutex> lock(mutex_);
  others_.push_back(other);
}

std::string Channel::explain(int code, const char* call, const std::string& where, int rank, const std::string& name) {
  std::string line = where.empty() ? "" : "; " + where;
  if (!lost(code)) {
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(code, text, &length);
    std::string with = name.empty() ? "" : " with " + name;
    return std::string(call) + with + " failed: " + std::string(text, length) + line;
  }
  if (!name.empty()) return name + " has died" + line;
  if (together_) {
    std::lock_guard<std::mutex> lock(mutex_);
    revoke(comm);
    for (MPI_Comm other : others_) revoke(other);
  }
  // Who waited for the living learns from them that someone died, and only then who.
  constexpr int64_t kNews = 3'000'000'000, kLook = 10'000'000;
  std::vector<int> ranks = dead(comm);
  for (int64_t until = now() + kNews; ranks.empty() && now() < until; ranks = dead(comm)) doze(kLook);
  if (ranks.empty() && rank >= 0) ranks.push_back(rank);
  if (ranks.empty()) return "another rank found that one has died" + line;
  std::string named = ranks.size() > 1 ? "ranks " : "rank ";
  for (size_t i = 0; i < ranks.size(); ++i) named += (i ? ", " : "") + std::to_string(ranks[i]);
  return named + (ranks.size() > 1 ? " have died" : " has died") + line;
}

bool Channel::busy() {
  std::lock_guard<std::mutex> lock(mutex_);
  return driven_.load() > 0 || std::any_of(flights_.begin(), flights_.end(), [](auto& f) { return !f->ended; });
}

std::string Channel::drive(Operation& operation) {
  ++driven_;
  Patience patience(kCaller);
  while (!operation.done()) {
    if (operation.step()) {
      patience.moved(operation.bulk());
    } else {
      patience.wait();
    }
  }
  --driven_;
  if (operation.failed()) fail(operation.error());
  return operation.error();
}

int64_t Channel::start(std::unique_ptr<Operation> operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  flights_.push_back(std::make_unique<Flight>(Flight{++handles_, std::move(operation), false}));
  if (!thread_.joinable()) thread_ = std::thread([this] { progress(); });
  work_.notify_one();
  return handles_;
}

std::string Channel::finish(int64_t handle, const void* output) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto it = std::find_if(flights_.begin(), flights_.end(), [=](auto& f) { return f->handle == handle; });
  if (it == flights_.end()) return "an operation is finished that was never started, or for the second time";
  Flight& flight = **it;
  news_.wait(lock, [&] { return flight.ended; });
  std::string error = flight.operation->error();
  if (error.empty() && flight.operation->output() != output) {
    error = "the result has moved in memory since its operation was started: start and finish must be in one jit";
  }
  it = std::find_if(flights_.begin(), flights_.end(), [=](auto& f) { return f->handle == handle; });
  std::unique_ptr<Flight> done = std::move(*it);
  flights_.erase(it);
  lock.unlock();  // an operation that ends gives its buffers back
  return error;
}

void Channel::progress() {
  be_let_in_soon();
  Rounding rounding;  // a thread begins with that of the thread that made it, which is XLA's
  Patience patience(kBeside);
  std::vector<Flight*> active;
  std::map<int32_t, int64_t> ahead;  // by way, the bytes of the operations before
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      for (Flight* flight : active) {
        if (!flight->operation->done()) continue;
        flight->ended = true;
        if (!flight->operation->failed()) continue;
        if (broken_.empty()) broken_ = flight->operation->error();
        fails_ = true;
      }
      auto ended = [](auto& f) { return f->ended; };
      if (std::any_of(active.begin(), active.end(), ended)) news_.notify_all();
      work_.wait(lock, [&] { return stopping_ || !std::all_of(flights_.begin(), flights_.end(), ended); });
      if (stopping_) return;
      active.clear();
      for (auto& flight : flights_) {
        if (!flight->ended) active.push_back(flight.get());
      }
    }
    bool moved = false, ended = false, bulk = true;
    ahead.clear();
    for (Flight* flight : active) {
      int64_t own = flight->operation->nbytes();
      const std::vector<int32_t>& ways = flight->operation->ways();
      auto full = [&](int32_t way) { return ahead[way] > kAbreast; };
      if (own > 0 && std::any_of(ways.begin(), ways.end(), full)) continue;
      for (int32_t way : ways) ahead[way] += own;
      moved |= flight->operation->step();
      bulk &= flight->operation->bulk();
      ended |= flight->operation->done();
    }
    if (moved || ended) {
      patience.moved(bulk);
    } else {
      patience.wait();
    }
  }
}

void Channel::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    work_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace commplan
