// The watchdog. If nothing has moved for too long, a rank queries the progress of all ranks, and reports the ranks
// that block the others (verdict.cpp). A separate thread queries and answers, on a separate communicator, so a rank
// answers regardless of its program. A rank that does not answer is stopped, dead, or unreachable.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "watch.h"

namespace commplan {
namespace {

constexpr int64_t kTick = 50'000'000, kGrace = 2'000'000'000, kAgain = 1'000'000'000;  // nanoseconds
constexpr int64_t kSlow = 4'000'000'000;  // for answers of ranks whose processes are runnable
constexpr int kFew = 3, kIntervals = 16;  // runs before the median is used; number of intervals in the median
constexpr int64_t kMedians = 5;
enum Tag { kAsk = 1, kAnswer = 2, kVerdict = 3 };

std::atomic<int> busy{0};

std::string line_of(const std::string& where) {
  constexpr char kEnd[] = " waits for it";
  size_t at = where.rfind(kEnd);
  return at == std::string::npos ? where : where.substr(0, at);
}

// In the record, the details follow the zero byte after the line (`commplan/recorder/file.py`).
std::string recorded(const Operation& operation) {
  const std::string& details = operation.details();
  std::string line = line_of(operation.where());
  return details.empty() ? line : line.substr(0, Recorder::kNameBytes - 2 - details.size()) + '\0' + details;
}

std::string described_progress(const Progress& progress) {
  if (progress.rank < 0) return {};
  std::string text = progress.rounds > 0 ? "in round " + std::to_string(progress.round) + " of " +
                                               std::to_string(progress.rounds) + ", "
                                         : std::string();
  return text + "for rank " + std::to_string(progress.rank) + (progress.sends ? " to receive" : "");
}

// Serialized numbers and texts. Both ends run the same build.
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

// One thread serves all watchdogs.
struct Watch::Watches {
  std::mutex mutex;
  std::vector<Watch*> running;
  std::thread thread;
};

Watch::Watches& Watch::all() {
  static auto* watches = new Watches;
  return *watches;
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

void add_busy(int change) { busy += change; }

Watch::Watch(MPI_Comm channel, int64_t bound, int64_t first, int64_t busy, char* record, bool requests)
    : bound_(bound), first_(first), busy_(busy), requests_(requests), recorder_(record) {
  MPI_Comm_dup(channel, &comm_);
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm_, &rank_);
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
  ended_.resize(size_, Channel::kRunning);
  left_.resize(size_, Channel::kRunning);
  moved_ = now();
  Watches& watches = all();
  std::lock_guard<std::mutex> lock(watches.mutex);
  watches.running.push_back(this);
  if (!watches.thread.joinable()) {
    watches.thread = std::thread([&watches] {
      pthread_setname_np(pthread_self(), kThreadName);
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

void Watch::has_ended(int rank, int64_t last, bool leaves) {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_[rank] = std::min(ended_[rank], last);
  if (leaves) left_[rank] = last;
}

std::vector<int64_t> Watch::locked(const std::vector<int64_t>& numbers) {
  std::lock_guard<std::mutex> lock(mutex_);
  return numbers;
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

// Requires `mutex_`.
int64_t Watch::time_limit(const Operation& operation, bool alive) {
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
      report.at = described_progress(oldest.operation->progress());
      report.partners = oldest.operation->partners();
    }
    if (reported_ > 0) {  // it has received all messages, unless it is busy
      bool serves = at - reported_ < kAgain;
      report.begun.assign(size_, serves && !patient_ ? INT64_MAX : 0);
      report.busy += serves && patient_;
      if (serves && worker_waits_ && !patient_) {
        report.waited = report.idle;
        report.partners = awaited_;
        report.where = "requests of workers";
      }
    }
  }
  // A rank that waits for a server may be late in other channels: its request has its own time limit.
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
    MPI_Request_get_status(sent->request, &flag, MPI_STATUS_IGNORE);  // see `test_some`
    if (flag) MPI_Test(&sent->request, &flag, MPI_STATUS_IGNORE);
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
      for (std::string* text : {&report.where, &report.at, &report.last, &report.stack}) *text = reader.text();
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
  for (const std::string* text : {&report.where, &report.at, &report.last, &report.stack}) writer.put(*text);
  send(rank, kAnswer, writer.bytes());
}

// Records the progress of the oldest operation if nothing has moved for a second, so that normal runs pay
// nothing.
void Watch::record_progress() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (active_.empty() || now() - std::max(active_.front().since, moved_.load()) < kAgain) return;
  const Active& oldest = active_.front();
  Progress progress = oldest.operation->progress();
  if (progress.rank < 0 || (recorded_ == oldest.number && progress == progress_)) return;
  recorded_ = oldest.number;
  progress_ = progress;
  recorder_.add(Recorder::kRound, recorded(*oldest.operation), oldest.number, progress.round << 32 | progress.rounds,
                2 * static_cast<int64_t>(progress.rank) + progress.sends);
}

// If an operation waits for too long, queries the other ranks, and evaluates their answers.
void Watch::look() {
  record_progress();
  int64_t at = now();
  if (asked_ > 0) {
    bool all = true, able = true;
    for (int rank = 0; rank < size_; ++rank) {
      if (asks_[rank] == 0 || reports_[rank] != nullptr) continue;
      all = false;
      able = able && could_run(rank);
    }
    if (all || at - asked_ > (able ? kSlow : kGrace)) {
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
    for (int rank = 0; rank < size_; ++rank) asks_[rank] = rank != rank_ && left_[rank] == Channel::kRunning;
  }
  reports_.clear();
  reports_.resize(size_);
  writer.put(++serial_);
  for (int rank = 0; rank < size_; ++rank) {
    if (asks_[rank]) send(rank, kAsk, writer.bytes());
  }
  asked_ = at;
}

void Watch::tell(const std::string& verdict, const std::string& line) {
  Writer writer;
  writer.put(verdict);
  writer.put(line);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) send(rank, kVerdict, writer.bytes());
  }
}

}  // namespace commplan
