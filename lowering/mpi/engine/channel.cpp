// Drives operations, either in the calling thread or in a progress thread, in parallel with computation. Both poll,
// because MPI moves bytes only inside calls. Both soon sleep between polls, to leave the core to the ranks that they
// wait for.
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

// A calling thread may poll often. The progress thread runs next to a computation and may not.
constexpr Pace kBackground{20'000};
// Of the operations that use the same link, only the first ones, up to this many bytes, are in progress. The others are
// deferred: each poll costs a system call, and operations that share a link all complete late. Every rank advances the
// first operation of all, so ranks cannot block each other.
constexpr int64_t kLinkBytes = 4 << 20;
constexpr uint64_t kSlice = 100'000;  // nanoseconds that the progress thread runs before another thread may run
constexpr int kAbove = 5;             // levels of niceness by which its priority is raised

// Waits between polls. It yields at first, then sleeps for increasing times. If many messages are in flight, it sleeps
// at once, since a late poll then delays only some of them.
class Backoff {
 public:
  explicit Backoff(const Pace& pace) : pace_(pace), pause_(pace.shortest) {}
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
  // While in scope after `get`, the thread's sleeps are exact. Linux may otherwise prolong them by 50 us.
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

// The progress thread mostly sleeps and works for microseconds, while computation occupies every core. Short slices
// (Linux 6.12), and a higher priority if allowed, let it run soon after it wakes up.
void raise_priority() {
#if defined(SYS_sched_setattr)
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  attributes.size = sizeof attributes;
  attributes.nice = getpriority(PRIO_PROCESS, 0);
  attributes.runtime = kSlice;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), attributes.nice - kAbove);
#endif
}

}  // namespace

// A started operation.
struct Channel::Flight {
  int64_t handle, number;                // number: as returned by `Watch::begin`
  std::unique_ptr<Operation> operation;  // used by the progress thread, which frees it at its end
  bool ended;
  // Set once it has ended:
  std::string error;
  const void* output;
};

Channel::Channel(MPI_Comm comm, bool collective) : comm(comm), collective_(collective) {
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  int* bound = nullptr;
  int found = 0, size = 0;
  MPI_Comm_get_attr(comm, MPI_TAG_UB, &bound, &found);
  if (found) tags_ = *bound;  // the highest tag is for leave messages
  constexpr int64_t kEnough = 1 << 24;  // tags for labels; with fewer, all tags number messages
  if (tags_ >= kEnough) span_ = tags_ / kLabels;
  MPI_Comm_size(comm, &size);
  MPI_Comm_rank(comm, &rank_);
  for (auto* each : {&sent_, &received_, &begun_}) each->resize(size);
  ends_.resize(size, kRunning);
  lasts_.resize(size, kRunning);
  causes_.resize(size);
}

Channel::~Channel() = default;

void Channel::watch(char* record) { watch_ = std::make_unique<Watch>(record); }

std::string Channel::verdict() { return watch_ ? watch_->verdict() : std::string(); }
void Channel::record_failure() {
  if (watch_) watch_->fail();
}
std::string Channel::summary() { return watch_ ? watch_->summary() : std::string(); }

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
  // The smallest buffer that is large enough.
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
  peak_ = std::max(peak_, used_);
  // Frees buffers, the oldest first.
  for (; kept_ + used_ > peak_; buffers_.erase(buffers_.begin())) kept_ -= buffers_.front().first;
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
  std::string note = kind == MPI_ERR_TRUNCATE ? "\nnote: the other rank has begun a different collective" : "";
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
    start_thread();
  }
  Backoff backoff(pace);
  // When failures were last looked for, signals were last checked, and anything last moved.
  int64_t looked = 0, asked = now(), moved = asked;
  while (!operation->done()) {
    if (operation->step()) {
      backoff.moved(operation->bulk());
      if (watch_) watch_->moved();
      if (look) moved = now();
    } else {
      backoff.wait();
      if (now() - asked >= kLook) {
        asked = now();
        if (watch_) watch_->record_progress();
        if (interrupted()) interrupt(*operation);
        if (look && !look(operation->progress(), asked - moved)) operation->break_off("broken off");
      }
      if (!collective_ || (!fails() && now() - looked < kLook)) continue;
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
  start_thread();
  work_.notify_one();
  return handles_;
}

std::string Channel::finish(int64_t handle, const void* output) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto mine = [=](auto& f) { return f->handle == handle; };
  auto it = std::find_if(flights_.begin(), flights_.end(), mine);
  if (it == flights_.end()) return "finish: this operation was not started, or it was finished before";
  Flight& flight = **it;
  int64_t since = now();
  while (!news_.wait_for(lock, std::chrono::nanoseconds(kLook), [&] { return flight.ended; })) {
    lock.unlock();
    if (interrupted()) interrupted_ = true;  // the progress thread cancels it
    lock.lock();
  }
  if (watch_) watch_->waited(flight.number, now() - since);
  std::string error = flight.error;
  if (error.empty() && flight.output != output) {
    error = "the result buffer moved between start and finish: both must be in the same jit";
  }
  flights_.erase(std::find_if(flights_.begin(), flights_.end(), mine));
  return error;
}

// Requires `mutex_`.
void Channel::start_thread() {
  if (thread_.joinable()) return;
  int threads = MPI_THREAD_SINGLE;
  MPI_Query_thread(&threads);
  if (threads == MPI_THREAD_MULTIPLE) thread_ = std::thread([this] { progress(); });
}

void Channel::progress() {
  raise_priority();
  Rounding rounding;  // a thread inherits the environment of its creator, which is a thread of XLA
  Backoff backoff(kBackground);
  std::vector<Flight*> active, over;  // operations that are running, and those that have just ended
  std::map<int32_t, int64_t> queued;  // by link, the bytes of earlier operations
  int64_t looked = 0;                 // when failures were last looked for
  for (;;) {
    // Report the operations that have ended in the last iteration, then wait until there is work.
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
      // MPI's own collectives block in other threads, which cannot check for failures.
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

    // Advance the operations, except those behind `kLinkBytes` of others.
    bool moved = false, bulk = true;
    queued.clear();
    for (Flight* flight : active) {
      int64_t nbytes = flight->operation->nbytes();
      const std::vector<int32_t>& links = flight->operation->links();
      auto full = [&](int32_t link) { return queued[link] > kLinkBytes; };
      if (nbytes > 0 && std::any_of(links.begin(), links.end(), full)) continue;
      for (int32_t link : links) queued[link] += nbytes;
      moved |= flight->operation->step();
      bulk &= flight->operation->bulk();
    }

    // Cancel operations that a signal interrupts, or that cannot complete.
    if (interrupted_.exchange(false)) {
      for (Flight* flight : active) {
        if (!flight->operation->done()) interrupt(*flight->operation);
      }
    }
    bool looks = now() - looked >= kLook;
    if (looks) looked = now();
    if (looks && watch_) watch_->record_progress();
    if (collective_ && (fails() || looks)) {
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
      backoff.moved(bulk);
      if (watch_) watch_->moved();
    } else if (!active.empty()) {
      backoff.wait();
    }
  }
}
}  // namespace commplan
