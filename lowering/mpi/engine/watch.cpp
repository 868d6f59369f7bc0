// The watchdog: where nothing has moved for too long, a rank asks the others how far they are, and says who holds
// them all. A thread of its own asks and answers, on a communicator of its own, so that a rank answers whatever its
// program does; who does not answer is stopped, dead, or cut off.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "watch.h"

namespace commplan {
namespace {

constexpr int64_t kTick = 50'000'000, kGrace = 2'000'000'000, kAgain = 1'000'000'000;  // nanoseconds
constexpr int64_t kSettle = 200'000'000;  // until the others have heard a verdict
constexpr int64_t kStack = 500'000'000;   // that Python may take to say what it does
constexpr size_t kLongest = 2048;         // bytes of a stack
constexpr int kFew = 3, kIntervals = 16;  // runs before a median is known, and of which it is one
constexpr int64_t kMedians = 5;
enum Tag { kAsk = 1, kAnswer = 2, kVerdict = 3 };

std::atomic<StackWriter> stack_writer{nullptr};
std::atomic<int> busy{0};

std::string line_of(const std::string& where) {
  constexpr char kEnd[] = " waits for it";
  size_t at = where.rfind(kEnd);
  return at == std::string::npos ? where : where.substr(0, at);
}

// Under a line's name its details follow the zero byte that ends it (`commplan/recorder/file.py`).
std::string recorded(const Operation& operation) {
  const std::string& details = operation.details();
  std::string line = line_of(operation.where());
  return details.empty() ? line : line.substr(0, Recorder::kNameBytes - 2 - details.size()) + '\0' + details;
}

std::string seconds(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(nanoseconds) * 1e-9);
  return text;
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  constexpr size_t kShown = 8;
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > kShown ? text + " and " + std::to_string(ranks.size() - kShown) + " more" : text;
}

std::string first_line(const char* path) {
  char text[256] = {};
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  ssize_t many = read(file, text, sizeof text - 1);
  close(file);
  std::string line(text, std::max<ssize_t>(many, 0));
  return line.substr(0, line.find('\n'));
}

// What Python's main thread does, or nothing where the interpreter does not come to say so: its lock is held.
std::string python_stack() {
  StackWriter writer = stack_writer.load();
  if (writer == nullptr) return {};
  struct Shared {
    std::mutex mutex;
    std::condition_variable done;
    bool ready = false;
    char text[kLongest] = {};
  };
  auto shared = std::make_shared<Shared>();
  std::thread([shared, writer] {
    char text[kLongest] = {};
    writer(text, kLongest - 1);
    std::lock_guard<std::mutex> lock(shared->mutex);
    std::memcpy(shared->text, text, kLongest);
    shared->ready = true;
    shared->done.notify_one();
  }).detach();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->done.wait_for(lock, std::chrono::nanoseconds(kStack), [&] { return shared->ready; });
  return shared->ready ? shared->text : "it does not let go of the interpreter's lock";
}

// Numbers and texts in a row of bytes; both ends run the same build.
class Writer {
 public:
  void put(int64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof number); }
  void put(const std::string& text) { put(static_cast<int64_t>(text.size())), bytes_ += text; }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  int64_t number() {
    int64_t value = 0;
    if (at_ + sizeof value <= bytes_.size()) std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text() {
    size_t size = static_cast<size_t>(number()), from = std::min(at_, bytes_.size());
    at_ += size;
    return bytes_.substr(from, size);
  }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
};

}  // namespace

// One thread does the work of all.
struct Watch::Watches {
  std::mutex mutex;
  std::vector<Watch*> running;
  std::thread thread;
};

Watch::Watches& Watch::all() {
  static auto* watches = new Watches;
  return *watches;
}

void set_stack_writer(StackWriter writer) { stack_writer = writer; }
void add_busy(int change) { busy += change; }

Watch::Watch(MPI_Comm channel, int64_t bound, int64_t first, char* record, bool requests)
    : bound_(bound), first_(first), requests_(requests), recorder_(record) {
  MPI_Comm_dup(channel, &comm_);
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm_, &own_);
  MPI_Comm_size(comm_, &size_);
  Process process{getpid(), {}, {}};
  char space[64] = {};
  if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) space[0] = 0;
  std::string machine = first_line("/proc/sys/kernel/random/boot_id") + space;
  std::snprintf(process.machine, sizeof process.machine, "%s", machine.c_str());
  gethostname(process.host, sizeof process.host - 1);
  processes_.resize(size_);
  int bytes = static_cast<int>(sizeof process);
  MPI_Allgather(&process, bytes, MPI_BYTE, processes_.data(), bytes, MPI_BYTE, comm_);
  begun_.resize(size_);
  left_.resize(size_, Channel::kHere);
  moved_ = now();
  Watches& watches = all();
  std::lock_guard<std::mutex> lock(watches.mutex);
  watches.running.push_back(this);
  if (!watches.thread.joinable()) {
    watches.thread = std::thread([&watches] {
      for (std::unique_lock<std::mutex> own(watches.mutex); !watches.running.empty(); own.lock()) {
        for (Watch* watch : watches.running) watch->listen(), watch->look();
        own.unlock();
        sleep_ns(kTick);
      }
    });
  }
}

int64_t Watch::begin(Operation& operation) {
  int64_t at = now();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Partner& partner : operation.partners()) begun_[partner.rank] = std::max(begun_[partner.rank], partner.number);
  Cadence& cadence = cadences_[&operation.where()];
  if (cadence.began > 0) {
    cadence.intervals.resize(std::min<size_t>(cadence.runs, kIntervals));
    cadence.intervals[(cadence.runs - 1) % kIntervals] = at - cadence.began;
  }
  ++cadence.runs;
  cadence.began = at;
  active_.push_back({&operation, at, ++operations_, cadence.runs});
  recorder_.add(Recorder::kBegin, recorded(operation), operations_, cadence.runs, operation.nbytes());
  moved_ = at;
  return operations_;
}

void Watch::end(Operation& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto mine = [&](const Active& each) { return each.operation == &operation; };
  auto at = std::find_if(active_.begin(), active_.end(), mine);
  auto kind = operation.failed() ? Recorder::kFailed : Recorder::kEnd;
  recorder_.add(kind, recorded(operation), at->number, at->runs, 0);
  active_.erase(at);
  last_ = &operation.where();
  last_runs_ = cadences_[last_].runs;
  moved_ = now();
}

void Watch::waited(int64_t number, int64_t nanoseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  recorder_.add(Recorder::kWaited, "", number, 0, nanoseconds);
}

void Watch::has_left(int rank, int64_t last) {
  std::lock_guard<std::mutex> lock(mutex_);
  left_[rank] = last;
}

std::vector<int64_t> Watch::all_left() {
  std::lock_guard<std::mutex> lock(mutex_);
  return left_;
}

std::string Watch::verdict() {
  std::lock_guard<std::mutex> lock(mutex_);
  return verdict_.empty() || now() < effective_ ? std::string() : verdict_;
}

std::string Watch::summary() {
  std::lock_guard<std::mutex> lock(mutex_);
  return verdict_.substr(0, verdict_.find('\n')) + (line_.empty() ? "" : "; " + line_ + " waits for it");
}

void Watch::stop() {
  Watches& watches = all();
  std::unique_lock<std::mutex> lock(watches.mutex);
  watches.running.erase(std::remove(watches.running.begin(), watches.running.end(), this), watches.running.end());
  if (!watches.running.empty() || !watches.thread.joinable()) return;
  std::thread last = std::move(watches.thread);
  lock.unlock();
  last.join();
}

bool Watch::release() {
  listen();
  if (!sent_.empty()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  recorder_.release();
  MPI_Comm_free(&comm_);
  return true;
}

// Under `mutex_`.
int64_t Watch::patience(const Operation& operation, bool alive) {
  Cadence& cadence = cadences_[&operation.where()];
  if (!alive) return bound_;
  if (cadence.runs <= kFew) return first_;
  std::vector<int64_t> sorted = cadence.intervals;
  auto middle = sorted.begin() + static_cast<int64_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return std::max(bound_, kMedians * *middle);
}

Watch::Report Watch::own_report() {
  Report report;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t at = now();
    report.idle = at - moved_;
    report.busy = busy.load();
    report.begun = begun_;
    report.runs = last_runs_;
    if (last_ != nullptr) report.last = line_of(*last_);
    if (!active_.empty()) {
      const Active& oldest = active_.front();
      report.waited = at - oldest.since;
      report.where = line_of(oldest.operation->where());
      report.partners = oldest.operation->partners();
    }
    if (served_ > 0) {  // it has taken what has come, unless it does something else
      bool serves = at - served_ < kAgain;
      report.begun.assign(size_, serves && !patient_ ? INT64_MAX : 0);
      report.busy += serves && patient_;
      if (serves && holds_ && !patient_) {
        report.waited = report.idle;
        report.partners = awaited_;
        report.where = "what workers have asked of it";
      }
    }
  }
  // Who waits for a server holds others for no fault of its own: its request has a bound.
  for (Watch* other : all().running) {
    if (other == this || !other->requests_) continue;
    std::lock_guard<std::mutex> lock(other->mutex_);
    report.busy += !other->active_.empty();
  }
  if (report.waited < 0 && report.idle > kAgain) report.stack = python_stack();
  return report;
}

void Watch::send(int rank, int tag, const std::string& bytes) {
  sent_.push_back(std::make_unique<Sent>(Sent{bytes, MPI_REQUEST_NULL}));
  Sent& sent = *sent_.back();
  int many = static_cast<int>(sent.bytes.size());
  if (MPI_Issend(sent.bytes.data(), many, MPI_BYTE, rank, tag, comm_, &sent.request) != MPI_SUCCESS) sent_.pop_back();
}

void Watch::listen() {
  auto arrived = [](std::unique_ptr<Sent>& sent) {
    int flag = 0;
    MPI_Test(&sent->request, &flag, MPI_STATUS_IGNORE);
    return flag != 0;
  };
  sent_.erase(std::remove_if(sent_.begin(), sent_.end(), arrived), sent_.end());
  for (;;) {
    int flag = 0, many = 0;
    MPI_Message message;
    MPI_Status status;
    if (MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &flag, &message, &status) != MPI_SUCCESS) {
      acknowledge(comm_);
      return;
    }
    if (!flag) return;
    MPI_Get_count(&status, MPI_BYTE, &many);
    std::string bytes(many, '\0');
    MPI_Mrecv(bytes.data(), many, MPI_BYTE, &message, MPI_STATUS_IGNORE);
    Reader reader(bytes);
    if (status.MPI_TAG == kAsk) {
      answer(status.MPI_SOURCE, reader.number());
    } else if (status.MPI_TAG == kAnswer && reader.number() == serial_) {
      Report report;
      for (int64_t* number : {&report.waited, &report.idle, &report.busy, &report.runs}) *number = reader.number();
      for (int rank = 0; rank < size_; ++rank) report.begun.push_back(reader.number());
      for (int64_t left = reader.number(); left > 0; --left) {
        auto rank = static_cast<int32_t>(reader.number());
        report.partners.push_back({rank, reader.number()});
      }
      for (std::string* text : {&report.where, &report.last, &report.stack}) *text = reader.text();
      reports_[status.MPI_SOURCE] = std::make_unique<Report>(std::move(report));
    } else if (status.MPI_TAG == kVerdict) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (verdict_.empty()) verdict_ = reader.text(), line_ = reader.text();
    }
  }
}

void Watch::answer(int rank, int64_t serial) {
  Report report = own_report();
  Writer writer;
  writer.put(serial);
  for (int64_t number : {report.waited, report.idle, report.busy, report.runs}) writer.put(number);
  for (int64_t number : report.begun) writer.put(number);
  writer.put(static_cast<int64_t>(report.partners.size()));
  for (const Partner& partner : report.partners) writer.put(partner.rank), writer.put(partner.number);
  for (const std::string* text : {&report.where, &report.last, &report.stack}) writer.put(*text);
  send(rank, kAnswer, writer.bytes());
}

// Whether something waits for too long; then the others are asked, and what they say is weighed.
void Watch::look() {
  int64_t at = now();
  if (asked_ > 0) {
    bool all = true;
    for (int rank = 0; rank < size_; ++rank) all &= asks_[rank] == 0 || reports_[rank] != nullptr;
    if (all || at - asked_ > kGrace) {
      asked_ = 0;
      next_ = at + kAgain;
      parting_ > 0 ? conclude_parting() : conclude();
    }
    return;
  }
  Writer writer;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    bool waits = parting_ > 0 ? at - parting_ > bound_
                              : !active_.empty() && at - std::max(active_.front().since, moved_.load()) > bound_;
    if (!waits || !verdict_.empty() || at < next_) return;
    asks_.assign(size_, 0);
    for (int rank = 0; rank < size_; ++rank) asks_[rank] = rank != own_ && left_[rank] == Channel::kHere;
  }
  reports_.clear();
  reports_.resize(size_);
  writer.put(++serial_);
  for (int rank = 0; rank < size_; ++rank) {
    if (asks_[rank]) send(rank, kAsk, writer.bytes());
  }
  asked_ = at;
}

std::string Watch::silent(int rank) const {
  const Process& process = processes_[rank];
  const Process& mine = processes_[own_];
  if (std::strcmp(process.machine, mine.machine) != 0) {
    return "does not answer: it is stopped or dead, or host " + std::string(process.host) + " cannot be reached";
  }
  std::string path = "/proc/" + std::to_string(process.pid) + "/stat";
  std::string line = first_line(path.c_str());
  size_t at = line.rfind(')');
  char state = at == std::string::npos || at + 2 >= line.size() ? 0 : line[at + 2];
  if (state == 0 || state == 'Z' || state == 'X') return "has died";
  if (state == 'T' || state == 't') return "is stopped (SIGSTOP, or a debugger)";
  if (state == 'D') return "is stuck in the kernel (a disk or a file system that does not answer)";
  bool near = std::strcmp(process.host, mine.host) == 0;  // else it may have a network of its own
  return "does not answer: its process lives, and its threads do not run" +
         (near ? std::string() : ", or " + std::string(process.host) + " cannot be reached");
}

std::string Watch::described(int rank, const Report& report) const {
  std::string text = "\nnote: rank " + std::to_string(rank) + " (process " + std::to_string(processes_[rank].pid) +
                     " on " + processes_[rank].host + ") is alive, in no collective for " + seconds(report.idle);
  if (!report.last.empty()) {
    text += "; it last finished " + report.last + ", " + std::to_string(report.runs) + " times so far";
  }
  return report.stack.empty() ? text : text + "\nnote: its Python: " + report.stack;
}

// Who holds the others: who does not answer; else who has not come to an operation that others wait in, and waits in
// none itself; else all wait for one another.
void Watch::conclude() {
  reports_[own_] = std::make_unique<Report>(own_report());
  const Report& mine = *reports_[own_];
  if (mine.waited < 0 || mine.idle < bound_) return;
  std::vector<int> silent_ranks, late, waiting{own_};
  std::vector<char> reached(size_, 0);
  reached[own_] = 1;
  int64_t least = mine.idle;
  std::vector<int64_t> left = all_left();
  for (size_t next = 0; next < waiting.size(); ++next) {
    int rank = waiting[next];
    for (const Partner& partner : reports_[rank]->partners) {
      int other = partner.rank;
      // Who waits for what a rank has not begun that has left is told so by its channel.
      if (rank == own_ && left[other] < partner.number) return;
      if (reached[other] || left[other] != Channel::kHere) continue;
      if (!reports_[other]) {
        reached[other] = 1;
        silent_ranks.push_back(other);
        continue;
      }
      const Report& report = *reports_[other];
      bool late_here = report.begun[rank] < partner.number;
      if (!late_here && report.waited < 0) continue;
      reached[other] = 1;
      if (report.waited >= 0) {
        waiting.push_back(other);
        least = std::min(least, report.idle);
      } else {
        late.push_back(other);
      }
    }
  }
  std::string waited = seconds(mine.waited), text;
  std::sort(waiting.begin(), waiting.end());
  if (!silent_ranks.empty()) {
    for (int rank : silent_ranks) {
      text += (text.empty() ? "rank " : "\nnote: rank ") + std::to_string(rank) + " " + silent(rank);
    }
    text += "\nnote: nothing has moved for " + seconds(mine.idle) + "; " + listed(waiting) +
            (waiting.size() > 1 ? " wait" : " waits");
  } else if (!late.empty()) {
    bool excused = std::any_of(late.begin(), late.end(), [&](int rank) { return reports_[rank]->busy > 0; });
    std::lock_guard<std::mutex> lock(mutex_);
    if (excused || active_.empty() || mine.idle < patience(*active_.front().operation, true)) return;
    text = listed(late) + (late.size() > 1 ? " have" : " has") + " not come within " + waited;
    for (size_t i = 0; i < std::min<size_t>(late.size(), 4); ++i) text += described(late[i], *reports_[late[i]]);
  } else {
    if (least < bound_) return;
    bool same = true;
    for (int rank : waiting) same &= reports_[rank]->where == mine.where;
    text = same ? "all ranks have come, and nothing has moved for " + seconds(least)
                : "the ranks wait for one another since " + seconds(least) + ", in another order of collectives";
    for (size_t i = 0; i < std::min<size_t>(waiting.size(), 4); ++i) {
      text += "\nnote: rank " + std::to_string(waiting[i]) + " waits in " + reports_[waiting[i]]->where;
    }
  }
  judge(text, mine.where);
}

void Watch::judge(const std::string& text, const std::string& line) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!verdict_.empty()) return;
    verdict_ = text;
    line_ = line;
    effective_ = now() + kSettle;
    recorder_.add(Recorder::kVerdict, text.substr(0, text.find('\n')), 0, 0, 0);
  }
  Writer writer;
  writer.put(text);
  writer.put(line);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != own_) send(rank, kVerdict, writer.bytes());
  }
}

}  // namespace commplan
