// Runs an instruction list: an instruction is issued once its dependencies are complete, earlier instructions first.
//
// For each peer a bounded number of messages is in flight in each direction, so that early parts of a list do not
// crowd out later ones. Receives are posted in the order of the list, and the earliest send that is not issued may
// exceed the bound. Lists from one program therefore cannot block each other, for any bound and any send protocol of
// MPI.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace commplan {
namespace {

class ListRun final : public Operation {
 public:
  ListRun(Channel& channel, const List& list, const void* input, void* output, Packing* packing)
      : Operation(channel, list.where), list_(list), packing_(packing), waits_(list.waits), sent_(list.code.size()),
        landed_(list.code.size()), completed_(2 * list.peers.size()), issued_(list.peers.size()) {
    join(list.peers);
    output_ = output;
    buffers_[kInput] = static_cast<char*>(const_cast<void*>(input));
    buffers_[kOutput] = static_cast<char*>(output);
    if (list.scratch > 0) scratch_ = channel.take(list.scratch, &scratch_capacity_);
    buffers_[kScratch] = scratch_.get();
    kernel_ = kernel(list.dtype, list.op);
    peers_.resize(list.peers.size());
    int64_t temporaries = 0;
    for (size_t p = 0; p < peers_.size(); ++p) {
      peers_[p].first_send = channel.reserve_sends(list.peers[p], list.sends[p]);
      int64_t receives = static_cast<int64_t>(list.receives[p].size());
      peers_[p].first_receive = channel.reserve_receives(list.peers[p], receives);
      temporaries += std::min(receives, list.window);
    }
    if (list.reduces) {
      temporary_ = channel.take(temporaries * list.largest, &temporary_capacity_);
      for (int64_t t = temporaries; t-- > 0;) free_.push_back(temporary_.get() + t * list.largest);
    }
    remaining_ = list.code.size();
    for (const Instruction& x : list.code) remaining_bytes_ += x.nbytes;
    done_ = remaining_ == 0;
    for (size_t i = 0; i < list.code.size(); ++i) {
      if (waits_[i] == 0) ready(static_cast<int32_t>(i));
    }
  }

  ~ListRun() override {
    if (!done_ || failed()) {
      abandon();
      return;
    }
    if (scratch_) channel_.give(std::move(scratch_), scratch_capacity_);
    if (temporary_) channel_.give(std::move(temporary_), temporary_capacity_);
  }

  bool step() override {
    if (done_) return false;
    bool moved = issue();
    if (done_) return true;
    if (!local_.empty()) {
      int32_t i = local_.top();
      local_.pop();
      run_local(list_.code[i]);
      complete(i);
      moved = true;
    }
    moved |= test();
    if (moved && !done_) issue();
    if (!moved && now() - looked_ > kLook) look();
    return moved;
  }

  bool bulk() const override { return list_.synchronous && remaining_ > kFew; }
  int64_t nbytes() const override { return remaining_bytes_; }
  const std::vector<int32_t>& links() const override { return list_.links; }

  // The earliest of these messages in the list: for each peer, the first one that has not arrived, and the first one
  // that the peer has not received.
  Progress progress() const override {
    Progress found;
    int64_t first = static_cast<int64_t>(list_.code.size());
    for (size_t p = 0; p < list_.peers.size(); ++p) {
      int64_t taken = completed_[2 * p + 1].load(std::memory_order_relaxed);
      if (taken == static_cast<int64_t>(list_.receives[p].size()) || list_.receives[p][taken] >= first) continue;
      first = list_.receives[p][taken];
      found.rank = list_.peers[p];
    }
    for (size_t p = 0; p < list_.peers.size(); ++p) {
      int64_t given = completed_[2 * p].load(std::memory_order_relaxed);
      if (given == list_.sends[p]) continue;
      if (list_.synchronous && given == 0 && issued_[p].load(std::memory_order_relaxed) > 0) found.absent = list_.peers[p];
      if (found.rank >= 0 && !found.sends) continue;
      for (int64_t i = 0; i < first; ++i) {
        const Instruction& x = list_.code[i];
        if (x.kind != kSend || static_cast<size_t>(x.peer) != p || given-- > 0) continue;
        first = i;
        found.rank = list_.peers[p];
        found.sends = true;
      }
    }
    auto after = std::upper_bound(list_.rounds.begin(), list_.rounds.end(), first);
    found.round = after - list_.rounds.begin();
    found.rounds = static_cast<int64_t>(list_.rounds.size());
    return found;
  }

 private:
  static constexpr size_t kFew = 16;  // with more instructions left, polling may be coarse

  struct Peer {
    std::priority_queue<int32_t, std::vector<int32_t>, std::greater<int32_t>> ready;  // sends
    int64_t first_send = 0, first_receive = 0;                                       // message numbers
    int64_t sending = 0, receiving = 0;                                              // in flight
    size_t posted = 0;                                                               // receives posted
  };

  char* at(int64_t buffer, int64_t offset) const { return buffers_[buffer] + offset; }

  // The memory that an instruction reads.
  char* source(const Instruction& x) const {
    if (packing_ && x.src == kInput) packing_->need(x.src_offset, x.nbytes);
    return at(x.src, x.src_offset);
  }

  void run_local(const Instruction& x) {
    char* to = at(x.dst, x.dst_offset);
    if (x.kind == kZero) {
      std::memset(to, 0, x.nbytes);
    } else if (to != at(x.src, x.src_offset)) {
      std::memcpy(to, source(x), x.nbytes);
    }
  }

  // All dependencies of i are complete. Receives without reduction check this when they are posted.
  void ready(int32_t i) {
    const Instruction& x = list_.code[i];
    if (x.kind == kSend) {
      peers_[x.peer].ready.push(i);
    } else if (x.kind == kCopy || x.kind == kZero) {
      local_.push(i);
    } else if (x.kind == kReceiveReduce && landed_[i]) {
      finished_.push_back(i);
    }
  }

  // Instruction `first` is complete: handles it, and the instructions that become complete through it.
  void complete(int32_t first) {
    finished_.push_back(first);
    while (!finished_.empty()) {
      int32_t i = finished_.back();
      finished_.pop_back();
      const Instruction& x = list_.code[i];
      if (x.kind == kReceiveReduce) {
        kernel_(at(x.dst, x.dst_offset), source(x), landed_[i], x.nbytes / size_of(list_.dtype));
        free_.push_back(landed_[i]);
      }
      if (x.kind == kReceiveReduce || x.kind == kReceive) --peers_[x.peer].receiving;
      if (packing_ && packing_->last(i)) packing_->deliver(x.dst_offset, x.nbytes);
      for (int64_t k = list_.begins[i]; k < list_.begins[i + 1]; ++k) {
        if (--waits_[list_.next[k]] == 0) ready(list_.next[k]);
      }
      remaining_bytes_ -= x.nbytes;
      if (--remaining_ == 0) done_ = true;
    }
  }

  // Posts the receives and sends that are ready, within the window. Returns whether there were any, or an error.
  bool issue() {
    bool issued = false;
    for (size_t p = 0; p < peers_.size() && !failed(); ++p) {
      Peer& peer = peers_[p];
      const std::vector<int32_t>& receives = list_.receives[p];
      while (peer.posted < receives.size() && peer.receiving < list_.window) {
        int32_t i = receives[peer.posted];
        if (list_.code[i].kind == kReceive && waits_[i] > 0) break;
        if (!post(peer, i)) return true;
        issued = true;
      }
      while (!peer.ready.empty() && (peer.sending < list_.window || peer.ready.top() == earliest())) {
        int32_t i = peer.ready.top();
        peer.ready.pop();
        if (!send(peer, i)) return true;
        issued = true;
      }
    }
    return issued;
  }

  // The earliest send that has not been issued.
  int32_t earliest() {
    while (earliest_ < static_cast<int32_t>(sent_.size()) &&
           (sent_[earliest_] || list_.code[earliest_].kind != kSend)) {
      ++earliest_;
    }
    return earliest_;
  }

  // Posts receive i. A message that is reduced is received into a temporary buffer. False after an error.
  bool post(Peer& peer, int32_t i) {
    const Instruction& x = list_.code[i];
    char* to = nullptr;
    if (x.kind == kReceive) {
      to = at(x.dst, x.dst_offset);
    } else {
      to = free_.back();
      free_.pop_back();
      temporary_of_.push_back({i, to});
    }
    ++peer.posted;
    ++peer.receiving;
    MPI_Request request;
    int code = MPI_Irecv(to, static_cast<int>(x.nbytes), MPI_BYTE, list_.peers[x.peer],
                         channel_.tag(peer.first_receive + x.message, list_.label), channel_.comm, &request);
    if (!check(code, "MPI_Irecv", list_.peers[x.peer])) return false;
    keep(request, i);
    return true;
  }

  bool send(Peer& peer, int32_t i) {
    const Instruction& x = list_.code[i];
    MPI_Request request;
    auto how = list_.synchronous ? MPI_Issend : MPI_Isend;
    int code = how(source(x), static_cast<int>(x.nbytes), MPI_BYTE, list_.peers[x.peer],
                   channel_.tag(peer.first_send + x.message, list_.label), channel_.comm, &request);
    if (!check(code, "MPI_Isend", list_.peers[x.peer])) return false;
    sent_[i] = 1;
    issued_[x.peer].fetch_add(1, std::memory_order_relaxed);
    ++peer.sending;
    keep(request, i);
    return true;
  }

  void keep(MPI_Request request, int32_t i) {
    requests_.push_back(request);
    owners_.push_back(i);
    lanes_.push_back(list_.code[i].kind == kSend ? static_cast<int32_t>(list_.code[i].peer) : -1);
  }

  // A send does not report that its receiver has failed.
  void look() {
    looked_ = now();
    if (!cut_off(channel_.comm, list_.peers)) return;
    error_ = channel_.loss(*this, -1);
    done_ = true;
  }

  // Handles the messages that are complete, in the order of the list. Returns whether there were any, or an error.
  bool test() {
    int some = 0;
    if (requests_.empty()) return false;
    int code = test_some(requests_, lanes_, &some, indices_, statuses_);
    if (code == MPI_ERR_IN_STATUS) {
      for (int k = 0; k < some; ++k) {
        int rank = list_.peers[list_.code[owners_[indices_[k]]].peer];
        if (!check(statuses_[k].MPI_ERROR, "a message", rank)) return true;
      }
    }
    if (!check(code, "MPI_Testsome")) return true;
    if (some == MPI_UNDEFINED || some == 0) return false;
    std::sort(indices_.begin(), indices_.begin() + some, std::greater<int>());
    arrived_.clear();
    for (int k = 0; k < some; ++k) {
      int at = indices_[k];
      arrived_.push_back(owners_[at]);
      requests_[at] = requests_.back();
      owners_[at] = owners_.back();
      lanes_[at] = lanes_.back();
      requests_.pop_back();
      owners_.pop_back();
      lanes_.pop_back();
    }
    std::sort(arrived_.begin(), arrived_.end());
    for (int32_t i : arrived_) arrive(i);
    return true;
  }

  // The message of instruction i is complete. A reduction also waits for its dependencies.
  void arrive(int32_t i) {
    const Instruction& x = list_.code[i];
    std::atomic<int64_t>& completed = completed_[2 * x.peer + (x.kind != kSend)];  // written by one thread only
    completed.store(completed.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (x.kind == kSend) --peers_[x.peer].sending;
    if (x.kind == kReceiveReduce) {
      auto found = std::find_if(temporary_of_.begin(), temporary_of_.end(), [i](auto& e) { return e.first == i; });
      landed_[i] = found->second;
      *found = temporary_of_.back();
      temporary_of_.pop_back();
      if (waits_[i] > 0) return;
    }
    complete(i);
  }

  // After a failure a message may still arrive: its buffers are never reused.
  void abandon() {
    scratch_.release();
    temporary_.release();
    for (size_t k = 0; k < requests_.size(); ++k) {
      if (requests_[k] != MPI_REQUEST_NULL && list_.code[owners_[k]].kind != kSend) MPI_Cancel(&requests_[k]);
    }
    drain(channel_.gone(*this), list_.peers, requests_, lanes_, list_.kept);
  }

  const List& list_;
  Packing* const packing_;
  std::vector<int32_t> waits_;  // by instruction, the number of dependencies that are not complete
  std::vector<char> sent_;      // by instruction, whether its send has been issued
  std::vector<char*> landed_;   // received bytes of a receive_reduce whose destination is not ready
  std::vector<std::atomic<int64_t>> completed_, issued_;  // messages to and from each peer; begun sends to each peer
  std::vector<Peer> peers_;
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<int32_t>> local_;  // ready: kCopy, kZero
  std::vector<int32_t> finished_;  // instructions whose completion must be handled
  std::vector<int32_t> arrived_;   // instructions whose messages are complete
  std::vector<int32_t> owners_;    // by request, the instruction
  std::vector<int32_t> lanes_;     // by request, the peer of a send, or -1 for a receive
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<int> indices_;
  std::vector<char*> free_;  // temporary buffers that no message uses
  std::vector<std::pair<int32_t, char*>> temporary_of_;  // the buffers of posted receives, by instruction
  std::unique_ptr<char[]> scratch_, temporary_;
  int64_t scratch_capacity_ = 0, temporary_capacity_ = 0;
  char* buffers_[kBuffers] = {};
  Kernel kernel_ = nullptr;
  size_t remaining_ = 0;  // instructions that are not complete
  int64_t remaining_bytes_ = 0;
  int64_t looked_ = 0;    // when failures were last looked for
  int32_t earliest_ = 0;  // no send before it remains to be issued
};

}  // namespace

bool Operation::check(int code, const char* call, int rank, const std::string& name) {
  if (code == MPI_SUCCESS) return true;
  error_ = lost(code) && name.empty() ? channel_.loss(*this, rank) : channel_.explain(code, call, where_, name);
  done_ = true;
  return false;
}

std::unique_ptr<Operation> run_list(Channel& channel, const List& list, const void* input, void* output,
                                    Packing* packing) {
  return std::make_unique<ListRun>(channel, list, input, output, packing);
}

}  // namespace commplan
