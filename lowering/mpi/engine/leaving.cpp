// How ranks leave a channel. A rank whose program ends, or that closes its channel or has failed, sends a message to
// all other ranks with the number of the last operation that it has begun with each. A rank that waits for a later
// one gets an error. MPI is finalized only after all ranks have left: a rank that has ended may still have running
// operations.
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "watch.h"

namespace commplan {

void Operation::join(const std::vector<int32_t>& ranks) {
  for (int32_t rank : ranks) partners_.push_back({rank, channel_.next(rank)});
}

std::vector<int32_t> Channel::others(MPI_Comm part) const {  // `part` has a subset of the ranks of `comm`
  MPI_Group theirs, all;
  int many = 0;
  MPI_Comm_group(part, &theirs);
  MPI_Comm_group(comm, &all);
  MPI_Group_size(theirs, &many);
  std::vector<int32_t> places(many), ranks(many);
  for (int i = 0; i < many; ++i) places[i] = i;
  MPI_Group_translate_ranks(theirs, many, places.data(), all, ranks.data());
  MPI_Group_free(&theirs);
  MPI_Group_free(&all);
  ranks.erase(std::find(ranks.begin(), ranks.end(), rank_));
  return ranks;
}

void Channel::part(bool leaves) {
  if (watch_) watch_->leave(leaves);
  std::lock_guard<std::mutex> lock(leaving_);
  if (!collective_ || left_ || (ended_ && !leaves)) return;
  ended_ = true;
  left_ = leaves;
  std::string why = verdict();
  if (cause_.empty()) cause_ = why.substr(0, why.find('\n'));
  if (cause_.empty()) cause_ = "an operation failed on rank " + std::to_string(rank_);
  // Must stay valid until they are received.
  std::vector<LeaveMessage>& messages = leaves ? leave_messages_ : end_messages_;
  messages.resize(lasts_.size());
  for (int rank = 0; rank < static_cast<int>(messages.size()); ++rank) {
    if (rank == rank_) continue;
    LeaveMessage& message = messages[rank];
    message.leaves = leaves;
    message.last = fails() ? kFailed : begun_[rank];
    if (fails()) std::snprintf(message.cause, sizeof message.cause, "%s", cause_.c_str());
    MPI_Request request;
    int code = MPI_Isend(&message, sizeof message, MPI_BYTE, rank, static_cast<int>(tags_), comm, &request);
    // Otherwise the rank has failed, or `comm` is revoked.
    if (code == MPI_SUCCESS) leave_requests_.push_back(request);
  }
}

bool Channel::listen() {
  std::lock_guard<std::mutex> lock(leaving_);
  for (;;) {
    int flag = 0;
    MPI_Message message;
    MPI_Status status;
    int code = MPI_Improbe(MPI_ANY_SOURCE, static_cast<int>(tags_), comm, &flag, &message, &status);
    if (code != MPI_SUCCESS) return false;
    if (!flag) return true;
    LeaveMessage heard{kFailed, true, {}};  // if the sender fails before the message has arrived
    MPI_Mrecv(&heard, sizeof heard, MPI_BYTE, &message, MPI_STATUS_IGNORE);
    if (!heard.leaves) {
      ends_[status.MPI_SOURCE] = heard.last;
      continue;
    }
    lasts_[status.MPI_SOURCE] = heard.last;
    causes_[status.MPI_SOURCE] = heard.cause;
  }
}

void Channel::break_off(Operation& operation) {
  std::string why = verdict();
  if (!why.empty() && !operation.where().empty()) why += "; " + operation.where();
  if (why.empty()) why = fails() ? "an earlier operation failed: " + broken_ : missing(operation);
  if (!why.empty()) operation.break_off(why);
}

void Channel::interrupt(Operation& operation) {
  std::string line = operation.where().empty() ? "" : "; " + operation.where();
  operation.break_off("interrupted" + line);
}

// A rank whose program has ended is reported before failed ranks, since it may be the cause of their failure.
std::string Channel::missing(const Operation& operation) {
  listen();
  std::string why;
  {
    std::lock_guard<std::mutex> lock(leaving_);
    for (const Partner& partner : operation.partners()) {
      int64_t last = last_of(partner.rank);
      if (partner.number <= last) continue;
      if (last >= 0) {
        why = "the program has ended on rank " + std::to_string(partner.rank);
        break;
      }
      if (why.empty()) why = causes_[partner.rank];
      if (why.empty()) why = "an operation failed on rank " + std::to_string(partner.rank);
    }
  }
  if (why.empty()) return {};
  note_cause(why);
  return operation.where().empty() ? why : why + "; " + operation.where();
}

std::vector<int> Channel::gone(const Operation& operation) {
  std::vector<int> ranks = dead(comm);
  std::lock_guard<std::mutex> lock(leaving_);
  for (const Partner& partner : operation.partners()) {
    int64_t last = last_of(partner.rank);
    if (last >= 0 && last < partner.number) ranks.push_back(partner.rank);
  }
  return ranks;
}

void Channel::note_cause(const std::string& why) {
  std::lock_guard<std::mutex> lock(leaving_);
  if (cause_.empty()) cause_ = why;
}

void Channel::revoke_all() {
  if (!collective_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  revoke(comm);
  for (MPI_Comm other : others_) revoke(other);
}

// Why an operation has failed. If this rank waited for a living one, the cause may arrive a moment later: the rank
// that died, or the reason for which another rank canceled the operation.
std::string Channel::loss(const Operation& operation, int rank) {
  std::string line = operation.where().empty() ? "" : "; " + operation.where();
  constexpr int64_t kNews = 3'000'000'000;  // nanoseconds to wait for the cause
  constexpr int64_t kPause = 10'000'000;    // nanoseconds between two checks
  std::vector<int> ranks = dead(comm);
  for (int64_t until = now() + kNews; ranks.empty() && now() < until; ranks = dead(comm)) {
    std::string cause = missing(operation);
    if (!cause.empty()) return cause;
    std::string reason = verdict();  // no rank has failed: the watchdog has revoked it
    if (!reason.empty()) return reason + line;
    sleep_ns(kPause);
  }
  revoke_all();
  if (ranks.empty() && rank >= 0) ranks.push_back(rank);
  if (ranks.empty()) return "another rank reported that a process has died" + line;
  std::string named = ranks.size() > 1 ? "ranks " : "rank ";
  for (size_t i = 0; i < ranks.size(); ++i) named += (i ? ", " : "") + std::to_string(ranks[i]);
  named += ranks.size() > 1 ? " have died" : " has died";
  note_cause(named);
  return named + line;
}

void Channel::end(const std::string& why) {
  {
    std::scoped_lock lock(order, mutex_);
    if (closed_.empty()) closed_ = why;
  }
  part(false);
}

void Channel::close(const std::string& why) {
  {
    std::scoped_lock lock(order, mutex_);
    if (closed_.empty()) closed_ = why;
  }
  part(true);
  std::unique_lock<std::mutex> lock(mutex_);
  news_.wait(lock, [&] { return inside_ == 0 && resting(); });
  if (stopping_) return;
  stopping_ = true;
  work_.notify_one();
  buffers_.clear();
  lock.unlock();
  if (thread_.joinable()) thread_.join();
}

void Channel::await_others() {
  if (!collective_) return;
  if (watch_) watch_->part();
  constexpr int64_t kShortest = 100'000;   // the first pause between two checks, in nanoseconds
  constexpr int64_t kLongest = 10'000'000;  // the longest pause
  for (int64_t pause = kShortest, looked = now(); listen(); pause = std::min(pause * 5 / 4, kLongest)) {
    if (now() - looked >= kLook) {
      looked = now();
      std::vector<int> gone = dead(comm);
      std::lock_guard<std::mutex> lock(leaving_);
      for (int rank : gone) lasts_[rank] = kFailed;
    }
    if (all_left()) return;
    if (watch_ && watch_->abandoned() && !verdict().empty()) end_job(verdict());
    sleep_ns(pause);
  }
}

// Whether every other rank has left, and has received the message that this one has.
bool Channel::all_left() {
  std::lock_guard<std::mutex> lock(leaving_);
  int all_sent = 0;
  MPI_Testall(static_cast<int>(leave_requests_.size()), leave_requests_.data(), &all_sent, MPI_STATUSES_IGNORE);
  lasts_[rank_] = 0;
  return all_sent && std::count(lasts_.begin(), lasts_.end(), kRunning) == 0;
}

bool Channel::release() {
  auto clean = [](int64_t last) { return last >= 0; };
  auto left = [&] { return listen() && all_left() && std::all_of(lasts_.begin(), lasts_.end(), clean); };
  if (collective_ && (fails() || !left())) return false;
  if (watch_) watch_->release();
  return true;
}

std::string as_error(const std::string& why) {
  bool has_code = why.rfind("CP", 0) == 0 && why.find(": ") == 6;
  return "commplan: error[" + (has_code ? why.substr(0, 6) + "]: " + why.substr(8) : "CP0834]: " + why);
}

void end_job(const std::string& why) {
  size_t line = why.find('\n');
  std::string notes = line == std::string::npos ? std::string() : why.substr(line);
  std::fprintf(stderr, "%s: the job ends%s\n", as_error(why.substr(0, line)).c_str(), notes.c_str());
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

namespace {

// The channels of this process that have not been released. process: the process that opened the first one; 0 before.
struct Open {
  std::mutex mutex;
  std::vector<Channel*> channels;
  int process = 0;
};

Open& open() {
  static auto* all = new Open;
  return *all;
}

// An attribute callback of MPI_COMM_SELF, which MPI_Finalize calls first.
int leave_all(MPI_Comm, int, void*, void*) {
  if (open().process != getpid()) return MPI_SUCCESS;
  std::vector<Channel*> channels;
  {
    std::lock_guard<std::mutex> lock(open().mutex);
    channels = open().channels;
  }
  for (Channel* channel : channels) channel->close("MPI has been finalized");
  for (Channel* channel : channels) {
    // A rank that blocks the others does not leave, either. This rank may be the one, and receive the verdict
    // late.
    if (!channel->verdict().empty()) end_job(channel->summary());
    channel->await_others();
  }
  return MPI_SUCCESS;
}

}  // namespace

void end_channels() {
  std::lock_guard<std::mutex> lock(open().mutex);
  for (Channel* channel : open().channels) {
    if (channel->collective()) channel->end("this process is ending");
  }
}

bool release_channel(Channel* channel) {
  if (!channel->release()) return false;
  std::lock_guard<std::mutex> lock(open().mutex);
  auto& channels = open().channels;
  channels.erase(std::remove(channels.begin(), channels.end(), channel), channels.end());
  return true;
}

Channel* open_channel(MPI_Comm comm, bool collective) {
  std::lock_guard<std::mutex> lock(open().mutex);
  if (open().process == 0) {
    int key = MPI_KEYVAL_INVALID;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, leave_all, &key, nullptr);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
    open().process = getpid();
  }
  open().channels.push_back(new Channel(comm, collective));
  return open().channels.back();
}

}  // namespace commplan
