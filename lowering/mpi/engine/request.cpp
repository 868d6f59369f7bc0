// Runs a worker's request to servers.
//
// All receives are posted at once: servers answer in any order, and a bound on both sides could deadlock. The number
// of sends in flight is bounded for each server. The requests of a process send one after another; their answers may
// overlap.
#include <algorithm>

#include "engine.h"

namespace commplan {
namespace {

class RequestRun final : public Operation {
 public:
  RequestRun(Channel& channel, const Request& request, std::vector<const void*> inputs, std::vector<void*> outputs)
      : Operation(channel, request.where), x_(request), inputs_(std::move(inputs)), outputs_(std::move(outputs)),
        peers_(request.peers.size()), turn_(channel.take_turn()) {
    output_ = outputs_.empty() ? nullptr : outputs_[0];
    if (x_.put_counter != nullptr) ++*x_.put_counter;
    for (const Shared& state : x_.shared) expected_puts_.push_back(*state.put_counter);
    for (int i = 0; i < 2; ++i) factors_[i] = factor(i);
    join(request.peers);
  }

  ~RequestRun() override {
    if (!passed_) channel_.pass_turn(turn_);
    if (done_ && !failed()) return;
    for (size_t k = 0; k < requests_.size(); ++k) {
      if (requests_[k] != MPI_REQUEST_NULL && owners_[k] == kAnswer) MPI_Cancel(&requests_[k]);
    }
    drain(channel_.gone(*this), x_.peers, requests_, owners_);
  }

  bool step() override {
    if (done_) return false;
    if (!passed_ && channel_.fails()) {
      end("an earlier request failed");
      return true;
    }
    bool moved = !posted_ && receive();
    if (!done_ && (looked_ == 0 || now() - looked_ > kLook)) look();
    if (!passed_ && channel_.has_turn(turn_)) moved |= work();
    moved |= !done_ && test();
    if (!done_ && passed_ && requests_.empty()) done_ = moved = true;
    return moved;
  }

  bool bulk() const override { return requests_.size() > kFew; }
  Progress progress() const override { return {0, 0, awaited_.load(std::memory_order_relaxed), false}; }

 private:
  static constexpr size_t kFew = 16;      // with more messages in flight, polling may be coarse
  static constexpr int32_t kAnswer = -1;  // in `owners_`, a receive
  static constexpr int kAbort = 3;        // the tag of a server's abort message
  static constexpr int64_t kSlice = 64 * 1024;  // elements per in-place update
  static constexpr int64_t kLook = 100'000'000;  // nanoseconds between two checks for failures

  struct Peer {
    size_t sent = 0;      // messages that have been posted
    int64_t sending = 0;  // messages in flight
  };

  // The value of eta (0) or rho (1).
  double factor(int i) const {
    return x_.factors[i] < 0 ? x_.literals[i] : number(inputs_[x_.factors[i]], static_cast<DType>(x_.types[i]));
  }

  // Posts all receives.
  bool receive() {
    posted_ = true;
    for (const Message& m : x_.receives) {
      MPI_Request request;
      char* to = static_cast<char*>(outputs_[m.buffer]) + m.offset;
      int code = MPI_Irecv(to, static_cast<int>(m.nbytes), MPI_BYTE, x_.peers[m.peer], static_cast<int>(m.tag),
                           channel_.comm, &request);
      if (!checked(code, "MPI_Irecv", m.peer)) return true;
      keep(request, kAnswer, static_cast<int32_t>(m.peer));
    }
    return !x_.receives.empty();
  }

  // Sends and updates, once it is this request's turn.
  bool work() {
    bool moved = false, all = true;
    for (size_t p = 0; p < peers_.size() && !failed(); ++p) {
      const std::vector<Message>& sends = x_.sends[p];
      bool many = static_cast<int64_t>(sends.size()) > x_.window;
      for (; peers_[p].sent < sends.size() && peers_[p].sending < x_.window; moved = true) {
        if (!send(p, sends[peers_[p].sent++], many)) return true;
      }
      all &= peers_[p].sent == sends.size();
    }
    if (update_ < x_.updates.size()) {
      moved |= update_some();
      all &= update_ == x_.updates.size();
    }
    if (all && !failed()) {
      for (const Shared& state : x_.shared) state.requests->fetch_add(1);
      channel_.pass_turn(turn_);
      passed_ = true;
    }
    return moved || all;
  }

  bool send(size_t p, const Message& m, bool synchronous) {
    MPI_Request request;
    const char* from = static_cast<const char*>(inputs_[m.buffer]) + m.offset;
    auto how = synchronous ? MPI_Issend : MPI_Isend;
    int code = how(from, static_cast<int>(m.nbytes), MPI_BYTE, x_.peers[p], static_cast<int>(m.tag), channel_.comm,
                   &request);
    if (!checked(code, "MPI_Isend", static_cast<int64_t>(p))) return false;
    ++peers_[p].sending;
    keep(request, static_cast<int32_t>(p), static_cast<int32_t>(p));
    return true;
  }

  // Applies at most `kSlice` elements of the next update in shared memory, once the state is ready.
  bool update_some() {
    const SharedUpdate& m = x_.updates[update_];
    if (updated_ == 0 && !ready(x_.shared[m.state])) return false;
    int64_t end = std::min(m.count, updated_ + kSlice);
    apply(m, updated_, end, inputs_[m.input], outputs_[m.output], factors_);
    updated_ = end;
    if (updated_ == m.count) {
      ++update_;
      updated_ = 0;
    }
    return true;
  }

  // Whether the server has completed the puts that this process began before the request.
  bool ready(const Shared& state) const {
    int64_t puts = state.puts->load(std::memory_order_acquire);
    return puts >= expected_puts_[&state - x_.shared.data()] && (puts > 0 || state.ready->load() != 0);
  }

  // Checks for aborted and ended servers, and for a verdict of the watchdog.
  void look() {
    looked_ = now();
    awaited_.store(awaited(), std::memory_order_relaxed);
    for (size_t p = 0; p < peers_.size() && !done_; ++p) {
      int flag = 0, length = 0;
      MPI_Message message;
      MPI_Status status;
      int code = MPI_Improbe(x_.peers[p], kAbort, channel_.comm, &flag, &message, &status);
      if (!checked(code, "MPI_Improbe", static_cast<int64_t>(p))) return;
      if (!flag) continue;
      MPI_Get_count(&status, MPI_BYTE, &length);
      std::string text(length, '\0');
      MPI_Mrecv(text.data(), length, MPI_BYTE, &message, MPI_STATUS_IGNORE);
      end(x_.names[p] + " gave up: " + text);
    }
    for (const Shared& state : x_.shared) {
      if (!done_ && state.closed->load() != 0) end(x_.names[state.peer] + " has ended");
    }
    std::string verdict = done_ ? std::string() : channel_.verdict();
    if (!verdict.empty()) end(verdict);
  }

  // The server that blocks this request: one whose answer is missing, or that has not received a message or
  // set its state.
  int32_t awaited() const {
    for (size_t k = 0; k < requests_.size(); ++k) {
      if (owners_[k] == kAnswer) return x_.peers[peer_of_[k]];
    }
    if (!requests_.empty()) return x_.peers[peer_of_.front()];
    return update_ < x_.updates.size() ? x_.peers[x_.shared[x_.updates[update_].state].peer] : -1;
  }

  // Ends the request with an error.
  void end(const std::string& why) {
    error_ = why + (x_.where.line.empty() ? "" : "; " + x_.where.line);
    done_ = true;
  }

  // Removes the messages that are complete. Returns whether there were any, or an error.
  bool test() {
    int some = 0;
    if (requests_.empty()) return false;
    int code = test_some(requests_, owners_, &some, indices_, statuses_);
    if (code == MPI_ERR_IN_STATUS) {
      for (int k = 0; k < some; ++k) {
        if (!checked(statuses_[k].MPI_ERROR, "a message", peer_of_[indices_[k]])) return true;
      }
    }
    if (!check(code, "MPI_Testsome")) return true;
    if (some == MPI_UNDEFINED || some == 0) return false;
    std::sort(indices_.begin(), indices_.begin() + some, std::greater<int>());
    for (int k = 0; k < some; ++k) {
      int at = indices_[k];
      if (owners_[at] != kAnswer) --peers_[owners_[at]].sending;
      requests_[at] = requests_.back();
      owners_[at] = owners_.back();
      peer_of_[at] = peer_of_.back();
      requests_.pop_back();
      owners_.pop_back();
      peer_of_.pop_back();
    }
    return true;
  }

  bool checked(int code, const char* call, int64_t peer) { return check(code, call, x_.peers[peer], x_.names[peer]); }

  void keep(MPI_Request request, int32_t owner, int32_t peer) {
    requests_.push_back(request);
    owners_.push_back(owner);
    peer_of_.push_back(peer);
  }

  const Request& x_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<Peer> peers_;
  std::vector<MPI_Request> requests_;
  std::vector<int32_t> owners_;   // by request, the peer of a send, or `kAnswer`
  std::vector<int32_t> peer_of_;  // by request, the peer
  std::vector<MPI_Status> statuses_;
  std::vector<int> indices_;
  std::vector<int64_t> expected_puts_;  // by shared state, the puts that this process began before the request
  double factors_[2] = {};              // eta and rho
  size_t update_ = 0;                   // the update in progress
  int64_t updated_ = 0;                 // its elements that are complete
  int64_t looked_ = 0;                  // when failures were last looked for; 0 before
  const int64_t turn_;
  std::atomic<int32_t> awaited_{-1};  // a rank, updated by `look`; may be read by another thread
  bool posted_ = false;  // whether the receives are posted
  bool passed_ = false;  // whether all sends are posted and updates complete, so that the next request may send
};

}  // namespace

std::unique_ptr<Operation> run_request(Channel& channel, const Request& request, std::vector<const void*> inputs,
                                       std::vector<void*> outputs) {
  return std::make_unique<RequestRun>(channel, request, std::move(inputs), std::move(outputs));
}

}  // namespace commplan
