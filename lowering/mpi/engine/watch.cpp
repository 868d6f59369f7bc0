// Records operations for the sidecar of the host, which finds ranks that block others
// (`commplan/sidecar/observer.py`).
#include "watch.h"

#include <algorithm>
#include <cstring>

namespace commplan {
namespace {

constexpr int64_t kStill = 1'000'000'000;  // nanoseconds without progress before it is recorded

// The line of the plan in `Where::line`, the text of `waiting_line` (engine_errors.py).
std::string line_of(const std::string& where) {
  constexpr char kEnd[] = " waits for it";
  size_t at = where.rfind(kEnd);
  return at == std::string::npos ? where : where.substr(0, at);
}

// The name of an operation in the record: the line, a zero byte, and the details (`commplan/recorder/file.py`).
std::string recorded(const Operation& operation) {
  const std::string& details = operation.details();
  std::string line = line_of(operation.where());
  return details.empty() ? line : line.substr(0, Recorder::kNameBytes - 2 - details.size()) + '\0' + details;
}

}  // namespace

int64_t Watch::begin(Operation& operation) {
  int64_t at = now();
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t runs = ++runs_[&operation.where()];
  active_.push_back({&operation, at, ++operations_, runs});
  recorder_.add(Recorder::kBegin, recorded(operation), operations_, runs, operation.nbytes());
  put(&Live::moved, at);
  put_oldest();
  return operations_;
}

void Watch::end(Operation& operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto mine = [&](const Active& each) { return each.operation == &operation; };
  auto at = std::find_if(active_.begin(), active_.end(), mine);
  auto kind = operation.failed() ? Recorder::kFailed : Recorder::kEnd;
  recorder_.add(kind, recorded(operation), at->number, at->runs, 0);
  active_.erase(at);
  moved();
  put_oldest();
}

void Watch::fail() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Active& each : active_) {
    recorder_.add(Recorder::kFailed, recorded(*each.operation), each.number, each.runs, 0);
  }
}

void Watch::waited(int64_t number, int64_t nanoseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  recorder_.add(Recorder::kWaited, "", number, 0, nanoseconds);
}

void Watch::record_progress() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (active_.empty() || now() - std::max(active_.front().since, get(&Live::moved)) < kStill) return;
  const Active& oldest = active_.front();
  Progress progress = oldest.operation->progress();
  if (progress.rank < 0 || (recorded_ == oldest.number && progress == progress_)) return;
  recorded_ = oldest.number;
  progress_ = progress;
  recorder_.add(Recorder::kRound, recorded(*oldest.operation), oldest.number, progress.round << 32 | progress.rounds,
                2 * static_cast<int64_t>(progress.rank) + progress.sends);
}

std::string Watch::verdict() {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t effective = get(&Live::effective);
  if (effective == 0 || now() < effective) return {};
  std::string text = live_->text;
  if (!is_judged_) recorder_.add(Recorder::kVerdict, text.substr(0, text.find('\n')), 0, 0, 0);
  is_judged_ = true;
  return text;
}

std::string Watch::summary() {
  std::string text = verdict();
  std::lock_guard<std::mutex> lock(mutex_);
  if (text.empty() || live_ == nullptr) return text;
  const char* line = live_->text + text.size() + 1;
  return text.substr(0, text.find('\n')) + (*line == 0 ? "" : std::string("; ") + line + " waits for it");
}

bool Watch::abandoned() {
  std::lock_guard<std::mutex> lock(mutex_);
  return get(&Live::abandoned) != 0;
}

void Watch::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  recorder_.release();
  live_ = nullptr;
}

}  // namespace commplan
