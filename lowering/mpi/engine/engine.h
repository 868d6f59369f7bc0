// The engine runs instruction lists over non-blocking MPI. It decides nothing: which instructions there
// are, what each waits for and in which order they are tried is settled in Python (instructions.py).
#pragma once

#include <mpi.h>

#include <atomic>
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

// line: the plan's, as errors say it. details: what the record says of the operation beside it.
struct Where {
  std::string line, details;
};

struct List {
  Where where;
  std::vector<Instruction> code;
  std::vector<int32_t> waits;   // how many instructions each waits for
  std::vector<int64_t> begins;  // instruction i is awaited by next[begins[i] .. begins[i + 1])
  std::vector<int32_t> next;
  std::vector<int32_t> peers;  // ranks
  std::vector<std::vector<int32_t>> receives;  // of each peer, in order
  std::vector<int64_t> sends;                  // how many to each peer
  std::vector<int32_t> ways;                   // 2 rank where some go to it, 2 rank + 1 where some come from it
  std::vector<int64_t> rounds;                 // the first instruction of each round
  int64_t scratch = 0, largest = 0;            // bytes
  int64_t window = 0;                          // messages in flight to one peer
  int64_t label = 0;           // part of its tags: messages of lists that differ never meet
  bool synchronous = false;                    // a send ends when its receiver has begun to take it
  bool kept = false;                           // its memory stays after a failure: sends need not end
  bool reduces = false;
  DType dtype = kF32;
  Reduction op = kSum;
};

// MPI's own collective instead of a list.
struct Native {
  Where where;
  Collective kind;
  MPI_Comm comm;
  std::vector<int32_t> ranks;  // the others of `comm`, as ranks of the channel
  int64_t count;  // elements of what every rank gives; of one block where there is one for each rank
  int root;
  DType dtype;
  Reduction op;
};

// Where `nbytes` of a buffer, from `offset`, lie in array number `array`, from its byte `at`.
struct Run {
  int64_t offset, array, at, nbytes;
};

// Arrays that make up a buffer of `nbytes`, or that a buffer falls into.
struct Layout {
  std::vector<Run> runs;  // by offset; what no run covers is zero, or dropped
  int64_t nbytes = 0;
  bool direct() const { return runs.size() == 1 && runs[0].nbytes == nbytes && runs[0].at == 0; }  // it is an array
  size_t first(int64_t offset) const;  // the first run that ends behind `offset`
};

// A list, or MPI's own, for several arrays as for one buffer in which they lie.
struct Packed {
  const List* list;
  const Native* native;
  Layout from, to;
  std::vector<char> last;  // of the list's instructions: whether what they write stays so
  std::vector<std::pair<int64_t, int64_t>> late;  // offset and bytes of what is ready with the whole list alone
};

// A message to a server, or its answer: `buffer` counts inputs or outputs, `offset` and `nbytes` are bytes.
struct Message {
  int64_t answer, peer, tag, buffer, offset, nbytes;
};

// A state of a server of this host, in memory that both see. `puts`: how often the server has set it since it began;
// `ready`: whether it had a value then; `requests` counts ours; `closed`: whether the server has ended.
struct Shared {
  int64_t peer;
  std::atomic<int64_t>*ready, *puts, *requests, *closed;
  const int64_t* told;  // how often this process has told it to set the state
};

// Elements of such a state that are met in place (shared.cpp).
struct SharedUpdate {
  int64_t state, input, output, offset, count, dtype;
  char* center;
};

// What a worker asks of servers: messages with tags of their own go out, what they answer comes in.
struct Request {
  Where where;
  std::vector<int32_t> peers;          // ranks
  std::vector<std::string> names;      // of the peers, for errors
  std::vector<std::vector<Message>> sends;  // to each peer, in the order in which they are posted
  std::vector<Message> receives;
  int64_t window = 0;  // messages in flight to one peer
  int64_t* told = nullptr;  // counted up when the request begins
  std::vector<Shared> shared;
  std::vector<SharedUpdate> meetings;
  int64_t factors[2] = {-1, -1}, types[2] = {};  // inputs with eta and rho, and their dtypes; -1: a literal
  double literals[2] = {};
};

// What a server says of itself, again and again. waits: whether a worker waits for others; patient: the server has a
// bound of its own for that; awaited: those that have nothing there that is not answered; gone: ranks that ask nothing
// more. moved: whether anything has come since.
struct Served {
  bool waits, patient, moved;
  std::vector<int32_t> awaited, gone;
};

class Channel;
class Watch;

// A rank that an operation exchanges messages with. `number`: of the operations that the two have in common.
struct Partner {
  int32_t rank;
  int64_t number;
};

// How far an operation is: in `round` of `rounds`, counted from 1, it waits for `rank`, to take a message where `sends`.
// absent: a rank that has not taken what it needs nothing else for, so that it has not come; -1 where none is known.
struct Progress {
  int64_t round = 0, rounds = 0;
  int32_t rank = -1, absent = -1;
  bool sends = false;
  bool operator==(const Progress& other) const {
    return round == other.round && rank == other.rank && sends == other.sends;
  }
};

// What a rank says when it leaves, or before that when its program ends: the last operation that it has begun with who
// hears it, or see `Channel`; and where one has failed what the first failure was, as far as it knows.
struct Parting {
  int64_t last = 0;
  bool leaves = false;
  char cause[120] = {};
};

// How often a thread looks that waits for other ranks: for `spin` nanoseconds it only gives way to others, then it sleeps,
// from `shortest` to `longest`; where many messages are under way it sleeps at once, for `bulk`.
struct Pace {
  int64_t spin = 1'000'000, shortest = 10'000, longest = 250'000, bulk = 50'000;
};

// Called now and then while an operation waits: where it is, and nanoseconds since anything has moved.
using Look = std::function<bool(const Progress& progress, int64_t idle)>;

// One thing to be driven until it is done. Once destroyed, nothing writes to its buffers any more.
class Operation {
 public:
  Operation(Channel& channel, const Where& where) : channel_(channel), where_(where.line), details_(where.details) {}
  virtual ~Operation() = default;
  virtual bool step() = 0;  // true where something happened
  virtual bool blocks() const { return false; }  // whether `step` waits for other ranks
  virtual void break_off(const std::string& why) { error_ = why, done_ = true; }  // where it blocks, by another thread
  virtual bool bulk() const { return false; }  // many messages: one more or less matters little
  virtual int64_t nbytes() const { return 0; }  // that are still on their way, of what may wait for its turn
  virtual Progress progress() const { return {}; }  // no rank where it does not tell; another thread may ask
  virtual const std::vector<int32_t>& ways() const { return none_; }  // those that it takes: 2 rank to it, + 1 from it
  bool done() const { return done_; }
  bool failed() const { return !error_.empty(); }
  const std::string& error() const { return error_; }
  const void* output() const { return output_; }
  const std::string& where() const { return where_; }
  const std::string& details() const { return details_; }
  virtual const std::vector<Partner>& partners() const { return partners_; }

 protected:
  bool check(int code, const char* call, int rank = -1, const std::string& name = {});
  void join(const std::vector<int32_t>& ranks);
  Channel& channel_;
  const std::string& where_;
  const std::string& details_;
  void* output_ = nullptr;
  bool done_ = false;
  std::string error_;
  std::vector<Partner> partners_;

 private:
  static inline const std::vector<int32_t> none_;
};

// The buffers of a packed operation, and the copies into and out of them (packing.cpp).
class Packing {
 public:
  Packing(Channel& channel, const Packed& packed, std::vector<const void*> from, std::vector<void*> to);
  ~Packing();
  const char* input() const { return packed_.from.direct() ? static_cast<const char*>(from_[0]) : input_.get(); }
  char* output() const { return packed_.to.direct() ? static_cast<char*>(to_[0]) : output_.get(); }
  void* first() const { return to_.front(); }
  bool last(size_t instruction) const { return packed_.last[instruction] != 0; }
  void need(int64_t offset, int64_t nbytes);     // this part of the input is going to be read
  void deliver(int64_t offset, int64_t nbytes);  // this part of the output has its values
  void finish();                                 // all of it has
  void abandon();                                // messages may still arrive: the buffers are never used again

 private:
  Channel& channel_;
  const Packed& packed_;
  std::vector<const void*> from_;
  std::vector<void*> to_;
  std::vector<char> have_;  // blocks of the input that are filled
  std::unique_ptr<char[]> input_, output_;
  int64_t input_capacity_ = 0, output_capacity_ = 0;
};

std::unique_ptr<Operation> run_list(Channel& channel, const List& list, const void* input, void* output,
                                    Packing* packing = nullptr);
// blocks: whether MPI's own collective is one call, rather than begun and tested.
std::unique_ptr<Operation> run_packed(Channel& channel, const Packed& packed, std::vector<const void*> from,
                                      std::vector<void*> to, bool blocks);
std::unique_ptr<Operation> run_native(Channel& channel, const Native& native, const void* input, void* output,
                                      bool blocks);
std::unique_ptr<Operation> run_request(Channel& channel, const Request& request, std::vector<const void*> inputs,
                                       std::vector<void*> outputs);
void apply(const SharedUpdate& x, int64_t begin, int64_t end, const void* input, void* output, const double factors[2]);
double number(const void* scalar, DType dtype);

// Deaths (faults.cpp), where MPI lives on after them.
bool lost(int code);                          // whether an error says that a process died, or that others found so
std::vector<int> dead(MPI_Comm comm);         // those known to have died
void acknowledge(MPI_Comm comm);              // of who has died: others can be heard again
void revoke(MPI_Comm comm);                   // whoever waits on it, anywhere, gets an error
bool can_revoke();                            // else `revoke` does nothing
bool cut_off(MPI_Comm comm, const std::vector<int32_t>& ranks);  // whether one of them has died, or `comm` is revoked
// MPI_Testsome, which frees no send that is under way. lanes: of each request the peer that it goes to, -1 for a receive;
// sends to one peer mostly end in the order in which they were posted, so that where one has not, others are asked only
// if nothing else is over.
int test_some(std::vector<MPI_Request>& requests, const std::vector<int32_t>& lanes, int* some, std::vector<int>& indices,
              std::vector<MPI_Status>& statuses);
constexpr int64_t kDrained = 2'000'000'000;  // nanoseconds that most of what is cancelled needs to end
bool drain(std::vector<MPI_Request>& requests, int64_t longest = kDrained);  // until nothing arrives; false: later
// The same for messages with `peers`, which lanes count; `gone` take nothing more. kept: see `List`.
bool drain(const std::vector<int>& gone, const std::vector<int32_t>& peers, std::vector<MPI_Request>& requests,
           std::vector<int32_t> lanes, bool kept = false, int64_t longest = kDrained);
int64_t now();                                // nanoseconds
constexpr int64_t kLook = 100'000'000;        // between two looks at who has left

// Of Python's interface in C: see signals.cpp.
struct PythonSignals {
  int (*ensure)() = nullptr;
  void (*release)(int) = nullptr;
  int (*check)() = nullptr;
  void (*fetch)(void**, void**, void**) = nullptr;
  void (*normalize)(void**, void**, void**) = nullptr;
};
void set_signals(const PythonSignals& functions);
bool interrupted();    // whether the handler of a signal has raised something, in Python's main thread alone
void* interruption();  // what it raised, once
void sleep_ns(int64_t nanoseconds);

// What all operations of one communicator share. Operations must begin in the same order on every rank, but for
// requests. `together`: what fails on one rank ends on all of them, and a rank that leaves tells the others how many
// operations it has begun with each, so that nobody waits for more.
//
// A channel is never freed: XLA may call a program of it at any time, and is told that it is closed.
class Channel {
 public:
  static constexpr int64_t kLabels = 1024;
  // Instead of the last operation of a rank; kJudged: it failed by the verdict of a watch, which all get.
  static constexpr int64_t kHere = INT64_MAX, kFailed = -1, kJudged = -2;

  Channel(MPI_Comm comm, bool together);
  ~Channel();

  // The tags of the next messages to and from a rank: no two in flight between two ranks are alike.
  int64_t reserve_sends(int rank, int64_t count);
  int64_t reserve_receives(int rank, int64_t count);
  int tag(int64_t number, int64_t label) const {
    return static_cast<int>(span_ > 0 ? number % span_ * kLabels + label : number % tags_);
  }

  std::unique_ptr<char[]> take(int64_t nbytes, int64_t* capacity);  // a used buffer, or a new one
  void give(std::unique_ptr<char[]> buffer, int64_t capacity);

  // An operation begins with `enter`, under `order`: why it may not, or nothing. Then comes `start` or `drive`.
  std::string enter();
  int64_t next(int rank) { return ++begun_[rank]; }     // of the operations in common with a rank
  int64_t start(std::unique_ptr<Operation> operation);  // hands it to the progress thread
  std::string finish(int64_t handle, const void* output);
  // By the calling thread, until done. pace: nanoseconds; look: false breaks it off, see `Look`.
  std::string drive(std::unique_ptr<Operation> operation, const Pace& pace = {}, const Look& look = {});
  void rest();                                              // waits until nothing that was started is under way
  bool busy();                                              // whether something is under way
  void end(const std::string& why);    // begins nothing more, and says so to the others
  void close(const std::string& why);  // the same, and waits for what is under way
  void await_others();                 // until every other rank has left, too
  bool release();                      // of a closed one that all have left: nothing of it is under way any more
  void watch(int64_t bound, int64_t first, int64_t busy, char* record);  // see `Watch`; all ranks call it alike, once
  void serve(const Served& served);
  void stop_watching();
  std::string verdict();  // of the watch, or empty
  std::string summary();  // of the verdict, with the plan's line

  // Requests send one after another, in the order in which they began.
  int64_t take_turn() { return turns_++; }
  bool has_turn(int64_t turn) const { return turn_.load() == turn; }
  void pass_turn(int64_t turn) { turn_.store(turn + 1); }

  void uses(MPI_Comm other);  // a communicator that goes down with this one
  std::string missing(const Operation& operation);   // which rank has left without it, or empty
  std::vector<int> gone(const Operation& operation);  // ranks that have died, or have ended without it
  std::vector<int32_t> others(MPI_Comm comm) const;  // the ranks there, but for this one
  std::string explain(int code, const char* call, const std::string& where, const std::string& name);
  std::string loss(const Operation& operation, int rank);  // why MPI has ended it: who died, or who broke it off

  const MPI_Comm comm;
  std::mutex order;  // held while an operation begins
  bool fails() const { return fails_.load(); }
  bool together() const { return together_; }

 private:
  struct Flight;
  void progress();
  void run_beside();  // the progress thread, where there is none yet
  void fail(const std::string& error);
  void part(bool leaves);  // tells the other ranks that this one leaves, or only that its program ends
  int64_t last_of(int rank) const { return ends_[rank] != kHere ? ends_[rank] : lasts_[rank]; }
  void note_cause(const std::string& why);
  void revoke_all();
  bool parted();
  bool listen();       // takes in which of them have left; false where MPI fails
  void break_off(Operation& operation);  // where it would never end
  void interrupt(Operation& operation);
  bool resting() const;

  const bool together_;
  std::vector<MPI_Comm> others_;
  int64_t turns_ = 0;
  std::atomic<int64_t> turn_{0};
  int64_t tags_ = 32768, span_ = 0;  // span_: of tags for each label, where there are enough
  std::unique_ptr<Watch> watch_;
  std::vector<int64_t> sent_, received_;
  std::mutex mutex_;
  std::condition_variable work_, news_;
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<Operation*> blocking_;  // that other threads have called
  std::vector<int64_t> begun_;        // by rank
  std::vector<std::pair<int64_t, std::unique_ptr<char[]>>> buffers_;  // that are kept for the next operations
  int64_t used_ = 0, kept_ = 0, most_ = 0;  // bytes of buffers; no more are kept than were in use at once
  std::thread thread_;
  std::string broken_, closed_;  // why nothing more can begin
  std::atomic<bool> fails_{false}, interrupted_{false};
  int inside_ = 0;  // calls that have entered
  int64_t handles_ = 0;
  bool stopping_ = false, ended_ = false, left_ = false;
  int own_ = 0;  // this rank
  std::mutex leaving_;
  std::vector<int64_t> ends_, lasts_;  // by rank that has ended, or left: the last operation that it began with this one
  std::vector<std::string> causes_;  // and the first failure, where it knows of one
  std::vector<Parting> end_words_, left_words_;  // what this rank has said to it
  std::string cause_;                // the first failure that this rank knows of, without the line that waits here
  std::vector<MPI_Request> saying_;
};

Channel* open_channel(MPI_Comm comm, bool together);
void end_channels();                     // of this process: see `Channel::end`
bool release_channel(Channel* channel);  // whether its communicators may be freed
void end_job(const std::string& why);  // where it would never end by itself
constexpr char kSays[] = "commplan: error[CP0834]: ";  // how a failure begins that is said in C++ (engine_errors.py)

}  // namespace commplan
