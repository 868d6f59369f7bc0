// The engine runs instruction lists over non-blocking MPI. It decides nothing: which instructions there
// are, what each waits for and in which order they are tried is settled in Python (instructions.py).
#pragma once

#include <mpi.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <string>
#include <thread>
#include <vector>

namespace commplan {

enum What : int64_t { kSend = 0, kReceive = 1, kReceiveReduce = 2, kCopy = 3, kZero = 4 };
enum Buffer : int64_t { kInput = 0, kOutput = 1, kScratch = 2, kBuffers = 3 };
enum DType : int64_t { kBool, kU8, kI32, kI64, kF16, kBF16, kF32, kF64, kDTypes };
enum Reduction : int64_t { kSum, kMax, kMin, kReductions };
enum Collective : int64_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast, kReduce, kScatter, kGather };

// out[i] = a[i] op b[i]; out may be a.
using Kernel = void (*)(void* out, const void* a, const void* b, int64_t count);
Kernel kernel(DType dtype, Reduction op);
int64_t size_of(DType dtype);

// The default floating-point environment while in scope: XLA runs its programs with subnormals flushed to zero.
class Rounding {
 public:
  Rounding();
  ~Rounding();

 private:
  alignas(16) char saved_[64];
};

// A row of the table that Python makes. Offsets and lengths are bytes, `peer` counts the list's peers,
// `message` counts the messages of one list from one rank to another.
struct Instruction {
  int64_t what, peer, message, src, src_offset, dst, dst_offset, nbytes;
};

struct List {
  std::vector<Instruction> code;
  std::vector<int32_t> waits;   // how many instructions each waits for
  std::vector<int64_t> begins;  // instruction i is awaited by next[begins[i] .. begins[i + 1])
  std::vector<int32_t> next;
  std::vector<int32_t> peers;  // ranks
  std::vector<std::vector<int32_t>> receives;  // of each peer, in order
  std::vector<int64_t> sends;                  // how many to each peer
  int64_t scratch = 0, largest = 0;            // bytes
  int64_t window = 0;                          // messages in flight to one peer
  bool synchronous = false;                    // a send ends when its receiver has begun to take it
  bool reduces = false;
  DType dtype = kF32;
  Reduction op = kSum;
};

// MPI's own collective instead of a list.
struct Native {
  Collective kind;
  MPI_Comm comm;
  int64_t count;  // elements of what every rank gives; of one block where there is one for each rank
  int root;
  DType dtype;
  Reduction op;
};

class Channel;

// One thing to be driven until it is done.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual bool step() = 0;  // true where something happened
  virtual bool bulk() const { return false; }  // many messages: one more or less matters little
  bool done() const { return done_; }
  bool failed() const { return !error_.empty(); }
  const std::string& error() const { return error_; }
  const void* output() const { return output_; }

 protected:
  bool check(int code, const char* call);
  void* output_ = nullptr;
  bool done_ = false;
  std::string error_;
};

std::unique_ptr<Operation> run_list(Channel& channel, const List& list, const void* input, void* output);
std::unique_ptr<Operation> run_native(const Native& native, const void* input, void* output);
std::string call_native(const Native& native, const void* input, void* output);  // blocks; an error or nothing

// What all operations of one communicator share. Operations must begin in the same order on every rank.
class Channel {
 public:
  explicit Channel(MPI_Comm comm);
  ~Channel();

  // The tags of the next messages to and from a rank: no two in flight between two ranks are alike.
  int64_t reserve_sends(int rank, int64_t count);
  int64_t reserve_receives(int rank, int64_t count);
  int tag(int64_t number) const { return static_cast<int>(number % tags_); }

  std::unique_ptr<char[]> take(int64_t nbytes, int64_t* capacity);  // a used buffer, or a new one
  void give(std::unique_ptr<char[]> buffer, int64_t capacity);

  int64_t start(std::unique_ptr<Operation> operation);  // hands it to the progress thread
  std::string finish(int64_t handle, const void* output);
  std::string drive(Operation& operation);  // by the calling thread, until done
  void stop();                              // joins the progress thread

  const MPI_Comm comm;
  std::mutex order;  // held while an operation begins
  std::string broken();  // why nothing more can run, or empty
  void fail(const std::string& error);

 private:
  struct Flight;
  void progress();

  int64_t tags_ = 32768;
  std::vector<int64_t> sent_, received_;
  std::mutex mutex_;
  std::condition_variable work_, news_;
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<std::pair<int64_t, std::unique_ptr<char[]>>> buffers_;
  std::thread thread_;
  std::string broken_;
  int64_t handles_ = 0;
  bool stopping_ = false;
};

}  // namespace commplan
