// Runs a collective on several arrays as on one buffer. Arrays are copied into the buffer when a part of it is first
// read, and out of it as soon as a part is final, so most copies overlap with messages. Both buffers are reused,
// because touching fresh memory would take longer than the copies.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace commplan {
namespace {

constexpr int64_t kBlock = 256 * 1024;  // bytes of the input buffer that are filled at once

class PackedRun final : public Operation {
 public:
  PackedRun(Channel& channel, const Packed& packed, std::vector<const void*> from, std::vector<void*> to,
            bool blocks)
      : Operation(channel, packed.list ? packed.list->where : packed.native->where),
        packing_(channel, packed, std::move(from), std::move(to)) {
    output_ = packing_.first();
    if (packed.list) {
      inner_ = run_list(channel, *packed.list, packing_.input(), packing_.output(), &packing_);
    } else {
      packing_.need(0, packed.from.nbytes);
      inner_ = run_native(channel, *packed.native, packing_.input(), packing_.output(), blocks);
    }
    look();
  }

  ~PackedRun() override {
    if (!done_ || failed()) packing_.abandon();
  }

  bool step() override {
    bool moved = !done_ && inner_->step();
    if (moved) look();
    return moved;
  }

  void break_off(const std::string& why) override {
    inner_->break_off(why);
    if (!blocks()) look();
  }

  bool blocks() const override { return inner_->blocks(); }
  bool bulk() const override { return inner_->bulk(); }
  const std::vector<Partner>& partners() const override { return inner_->partners(); }
  int64_t nbytes() const override { return inner_->nbytes(); }
  const std::vector<int32_t>& links() const override { return inner_->links(); }

 private:
  // Completes this operation if the inner one is done.
  void look() {
    if (!inner_->done()) return;
    error_ = inner_->error();
    if (error_.empty()) packing_.finish();
    done_ = true;
  }

  Packing packing_;
  std::unique_ptr<Operation> inner_;
};

}  // namespace

size_t Layout::first(int64_t offset) const {
  auto behind = [](int64_t at, const Run& run) { return at < run.offset + run.nbytes; };
  return std::upper_bound(runs.begin(), runs.end(), offset, behind) - runs.begin();
}

Packing::Packing(Channel& channel, const Packed& packed, std::vector<const void*> from, std::vector<void*> to)
    : channel_(channel), packed_(packed), from_(std::move(from)), to_(std::move(to)) {
  if (!packed.from.direct()) {
    have_.resize((packed.from.nbytes + kBlock - 1) / kBlock);
    input_ = channel.take(packed.from.nbytes, &input_capacity_);
  }
  if (!packed.to.direct()) output_ = channel.take(packed.to.nbytes, &output_capacity_);
}

Packing::~Packing() {
  if (input_) channel_.give(std::move(input_), input_capacity_);
  if (output_) channel_.give(std::move(output_), output_capacity_);
}

void Packing::need(int64_t offset, int64_t nbytes) {
  if (packed_.from.direct()) return;
  const std::vector<Run>& runs = packed_.from.runs;
  for (int64_t block = offset / kBlock; block * kBlock < offset + nbytes; ++block) {
    if (have_[block]) continue;
    have_[block] = 1;
    int64_t at = block * kBlock, end = std::min(at + kBlock, packed_.from.nbytes);
    for (size_t i = packed_.from.first(at); at < end; ++i) {
      int64_t begin = i < runs.size() ? std::min(end, runs[i].offset) : end;
      if (at < begin) std::memset(input_.get() + at, 0, begin - at);
      at = std::max(at, begin);
      if (at == end) break;
      int64_t some = std::min(end, runs[i].offset + runs[i].nbytes) - at;
      auto* array = static_cast<const char*>(from_[runs[i].array]);
      std::memcpy(input_.get() + at, array + runs[i].at + (at - runs[i].offset), some);
      at += some;
    }
  }
}

void Packing::deliver(int64_t at, int64_t nbytes) {
  if (packed_.to.direct()) return;
  const std::vector<Run>& runs = packed_.to.runs;
  int64_t end = at + nbytes;
  for (size_t i = packed_.to.first(at); i < runs.size() && runs[i].offset < end; ++i) {
    int64_t begin = std::max(at, runs[i].offset);
    int64_t some = std::min(end, runs[i].offset + runs[i].nbytes) - begin;
    char* array = static_cast<char*>(to_[runs[i].array]);
    std::memcpy(array + runs[i].at + (begin - runs[i].offset), output_.get() + begin, some);
  }
}

void Packing::finish() {
  if (!packed_.list) deliver(0, packed_.to.nbytes);
  for (auto [offset, nbytes] : packed_.late) deliver(offset, nbytes);
}

void Packing::abandon() {
  input_.release();
  output_.release();
}

std::unique_ptr<Operation> run_packed(Channel& channel, const Packed& packed, std::vector<const void*> from,
                                      std::vector<void*> to, bool blocks) {
  return std::make_unique<PackedRun>(channel, packed, std::move(from), std::move(to), blocks);
}

}  // namespace commplan
