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
#include <chrono>
#include <map>

#include "watch.h"

namespace commplan {
namespace {

// Who has called waits for nothing else and may look often; the thread beside a computation may not.
constexpr Pace kBeside{20'000};
// Of the operations that take the same way (to a rank, or from one) the first that have so much to move go on
// abreast, the others wait for their turn: every look costs a system call, and what is under way at once ends at
// once, late. The first operation of all is among them on every rank.
constexpr int64_t kAbreast = 4 << 20;
constexpr uint64_t kSlice = 100'000;  // nanoseconds
constexpr int kAbove = 5;            // levels of niceness


// Gives way to others at first, then sleeps, longer and longer. Where many messages are under way there is
// always one that can wait: then it sleeps at once.
class Patience {
 public:
  explicit Patience(const Pace& pace) : pace_(pace), pause_(pace.shortest) {}
  void moved(bool bulk) {
    since_ = 0;
    bulk_ = bulk;
    pause_ = bulk ? pace_.bulk : pace_.shortest;
  }
  void wait() {
    if (!bulk_) {
      int64_t at = now();
      if (since_ == 0) since_ = at;
      if (at - since_ < pace_.spin) {
        sched_yield();
        return;
      }
    }
    exact_.get();
    sleep_ns(pause_);
    pause_ = std::min(pause_ * 5 / 4, pace_.longest);
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

  const Pace pace_;
  int64_t since_ = 0, pause_;
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
  int64_t handle, number;  // number: of the watch
  std::unique_ptr<Operation> operation;  // the progress thread's
  bool ended;
  std::string error;
  const void* output;
};

Channel::Channel(MPI_Comm comm, bool together) : comm(comm), together_(together) {
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  int* bound = nullptr;
  int found = 0, size = 0;
  MPI_Comm_get_attr(comm, MPI_TAG_UB, &bound, &found);
  if (found) tags_ = *bound;  // the last one says that a rank leaves
  constexpr int64_t kEnough = 1 << 24;
  if (tags_ >= kEnough) span_ = tags_ / kLabels;
  MPI_Comm_size(comm, &size);
  MPI_Comm_rank(comm, &own_);
  for (auto* each : {&sent_, &received_, &begun_}) each->resize(size);
  ends_.resize(size, kHere);
  lasts_.resize(size, kHere);
  causes_.resize(size);
}

Channel::~Channel() = default;

void Channel::watch(int64_t bound, int64_t first, int64_t busy, char* record) {
  watch_ = std::make_unique<Watch>(comm, bound, first, busy, record, !together_);
}

std::string Channel::verdict() { return watch_ ? watch_->verdict() : std::string(); }
std::string Channel::summary() { return watch_ ? watch_->summary() : std::string(); }

void Channel::serve(const Served& served) {
  if (watch_) watch_->serve(served);
}

void Channel::stop_watching() {
  if (watch_) watch_->stop();
}

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

void Channel::fail(const std::string& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_.empty()) broken_ = error;
    fails_ = true;
  }
  part(true);
}

void Channel::uses(MPI_Comm other) {
  std::lock_guard<std::mutex> lock(mutex_);
  others_.push_back(other);
}

std::string Channel::explain(int code, const char* call, const std::string& where, const std::string& name) {
  std::string line = where.empty() ? "" : "; " + where;
  if (lost(code)) return name + " has died" + line;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  std::string with = name.empty() ? "" : " with " + name;
  int kind = code;
  MPI_Error_class(code, &kind);
  std::string note = kind == MPI_ERR_TRUNCATE ? "\nnote: another rank has begun another collective there" : "";
  return std::string(call) + with + " failed: " + std::string(text, length) + note + line;
}

std::string Channel::enter() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty()) return closed_;
  if (!broken_.empty()) return "an earlier operation failed: " + broken_;
  ++inside_;
  return {};
}

bool Channel::resting() const {
  return std::all_of(flights_.begin(), flights_.end(), [](auto& f) { return f->ended; });
}

bool Channel::busy() {
  std::lock_guard<std::mutex> lock(mutex_);
  return inside_ > 0 || !resting();
}

void Channel::rest() {
  std::unique_lock<std::mutex> lock(mutex_);
  news_.wait(lock, [&] { return resting(); });
}

std::string Channel::drive(std::unique_ptr<Operation> operation, const Pace& pace, const Look& look) {
  bool blocks = operation->blocks();
  if (watch_) watch_->begin(*operation);
  if (blocks) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocking_.push_back(operation.get());
    run_beside();
  }
  Patience patience(pace);
  int64_t looked = 0, asked = now(), moved = asked;
  while (!operation->done()) {
    if (operation->step()) {
      patience.moved(operation->bulk());
      if (watch_) watch_->moved();
      if (look) moved = now();
    } else {
      patience.wait();
      if (now() - asked >= kLook) {
        asked = now();
        if (interrupted()) interrupt(*operation);
        if (look && !look(operation->progress(), asked - moved)) operation->break_off("broken off");
      }
      if (!together_ || (!fails() && now() - looked < kLook)) continue;
      looked = now();
      break_off(*operation);
    }
  }
  if (blocks) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocking_.erase(std::find(blocking_.begin(), blocking_.end(), operation.get()));
  }
  std::string error = operation->error();
  if (watch_) watch_->end(*operation);
  operation.reset();
  if (!error.empty()) fail(error);
  std::lock_guard<std::mutex> lock(mutex_);
  --inside_;
  news_.notify_all();
  return error;
}

int64_t Channel::start(std::unique_ptr<Operation> operation) {
  int64_t number = watch_ ? watch_->begin(*operation) : 0;
  std::lock_guard<std::mutex> lock(mutex_);
  flights_.push_back(std::make_unique<Flight>(Flight{++handles_, number, std::move(operation), false, {}, nullptr}));
  --inside_;
  run_beside();
  work_.notify_one();
  return handles_;
}

std::string Channel::finish(int64_t handle, const void* output) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto mine = [=](auto& f) { return f->handle == handle; };
  auto it = std::find_if(flights_.begin(), flights_.end(), mine);
  if (it == flights_.end()) return "an operation is finished that was never started, or for the second time";
  Flight& flight = **it;
  int64_t since = now();
  while (!news_.wait_for(lock, std::chrono::nanoseconds(kLook), [&] { return flight.ended; })) {
    lock.unlock();
    if (interrupted()) interrupted_ = true;  // the progress thread breaks it off
    lock.lock();
  }
  if (watch_) watch_->waited(flight.number, now() - since);
  std::string error = flight.error;
  if (error.empty() && flight.output != output) {
    error = "the result has moved in memory since its operation was started: start and finish must be in one jit";
  }
  flights_.erase(std::find_if(flights_.begin(), flights_.end(), mine));
  return error;
}

// Under `mutex_`.
void Channel::run_beside() {
  if (thread_.joinable()) return;
  int threads = MPI_THREAD_SINGLE;
  MPI_Query_thread(&threads);
  if (threads == MPI_THREAD_MULTIPLE) thread_ = std::thread([this] { progress(); });
}

void Channel::progress() {
  be_let_in_soon();
  Rounding rounding;  // a thread begins with that of the thread that made it, which is XLA's
  Patience patience(kBeside);
  std::vector<Flight*> active, over;
  std::map<int32_t, int64_t> ahead;  // by way, the bytes of the operations before
  int64_t looked = 0;
  for (;;) {
    for (Flight* flight : over) {
      flight->error = flight->operation->error();
      flight->output = flight->operation->output();
      if (watch_) watch_->end(*flight->operation);
      flight->operation.reset();
      if (!flight->error.empty()) fail(flight->error);
    }
    {
      std::unique_lock<std::mutex> lock(mutex_);
      for (Flight* flight : over) flight->ended = true;
      if (!over.empty()) news_.notify_all();
      auto awake = [&] { return stopping_ || !resting(); };
      // MPI's own collectives wait in other threads, which cannot look.
      while (!awake() && (blocking_.empty() || now() - looked < kLook)) {
        work_.wait_for(lock, std::chrono::nanoseconds(kLook));
      }
      if (stopping_) return;
      active.clear();
      over.clear();
      for (auto& flight : flights_) {
        if (!flight->ended) active.push_back(flight.get());
      }
    }
    bool moved = false, bulk = true;
    ahead.clear();
    for (Flight* flight : active) {
      int64_t own = flight->operation->nbytes();
      const std::vector<int32_t>& ways = flight->operation->ways();
      auto full = [&](int32_t way) { return ahead[way] > kAbreast; };
      if (own > 0 && std::any_of(ways.begin(), ways.end(), full)) continue;
      for (int32_t way : ways) ahead[way] += own;
      moved |= flight->operation->step();
      bulk &= flight->operation->bulk();
    }
    if (interrupted_.exchange(false)) {
      for (Flight* flight : active) {
        if (!flight->operation->done()) interrupt(*flight->operation);
      }
    }
    if (together_ && (fails() || now() - looked >= kLook)) {
      looked = now();
      for (Flight* flight : active) {
        if (!flight->operation->done()) break_off(*flight->operation);
      }
      std::lock_guard<std::mutex> lock(mutex_);
      for (Operation* operation : blocking_) break_off(*operation);
    }
    for (Flight* flight : active) {
      if (flight->operation->done()) over.push_back(flight);
    }
    if (moved || !over.empty()) {
      patience.moved(bulk);
      if (watch_) watch_->moved();
    } else if (!active.empty()) {
      patience.wait();
    }
  }
}
}  // namespace commplan
