// Ranks of the engine as threads, each with channels of its own, over transport.cpp: `ranks SCENARIO`. Says "well" at
// its end; a sanitizer, or a wrong result, ends it otherwise.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>

#include "watch.h"

using namespace commplan;

namespace {

constexpr int kRanks = 3;
constexpr size_t kLive = 408 + 128 * 512 + 48 * 8192 + 4096, kRecord = kLive + sizeof(Live);
constexpr size_t kCapacity = 56, kHead = 64, kFailedAt = 80;

void require(bool fact, const std::string& text) {
  if (fact) return;
  std::fprintf(stderr, "wrong: %s\n", text.c_str());
  std::abort();
}

void on_ranks(const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
}

// An all-reduce of f32[count] around a ring, in messages of `piece` elements: reduce-scatter, then all-gather.
struct Ring {
  List list;
  int rank, count, piece;
  std::vector<std::vector<int>> waits;  // of each instruction
  std::vector<int64_t> messages{0, 0};  // to the next rank, from the one before

  Ring(int rank, int count, int piece, bool synchronous, const std::string& where)
      : rank(rank), count(count), piece(piece) {
    list.where.line = where;
    list.peers = {(rank + 1) % kRanks, (rank + kRanks - 1) % kRanks};
    list.window = 4;
    list.label = count % 512;
    list.synchronous = synchronous;
    list.reduces = true;
    std::vector<std::vector<int>> last(kRanks), read(kRanks);  // of each chunk: what wrote it, what read it
    for (int step = 0; step < 2 * kRanks - 2; ++step) {
      list.rounds.push_back(static_cast<int64_t>(list.code.size()));
      bool reducing = step < kRanks - 1;
      int gives = (rank + 2 * kRanks - step + (reducing ? 0 : kRanks)) % kRanks;
      int takes = (gives + kRanks - 1) % kRanks;
      bool first = step == 0;
      std::vector<int> sent, taken;
      for (int i = 0; i < pieces(gives); ++i) {
        sent.push_back(add(kSend, 0, first ? kInput : kOutput, gives, i, first ? std::vector<int>{} : std::vector<int>{last[gives][i]}));
      }
      read[gives] = first ? std::vector<int>{} : sent;
      for (int i = 0; i < pieces(takes); ++i) {
        auto before = reducing || read[takes].empty() ? std::vector<int>{} : std::vector<int>{read[takes][i]};
        taken.push_back(add(reducing ? kReceiveReduce : kReceive, 1, kInput, takes, i, before));
      }
      last[takes] = taken;
    }
    finish();
  }

  int begin(int chunk) const { return count * chunk / kRanks; }
  int pieces(int chunk) const { return (begin(chunk + 1) - begin(chunk) + piece - 1) / piece; }

  int add(InstructionKind kind, int64_t peer, int64_t src, int chunk, int i, const std::vector<int>& before) {
    int64_t at = begin(chunk) + i * piece, end = std::min(begin(chunk + 1), static_cast<int>(at) + piece);
    list.code.push_back({kind, peer, messages[peer]++, src, at * 4, kOutput, at * 4, (end - at) * 4});
    waits.push_back(before);
    return static_cast<int>(list.code.size()) - 1;
  }

  void finish() {
    size_t size = list.code.size();
    list.sends.resize(2);
    list.receives.resize(2);
    std::vector<std::vector<int32_t>> next(size);
    for (size_t i = 0; i < size; ++i) {
      list.waits.push_back(static_cast<int32_t>(waits[i].size()));
      for (int before : waits[i]) next[before].push_back(static_cast<int32_t>(i));
      const Instruction& x = list.code[i];
      if (x.kind == kSend) {
        ++list.sends[x.peer];
      } else {
        list.receives[x.peer].push_back(static_cast<int32_t>(i));
        list.largest = std::max(list.largest, (x.nbytes + 63) / 64 * 64);
      }
    }
    list.begins.push_back(0);
    for (auto& each : next) {
      list.next.insert(list.next.end(), each.begin(), each.end());
      list.begins.push_back(static_cast<int64_t>(list.next.size()));
    }
    list.links = {2 * list.peers[0], 2 * list.peers[1] + 1};
  }
};

// Lists are never freed while their channel is there: watch and record name them.
const Ring& kept(int rank, int count, int piece, bool synchronous, const std::string& where) {
  static auto* rings = new std::deque<Ring>;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  for (const Ring& ring : *rings) {
    bool same = ring.rank == rank && ring.count == count && ring.piece == piece;
    if (same && ring.list.synchronous == synchronous && ring.list.where.line == where) return ring;
  }
  return rings->emplace_back(rank, count, piece, synchronous, where);
}

// As the FFI handlers do it.
std::unique_ptr<Operation> begun(Channel& channel, const std::function<std::unique_ptr<Operation>()>& make, std::string* error) {
  std::lock_guard<std::mutex> lock(channel.order);
  *error = channel.enter();
  return error->empty() ? make() : nullptr;
}

std::string reduced(Channel& channel, const Ring& ring, const std::vector<float>& x, std::vector<float>& y) {
  std::string error;
  auto operation = begun(channel, [&] { return run_list(channel, ring.list, x.data(), y.data()); }, &error);
  return operation ? channel.drive(std::move(operation)) : error;
}

std::vector<float> own_values(int rank, int count, int round) {
  std::vector<float> x(count);
  for (int i = 0; i < count; ++i) x[i] = static_cast<float>((rank + 1) * 1000 + i % 97 + round);
  return x;
}

void check(const std::vector<float>& y, int round, const char* name) {
  for (size_t i = 0; i < y.size(); ++i) {
    float sum = 6000 + 3 * static_cast<float>(i % 97 + round);
    require(y[i] == sum, std::string(name) + ": element " + std::to_string(i) + " is " + std::to_string(y[i]));
  }
}

struct World {
  std::vector<Channel*> channels{std::vector<Channel*>(kRanks)};
  std::vector<MPI_Comm> comms{std::vector<MPI_Comm>(kRanks)};
  std::vector<std::vector<char>> records{std::vector<std::vector<char>>(kRanks, std::vector<char>(kRecord))};

  explicit World(MPI_Comm* handles) {
    on_ranks([&](int rank) {
      MPI_Comm_dup(handles[rank], &comms[rank]);
      channels[rank] = open_channel(comms[rank], true);
      int64_t capacity = 8192;
      std::memcpy(records[rank].data() + kCapacity, &capacity, sizeof capacity);
      channels[rank]->watch(records[rank].data());
    });
  }

  Live* live(int rank) { return reinterpret_cast<Live*>(records[rank].data() + kLive); }

  int64_t recorded(int rank, size_t at) const {
    int64_t number = 0;
    std::memcpy(&number, records[rank].data() + at, sizeof number);
    return number;
  }
};

// --- scenarios ---

// Of two sends to one rank that one is found which has ended, though the other one comes before it.
void ended_out_of_order(MPI_Comm comm, int rank) {
  char first = 1, second = 2;
  std::vector<MPI_Request> requests(1);
  std::vector<int> indices;
  std::vector<MPI_Status> statuses;
  int some = 0;
  if (rank == 0) {
    requests.resize(2);
    MPI_Issend(&first, 1, MPI_BYTE, 1, 1, comm, &requests[0]);
    MPI_Issend(&second, 1, MPI_BYTE, 1, 2, comm, &requests[1]);
    while (some == 0) test_some(requests, {0, 0}, &some, indices, statuses);
    require(some == 1 && indices[0] == 1, "the second send has ended");
    requests.pop_back();
    MPI_Issend(&second, 1, MPI_BYTE, 1, 3, comm, &requests.emplace_back());
    require(drain(requests), "the first send ends, too");
  }
  for (int tag : {2, 3, 1}) {
    if (rank == 1) MPI_Irecv(&first, 1, MPI_BYTE, 0, tag, comm, &requests[0]);
    for (int flag = rank != 1; !flag;) MPI_Test(&requests[0], &flag, MPI_STATUS_IGNORE);
  }
}

// Lists that are called, started, packed, and MPI's own, on two channels of each rank, which two threads drive.
void lists(MPI_Comm* handles) {
  World first(handles), second(handles);
  on_ranks([&](int rank) {
    ended_out_of_order(first.comms[rank], rank);
    auto work = [rank](Channel& channel, unsigned seed) {
      std::mt19937 draw(seed);
      for (int round = 0; round < 25; ++round) {
        int count = 1 + static_cast<int>(draw() % 3000), piece = 1 + static_cast<int>(draw() % 200);
        bool synchronous = draw() % 2 != 0;
        const Ring& ring = kept(rank, count, piece, synchronous, "line 6 of x.plan waits for it");
        std::vector<float> x = own_values(rank, count, round), y(count), z(count);
        // One is under way while another is called.
        std::string error;
        auto operation = begun(channel, [&] { return run_list(channel, ring.list, x.data(), y.data()); }, &error);
        require(error.empty(), error);
        int64_t handle = channel.start(std::move(operation));
        error = reduced(channel, ring, x, z);
        require(error.empty(), error);
        error = channel.finish(handle, y.data());
        require(error.empty(), error);
        check(y, round, "started");
        check(z, round, "called");
        // Two arrays, the second one first.
        if (count < 4) continue;
        int half = count / 2;
        std::vector<float> a(x.begin() + half, x.end()), b(x.begin(), x.begin() + half), c(count - half), d(half);
        Layout layout;
        layout.runs = {{0, 1, 0, half * 4}, {half * 4, 0, 0, (count - half) * 4}};
        layout.nbytes = count * 4;
        const Packed packed{&ring.list, nullptr, layout, layout, std::vector<char>(ring.list.code.size()), {{0, count * 4}}};
        auto make = [&] { return run_packed(channel, packed, {a.data(), b.data()}, {c.data(), d.data()}, true); };
        operation = begun(channel, make, &error);
        require(error.empty(), error);
        error = channel.drive(std::move(operation));
        require(error.empty(), error);
        d.insert(d.end(), c.begin(), c.end());
        check(d, round, "packed");
      }
    };
    std::thread other(work, std::ref(*second.channels[rank]), 11);
    work(*first.channels[rank], 5);
    other.join();
    // MPI's own, called and started.
    Channel& channel = *first.channels[rank];
    auto& native = *new Native{{"line 7 of x.plan waits for it", ""}, kAllReduce, first.comms[rank], {}, 500, 0, kF32, kSum};
    MPI_Comm_dup(first.comms[rank], &native.comm);
    native.ranks = channel.others(native.comm);
    channel.uses(native.comm);
    for (int round = 0; round < 10; ++round) {
      std::vector<float> x = own_values(rank, 500, round), y(500), z(500);
      std::string error;
      auto operation = begun(channel, [&] { return run_native(channel, native, x.data(), y.data(), false); }, &error);
      int64_t handle = channel.start(std::move(operation));
      error = channel.finish(handle, y.data());
      require(error.empty(), error);
      operation = begun(channel, [&] { return run_native(channel, native, x.data(), z.data(), true); }, &error);
      error = channel.drive(std::move(operation));
      require(error.empty(), error);
      check(y, round, "native, started");
      check(z, round, "native, called");
    }
    require(first.recorded(rank, kHead) > 100 && first.recorded(rank, kFailedAt) == 0, "the record");
    // The second one goes when all have left it, the first one with MPI.
    second.channels[rank]->close("the channel is closed");
    std::vector<float> x(10), y(10);
    require(reduced(*second.channels[rank], kept(rank, 10, 10, false, ""), x, y) == "the channel is closed", "a closed channel");
    while (!release_channel(second.channels[rank])) sleep_ns(1'000'000);
  });
  finalize();
}

// Workers ask a server, the last rank, for the double of what they send, in many messages.
void requests(MPI_Comm* handles) {
  constexpr int kMessages = 40, kEach = 50, kRounds = 15, kUp = 10, kDown = 1000;
  on_ranks([&](int rank) {
    MPI_Comm comm;
    MPI_Comm_dup(handles[rank], &comm);
    if (rank == kRanks - 1) {
      for (int left = (kRanks - 1) * kRounds * kMessages; left > 0;) {
        int flag = 0;
        MPI_Message message;
        MPI_Status status;
        MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &flag, &message, &status);
        if (!flag) {
          sleep_ns(10'000);
          continue;
        }
        std::vector<float> unit(kEach);
        MPI_Mrecv(unit.data(), kEach * 4, MPI_BYTE, &message, MPI_STATUS_IGNORE);
        for (float& value : unit) value *= 2;
        MPI_Request request;
        MPI_Issend(unit.data(), kEach * 4, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG - kUp + kDown, comm, &request);
        for (flag = 0; !flag; sleep_ns(1000)) MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
        --left;
      }
      return;
    }
    Channel& channel = *open_channel(comm, false);
    int64_t put_count = 0;
    Request request;
    request.where.line = "line 9 of x.plan waits for it";
    request.peers = {kRanks - 1};
    request.names = {"server `hub` (rank 2)"};
    request.sends.resize(1);
    request.window = 3;
    request.put_counter = &put_count;
    for (int i = 0; i < kMessages; ++i) {
      request.sends[0].push_back({0, 0, kUp + i, 0, i * kEach * 4, kEach * 4});
      request.receives.push_back({1, 0, kDown + i, 0, i * kEach * 4, kEach * 4});
    }
    for (int round = 0; round < kRounds; ++round) {
      std::vector<float> x = own_values(rank, kMessages * kEach, round), y(x.size());
      std::string error;
      auto make = [&] { return run_request(channel, request, {x.data()}, {y.data()}); };
      auto operation = begun(channel, make, &error);
      int64_t handle = channel.start(std::move(operation));
      error = channel.finish(handle, y.data());
      require(error.empty(), error);
      for (size_t i = 0; i < y.size(); ++i) require(y[i] == 2 * x[i], "an answer");
    }
    require(put_count == kRounds, "the requests are counted");
  });
  finalize();
}

std::string step(World& world, int rank, const char* line) {
  const Ring& ring = kept(rank, 100, 30, false, std::string(line) + " of x.plan waits for it");
  std::vector<float> x = own_values(rank, 100, 0), y(100);
  return reduced(*world.channels[rank], ring, x, y);
}

void expect(const std::string& text, const std::string& part) { require(text.find(part) != std::string::npos, text); }

void end(World& world) {
  on_ranks([&](int rank) { world.channels[rank]->close("over"); });
}

// Rank 1 does not come. The verdict that the sidecar writes ends the waits of the others, and those of rank 1.
void judged(MPI_Comm* handles) {
  World world(handles);
  std::atomic<int> judged_ranks{0};
  std::atomic<bool> absent{false};
  std::thread sidecar([&] {
    while (!absent) sleep_ns(1'000'000);
    for (int rank : {0, 2}) {
      while (__atomic_load_n(&world.live(rank)->waits, __ATOMIC_ACQUIRE) == 0) sleep_ns(1'000'000);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      Live& live = *world.live(rank);
      constexpr char kText[] = "rank 1 is stopped\nnote: PID 7\0line 6 of x.plan";
      std::memcpy(live.text, kText, sizeof kText);
      __atomic_store_n(&live.effective, now() + 100'000'000, __ATOMIC_RELEASE);
    }
  });
  on_ranks([&](int rank) {
    for (int i = 0; i < 5; ++i) require(step(world, rank, "line 6").empty(), "a step");
    if (rank == 1) absent = true;
    while (rank == 1 && judged_ranks < kRanks - 1) sleep_ns(10'000'000);
    expect(step(world, rank, "line 6"), "rank 1 is stopped\nnote: PID 7; line 6 of x.plan waits for it");
    // A rank prints this if it ends the job.
    require(world.channels[rank]->summary() == "rank 1 is stopped; line 6 of x.plan waits for it", "a summary");
    ++judged_ranks;
    expect(step(world, rank, "line 6"), "an earlier operation failed");
    require(world.live(rank)->left == 2 && world.live(rank)->waits == 0, "the state of the rank");
  });
  sidecar.join();
  require(world.recorded(0, kFailedAt) == 1, "a failure is recorded");
  end(world);
}

// A wait that is looked after: who has not come is known, and it ends when it is told to.
void looked_after(MPI_Comm* handles) {
  World world(handles);
  Channel& channel = *world.channels[0];
  const Ring& ring = kept(0, 100, 30, true, "line 6 of x.plan");
  std::vector<float> x = own_values(0, 100, 0), y(100);
  std::string error;
  auto operation = begun(channel, [&] { return run_list(channel, ring.list, x.data(), y.data()); }, &error);
  Progress seen;
  auto look = [&](const Progress& progress, int64_t idle) {
    seen = progress;
    return idle < 150'000'000;
  };
  require(channel.drive(std::move(operation), Pace{0, 1'000'000, 1'000'000, 1'000'000}, look) == "broken off", "a look");
  require(seen.absent == 1 && seen.rank == 2 && !seen.sends, "who has not come");
  end(world);
}

// One that has left, one whose program ends and that has yet to leave, one whose receives fail, and one that has
// something to do before it leaves.
void gone(MPI_Comm* handles) {
  looked_after(handles);
  World left(handles), ends(handles), failed(handles), last(handles);
  on_ranks([&](int rank) {
    require(step(left, rank, "line 6").empty(), "a step");
    if (rank == 2) {
      left.channels[rank]->close("over");
    } else {
      std::string error = step(left, rank, "line 6");
      require(error.find("the program has ended on rank 2; line 6") == 0, error);  // not who failed because of it
    }
    require(step(ends, rank, "line 6").empty(), "a step");
    if (rank == 2) ends.channels[rank]->end("this process is ending");
    std::string told = step(ends, rank, "line 6");
    require(told.find(rank == 2 ? "this process is ending" : "the program has ended on rank 2; line 6") == 0, told);
    require(step(failed, rank, "line 6").empty(), "a step");
    if (rank == 1) fail_receives(failed.comms[rank]);
    std::string error = step(failed, rank, "line 6");
    expect(error, rank == 1 ? "MPI_Irecv failed" : "an operation failed on rank 1; line 6");
    require(step(last, rank, "line 6").empty(), "a step");
    if (rank == 2) sleep_ns(300'000'000);
    last.channels[rank]->close("over");
    last.channels[rank]->await_others();
    require(last.live(rank)->parting > 0, "the wait for the others");
    while (!release_channel(last.channels[rank])) sleep_ns(1'000'000);
  });
  end(left);
  end(ends);
  end(failed);
}

}  // namespace

int main(int, char** words) {
  MPI_Comm* handles = make_world(kRanks);
  std::string name = words[1];
  if (name == "lists") lists(handles);
  if (name == "requests") requests(handles);
  if (name == "judged") judged(handles);
  if (name == "gone") gone(handles);
  std::puts("well");
}
