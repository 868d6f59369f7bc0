// Writes events into a mapped file, in the format of `commplan/recorder/file.py`.
#include <algorithm>
#include <cstring>

#include "watch.h"

namespace commplan {
namespace {

constexpr int64_t kNames = 512;                        // names in a record
constexpr int64_t kNameBytes = Recorder::kNameBytes;   // bytes of a name
constexpr int64_t kEvents = 8192;                      // events in the ring
constexpr int64_t kEnding = 4096;                      // bytes between the ring and the `Live` block

// The beginning of a record. unix_ns and boot_ns: the same time of the wall clock and the monotonic clock. capacity:
// `kEvents`. head: the number of events so far. names: the number of names. failed: 1 if an operation has failed.
struct Header {
  char magic[8];
  int64_t version, process, rank, ranks, unix_ns, boot_ns, capacity, head, names, failed;
  char host[64], machine[128], plan[128];
};
static_assert(sizeof(Header) == 408);

// An event in the ring. name: the index of its name. See `Recorder::add`.
struct Event {
  int64_t nanoseconds, kind, name, operation, runs, nbytes;
};

static_assert(sizeof(Live) == 4096);

Header& header(char* base) { return *reinterpret_cast<Header*>(base); }

}  // namespace

Live* Recorder::live() const {
  constexpr int64_t kLive = sizeof(Header) + kNames * kNameBytes + kEvents * sizeof(Event) + kEnding;
  return base_ == nullptr ? nullptr : reinterpret_cast<Live*>(base_ + kLive);
}

// Names that do not fit share the last entry.
int64_t Recorder::name(const std::string& text) {
  auto existing = names_.find(text);
  if (existing != names_.end()) return existing->second;
  int64_t& count = header(base_).names;
  int64_t index = std::min(count, kNames - 1);
  if (count < kNames) {
    char* to = base_ + sizeof(Header) + index * kNameBytes;
    std::memcpy(to, text.data(), std::min<size_t>(text.size(), kNameBytes - 1));
    ++count;
  }
  return names_[text] = index;
}

void Recorder::add(Happened kind, const std::string& text, int64_t operation, int64_t runs, int64_t nbytes) {
  if (base_ == nullptr) return;
  Header& head = header(base_);
  auto* events = reinterpret_cast<Event*>(base_ + sizeof(Header) + kNames * kNameBytes);
  events[head.head % head.capacity] = {now(), kind, name(text), operation, runs, nbytes};
  if (kind == kFailed || kind == kVerdict) head.failed = 1;
  __atomic_store_n(&head.head, head.head + 1, __ATOMIC_RELEASE);
}

}  // namespace commplan
