// A collective of several arrays as of one buffer. Arrays are copied into the buffer when a part of it is first
// read, and out of it as parts get their last value, so that most of the copying happens while messages are under
// way. Both buffers are kept for the next time: fresh memory would cost more than the copies.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace commplan {
namespace {

constexpr int64_t kBlock = 256 * 1024;

// The array that the byte at `offset` of the buffer belongs to; `begins` has the end of the last one too.
size_t array_of(const std::vector<int64_t>& begins, int64_t offset) {
  return std::upper_bound(begins.begin(), begins.end(), offset) - begins.begin() - 1;
}

class PackedRun final : public Operation {
 public:
  PackedRun(Channel& channel, const Packed& packed, std::vector<const void*> from, std::vector<void*> to)
      : Operation(channel, packed.list ? packed.list->where : packed.native->where),
        packing_(channel, packed, std::move(from), std::move(to)) {
    output_ = packing_.first();
    if (packed.list) {
      inner_ = run_list(channel, *packed.list, packing_.input(), packing_.output(), &packing_);
    } else {
      packing_.need(0, packed.nbytes());
      inner_ = run_native(channel, *packed.native, packing_.input(), packing_.output());
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

  bool bulk() const override { return inner_->bulk(); }

 private:
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

Packing::Packing(Channel& channel, const Packed& packed, std::vector<const void*> from, std::vector<void*> to)
    : channel_(channel), packed_(packed), from_(std::move(from)), to_(std::move(to)) {
  have_.resize((packed.nbytes() + kBlock - 1) / kBlock);
  input_ = channel.take(packed.nbytes(), &input_capacity_);
  output_ = channel.take(packed.nbytes(), &output_capacity_);
}

Packing::~Packing() {
  if (!input_) return;
  channel_.give(std::move(input_), input_capacity_);
  channel_.give(std::move(output_), output_capacity_);
}

void Packing::need(int64_t offset, int64_t nbytes) {
  for (int64_t block = offset / kBlock; block * kBlock < offset + nbytes; ++block) {
    if (have_[block]) continue;
    have_[block] = 1;
    int64_t at = block * kBlock, end = std::min(at + kBlock, packed_.nbytes());
    for (size_t i = array_of(packed_.begins, at); at < end; at = packed_.begins[++i]) {
      int64_t some = std::min(end, packed_.begins[i + 1]) - at;
      std::memcpy(input_.get() + at, static_cast<const char*>(from_[i]) + (at - packed_.begins[i]), some);
    }
  }
}

void Packing::deliver(int64_t at, int64_t nbytes) {
  int64_t end = at + nbytes;
  for (size_t i = array_of(packed_.begins, at); at < end; at = packed_.begins[++i]) {
    int64_t some = std::min(end, packed_.begins[i + 1]) - at;
    std::memcpy(static_cast<char*>(to_[i]) + (at - packed_.begins[i]), output_.get() + at, some);
  }
}

void Packing::finish() {
  if (!packed_.list) deliver(0, packed_.nbytes());
  for (auto [offset, nbytes] : packed_.late) deliver(offset, nbytes);
}

void Packing::abandon() {
  input_.release();
  output_.release();
}

std::unique_ptr<Operation> run_packed(Channel& channel, const Packed& packed, std::vector<const void*> from,
                                      std::vector<void*> to) {
  return std::make_unique<PackedRun>(channel, packed, std::move(from), std::move(to));
}

std::string call_packed(Channel& channel, const Packed& packed, std::vector<const void*> from,
                        std::vector<void*> to) {
  Packing packing(channel, packed, std::move(from), std::move(to));
  packing.need(0, packed.nbytes());
  std::string error = call_native(channel, *packed.native, packing.input(), packing.output());
  if (error.empty()) packing.finish();
  return error;
}

}  // namespace commplan
