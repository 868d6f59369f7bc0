// The engine runs instruction lists over non-blocking MPI. Python decides everything (instructions.py): the
// instructions, their dependencies, and the order in which they are tried.
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

// Python passes these as numbers: `SEND` and others, `INPUT` and others, and `DTYPES` of instructions.py, `_OPS` of
// collectives.py and `KINDS` of tuning.py.
enum InstructionKind : int64_t { kSend = 0, kReceive = 1, kReceiveReduce = 2, kCopy = 3, kZero = 4 };
enum Buffer : int64_t { kInput = 0, kOutput = 1, kScratch = 2, kBuffers = 3 };
enum DType : int64_t { kBool, kU8, kI32, kI64, kF16, kBF16, kF32, kF64, kDTypes };
enum Reduction : int64_t { kSum, kMax, kMin, kReductions };
enum Collective : int64_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast, kReduce, kScatter, kGather };

// out[i] = a[i] op b[i]; out may be a.
using Kernel = void (*)(void* out, const void* a, const void* b, int64_t count);
Kernel kernel(DType dtype, Reduction op);
int64_t size_of(DType dtype);  // bytes of an element

// While in scope, the thread has the default floating-point environment. XLA's threads flush subnormals to zero.
class Rounding {
 public:
  Rounding();
  ~Rounding();

 private:
  alignas(16) char saved_[64];
};

// A row of the table that Python creates. Offsets and lengths are bytes, `peer` is an index into the list's peers,
// `message` numbers the messages of one list from one rank to another.
struct Instruction {
  int64_t kind, peer, message, src, src_offset, dst, dst_offset, nbytes;
};

// line: the text with the line of the plan that waits, for errors; empty without a plan. details: a description of the
// operation, for flight records.
struct Where {
  std::string line, details;
};

// An instruction list (`Instructions` of instructions.py) with its settings (`Settings` of lists.py).
struct List {
  Where where;
  std::vector<Instruction> code;
  std::vector<int32_t> waits;   // by instruction, the number of instructions that must complete before it
  std::vector<int64_t> begins;  // instruction i precedes next[begins[i] .. begins[i + 1])
  std::vector<int32_t> next;
  std::vector<int32_t> peers;  // ranks
  std::vector<std::vector<int32_t>> receives;  // by peer, in order
  std::vector<int64_t> sends;                  // by peer, the number of sends
  std::vector<int32_t> links;                   // 2 rank for messages to a rank, 2 rank + 1 for messages from it
  std::vector<int64_t> rounds;                 // the first instruction of each round
  int64_t scratch = 0;                         // bytes of scratch memory
  int64_t largest = 0;                         // bytes of the largest message that is reduced, rounded up to 64
  int64_t window = 0;                          // messages in flight to one peer
  int64_t label = 0;                           // part of its tags: messages of different lists do not match
  bool synchronous = false;                    // a send completes only when its receive has started
  // Whether the buffers are never freed after a failure, so that pending sends may be abandoned.
  bool kept = false;
  bool reduces = false;  // whether it has reductions
  DType dtype = kF32;    // of reductions
  Reduction op = kSum;
};

// MPI's own collective instead of a list.
struct Native {
  Where where;
  Collective kind;
  MPI_Comm comm;
  std::vector<int32_t> ranks;  // the other ranks of `comm`, as ranks of the channel
  int64_t count;  // elements of every rank's operand; of one block if there is a block per rank
  int root;       // a rank of `comm`
  DType dtype;
  Reduction op;
};

// `nbytes` bytes at byte `offset` of a buffer are in array number `array`, from byte `at` on.
struct Run {
  int64_t offset, array, at, nbytes;
};

// The arrays that a buffer of `nbytes` is packed from, or unpacked to.
struct Layout {
  std::vector<Run> runs;  // by offset; gaps between runs are zero, or dropped
  int64_t nbytes = 0;
  // Whether the buffer is one array, so that nothing is copied.
  bool direct() const { return runs.size() == 1 && runs[0].nbytes == nbytes && runs[0].at == 0; }
  size_t first(int64_t offset) const;  // the first run that ends after `offset`
};

// A list, or MPI's own collective, whose buffers are packed from and unpacked to several arrays. One of `list` and
// `native` is null.
struct Packed {
  const List* list;
  const Native* native;
  Layout from, to;  // of the operand and of the result
  std::vector<char> last;  // by instruction of the list: whether its output is final
  // Offset and bytes of outputs that are final only when the list is complete.
  std::vector<std::pair<int64_t, int64_t>> late;
};

// A message to a server, or a message of its answer if `answer` is not 0. peer: an index into the request's peers.
// buffer: the index of the input or output. `offset` and `nbytes` are bytes.
struct Message {
  int64_t answer, peer, tag, buffer, offset, nbytes;
};

// A server's state in memory that is shared with this process (shared.py). peer: the server, an index into the
// request's peers. puts: how often the server has set the state since it began. ready: whether the state had a value
// when the server began. requests: how many requests workers have served themselves. closed: whether the server has
// ended. put_counter: how many puts of the state this process has begun.
struct Shared {
  int64_t peer;
  std::atomic<int64_t>*ready, *puts, *requests, *closed;
  const int64_t* put_counter;
};

// Elements of a shared state that a request updates in place (shared.cpp). state: an index into `Request::shared`.
// input, output: the arrays with the worker's values and with the result. offset, count: elements of the part of the
// state that begins at `center`.
struct SharedUpdate {
  int64_t state, input, output, offset, count, dtype;
  char* center;
};

// A worker's request to servers: it sends messages and receives the answers, all with fixed tags.
struct Request {
  Where where;
  std::vector<int32_t> peers;          // ranks
  std::vector<std::string> names;      // of the peers, for errors
  std::vector<std::vector<Message>> sends;  // to each peer, in the order in which they are posted
  std::vector<Message> receives;
  int64_t window = 0;  // messages in flight to one peer
  int64_t* put_counter = nullptr;  // incremented when the request begins
  std::vector<Shared> shared;
  std::vector<SharedUpdate> updates;
  // Of eta and rho: the index of the input that contains it and its dtype, or -1 and the value as a literal.
  int64_t factors[2] = {-1, -1}, types[2] = {};
  double literals[2] = {};
};

class Channel;
class Watch;

// A rank that an operation exchanges messages with. `number` counts the operations of the two ranks.
struct Partner {
  int32_t rank;
  int64_t number;
};

// The progress of an operation: in `round` of `rounds`, counted from 1, it waits for a message from `rank`, or if
// `sends` for `rank` to receive one. absent: a rank that has not received a message without dependencies, so it has
// not begun the operation; -1 if unknown.
struct Progress {
  int64_t round = 0, rounds = 0;
  int32_t rank = -1, absent = -1;
  bool sends = false;
  bool operator==(const Progress& other) const {
    return round == other.round && rank == other.rank && sends == other.sends;
  }
};

// The message of a rank that leaves the channel, or whose program ends. last: the last operation that it has begun
// with the receiver, or a constant of `Channel`. cause: the first failure that it knows of, if there was one.
struct LeaveMessage {
  int64_t last = 0;
  bool leaves = false;
  char cause[120] = {};
};

// The polling intervals of a thread that waits for other ranks. It yields for `spin` nanoseconds, then sleeps, from
// `shortest` up to `longest`. If many messages are in flight, it sleeps for `bulk` at once.
struct Pace {
  int64_t spin = 1'000'000, shortest = 10'000, longest = 250'000, bulk = 50'000;
};

// Called periodically while an operation waits, with its progress and the nanoseconds since anything moved. If it
// returns false, the operation is canceled.
using Look = std::function<bool(const Progress& progress, int64_t idle)>;

// An operation is driven by `step` until it is done. After its destruction nothing writes to its buffers.
class Operation {
 public:
  Operation(Channel& channel, const Where& where) : channel_(channel), where_(where.line), details_(where.details) {}
  virtual ~Operation() = default;
  virtual bool step() = 0;  // returns whether anything happened
  virtual bool blocks() const { return false; }  // whether `step` waits for other ranks
  // Ends the operation with an error. Called by the thread that calls `step`, or by another one if `step` blocks.
  virtual void break_off(const std::string& why) { error_ = why, done_ = true; }
  virtual bool bulk() const { return false; }  // whether many messages are in flight, so that polling may be coarse
  virtual int64_t nbytes() const { return 0; }  // remaining bytes to move; 0 for operations that are never deferred
  virtual Progress progress() const { return {}; }  // without rank if unknown; may be called by another thread
  // Links in use: 2 rank to a rank, 2 rank + 1 from it.
  virtual const std::vector<int32_t>& links() const { return no_links_; }
  bool done() const { return done_; }
  bool failed() const { return !error_.empty(); }
  const std::string& error() const { return error_; }
  const void* output() const { return output_; }
  const std::string& where() const { return where_; }
  const std::string& details() const { return details_; }
  virtual const std::vector<Partner>& partners() const { return partners_; }

 protected:
  // Whether an MPI call with this result has succeeded; otherwise the operation is done, with an error.
  bool check(int code, const char* call, int rank = -1, const std::string& name = {});
  void join(const std::vector<int32_t>& ranks);  // counts the operation with each rank, and sets `partners_`
  Channel& channel_;
  const std::string& where_;
  const std::string& details_;
  void* output_ = nullptr;
  bool done_ = false;
  std::string error_;
  std::vector<Partner> partners_;

 private:
  static inline const std::vector<int32_t> no_links_;
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
  void need(int64_t offset, int64_t nbytes);     // before this part of the input is read
  void deliver(int64_t offset, int64_t nbytes);  // after this part of the output is final
  void finish();                                 // after all of the output is final
  void abandon();                                // messages may still arrive: the buffers are never reused

 private:
  Channel& channel_;
  const Packed& packed_;
  std::vector<const void*> from_;
  std::vector<void*> to_;
  std::vector<char> have_;  // by block of the input, whether it is filled
  std::unique_ptr<char[]> input_, output_;  // null if the buffer is one array
  int64_t input_capacity_ = 0, output_capacity_ = 0;
};

// Begin an operation. The arguments, and the memory of inputs and outputs, must outlive it.
std::unique_ptr<Operation> run_list(Channel& channel, const List& list, const void* input, void* output,
                                    Packing* packing = nullptr);
// blocks: whether MPI's own collective is one blocking call.
std::unique_ptr<Operation> run_packed(Channel& channel, const Packed& packed, std::vector<const void*> from,
                                      std::vector<void*> to, bool blocks);
std::unique_ptr<Operation> run_native(Channel& channel, const Native& native, const void* input, void* output,
                                      bool blocks);
std::unique_ptr<Operation> run_request(Channel& channel, const Request& request, std::vector<const void*> inputs,
                                       std::vector<void*> outputs);
// Updates elements `begin` to `end` - 1 of an update (shared.cpp).
void apply(const SharedUpdate& x, int64_t begin, int64_t end, const void* input, void* output, const double factors[2]);
double number(const void* scalar, DType dtype);  // the value of a scalar of floats

// Failures of processes (faults.cpp), for MPI libraries that survive them.
bool lost(int code);                          // whether an error says that a process has failed
std::vector<int> dead(MPI_Comm comm);         // the ranks that are known to have failed
void acknowledge(MPI_Comm comm);              // receives from any source work again
void revoke(MPI_Comm comm);                   // all pending operations on it end with an error, on all ranks
bool can_revoke();                            // otherwise `revoke` has no effect
// Whether one of them has failed, or `comm` is revoked.
bool cut_off(MPI_Comm comm, const std::vector<int32_t>& ranks);
// MPI_Testsome that never frees a pending send. lanes: for each request, the peer of a send, or -1 for a receive.
// Sends to one peer usually complete in order. After the first incomplete one, the others are tested only if nothing
// else is complete.
int test_some(std::vector<MPI_Request>& requests, const std::vector<int32_t>& lanes, int* some, std::vector<int>& indices,
              std::vector<MPI_Status>& statuses);
constexpr int64_t kDrained = 2'000'000'000;  // nanoseconds in which most canceled requests complete
// Waits until all requests are complete; false if some are not after `longest` nanoseconds.
bool drain(std::vector<MPI_Request>& requests, int64_t longest = kDrained);
// The same for messages with `peers`, which `lanes` index (see `test_some`). Sends to the ranks `gone`, which receive
// nothing more, are not awaited, and no sends if `kept` (see `List`).
bool drain(const std::vector<int>& gone, const std::vector<int32_t>& peers, std::vector<MPI_Request>& requests,
           std::vector<int32_t> lanes, bool kept = false, int64_t longest = kDrained);
int64_t now();                                // monotonic, nanoseconds
constexpr int64_t kLook = 100'000'000;        // nanoseconds between two checks for ranks that have left

// Functions of Python's C API (signals.cpp).
struct PythonSignals {
  int (*ensure)() = nullptr;
  void (*release)(int) = nullptr;
  int (*check)() = nullptr;
  void (*fetch)(void**, void**, void**) = nullptr;
  void (*normalize)(void**, void**, void**) = nullptr;
};
void set_signals(const PythonSignals& functions);
// Whether a signal handler has raised an exception; always false outside of Python's main thread.
bool interrupted();
void* interruption();  // the exception; returned once
void sleep_ns(int64_t nanoseconds);

// The state that all operations of one communicator share. Operations must begin in the same order on every rank,
// except requests. If `collective`, a failure on one rank ends the operations of all ranks, and a rank that leaves
// reports the number of operations that it has begun with each rank, so that no rank waits for a later one.
//
// A channel is never freed: XLA may call a program of it at any time, which then fails with a message.
class Channel {
 public:
  static constexpr int64_t kLabels = 1024;  // number of labels in tags; equals `LABELS` of collectives.py
  // In place of the number of the last operation of a rank:
  static constexpr int64_t kRunning = INT64_MAX;  // it has not left, and its program has not ended
  static constexpr int64_t kFailed = -1;          // it has failed

  Channel(MPI_Comm comm, bool collective);
  ~Channel();

  // Reserve numbers for the next `count` messages to and from a rank, and return the first. Messages in flight have
  // different numbers, and therefore different tags.
  int64_t reserve_sends(int rank, int64_t count);
  int64_t reserve_receives(int rank, int64_t count);
  int tag(int64_t number, int64_t label) const {
    return static_cast<int>(span_ > 0 ? number % span_ * kLabels + label : number % tags_);
  }

  // A buffer of at least `nbytes` bytes, used before or new, whose size is stored in `capacity`.
  std::unique_ptr<char[]> take(int64_t nbytes, int64_t* capacity);
  void give(std::unique_ptr<char[]> buffer, int64_t capacity);  // returns a buffer for reuse

  // `enter` begins an operation, with `order` locked. It returns the reason if that is impossible. `start` or
  // `drive` follow.
  std::string enter();
  int64_t next(int rank) { return ++begun_[rank]; }     // the number of the next operation with a rank
  int64_t start(std::unique_ptr<Operation> operation);  // passes it to the progress thread; returns a handle
  // Waits for a started operation. Returns its error, also if its result is not at `output`; empty if there is none.
  std::string finish(int64_t handle, const void* output);
  // Runs it in the calling thread until it is done, and returns its error; empty if there is none.
  std::string drive(std::unique_ptr<Operation> operation, const Pace& pace = {}, const Look& look = {});
  void rest();                                              // waits until no started operation is running
  bool busy();                                              // whether any operation is running
  void end(const std::string& why);    // rejects further operations, and reports this to the other ranks
  void close(const std::string& why);  // the same, and waits for running operations
  void await_others();                 // waits until all other ranks have left
  // Frees a closed channel that all ranks have left; false if messages are pending.
  bool release();
  void watch(char* record);  // see `Watch`; called once
  std::string verdict();  // of the sidecar; empty if there is none
  std::string summary();  // of the verdict, with the line of the plan

  // Requests send one after another, in the order in which they began.
  int64_t take_turn() { return turns_++; }
  bool has_turn(int64_t turn) const { return turn_.load() == turn; }
  void pass_turn(int64_t turn) { turn_.store(turn + 1); }

  void record_failure();  // records that all pending operations fail, since this rank ends the job
  void uses(MPI_Comm other);  // adds a communicator that is revoked with this one
  // The rank that has left without this operation, as text; empty if there is none.
  std::string missing(const Operation& operation);
  std::vector<int> gone(const Operation& operation);  // ranks that have failed, or have ended without the operation
  std::vector<int32_t> others(MPI_Comm comm) const;  // the ranks of `comm` except this one, as ranks of the channel
  // The text of an error of MPI. call: the function of MPI. name: the other rank, as text; empty if unknown.
  std::string explain(int code, const char* call, const std::string& where, const std::string& name);
  // Why MPI has ended it: which process has failed, or which rank has canceled it.
  std::string loss(const Operation& operation, int rank);

  const MPI_Comm comm;
  std::mutex order;  // held while an operation begins
  bool fails() const { return fails_.load(); }
  bool collective() const { return collective_; }

 private:
  struct Flight;
  void progress();
  void start_thread();  // starts the progress thread on first use
  void fail(const std::string& error);  // rejects further operations, and reports the failure to the other ranks
  void part(bool leaves);  // reports to the other ranks that this rank leaves, or only that its program ends
  // The last operation that `rank` has begun with this rank, if it has left or its program has ended.
  int64_t last_of(int rank) const { return ends_[rank] != kRunning ? ends_[rank] : lasts_[rank]; }
  void note_cause(const std::string& why);  // sets `cause_` unless it is set
  void revoke_all();                        // `comm` and the communicators of `uses`
  bool all_left();
  bool listen();       // receives the leave messages of other ranks; false if MPI fails
  void break_off(Operation& operation);  // if it cannot complete
  void interrupt(Operation& operation);  // because of a signal
  bool resting() const;                  // whether no started operation is running; requires `mutex_`

  const bool collective_;
  std::vector<MPI_Comm> others_;  // of `uses`
  int64_t turns_ = 0;             // the number of turns that have been taken
  std::atomic<int64_t> turn_{0};  // the turn that may send
  int64_t tags_ = 32768;          // the highest tag, which is for leave messages
  int64_t span_ = 0;              // number of tags per label; 0 if there are too few for labels
  std::unique_ptr<Watch> watch_;  // null if the channel is not watched
  std::vector<int64_t> sent_, received_;  // by rank, the number of reserved messages
  std::mutex mutex_;                      // guards started and blocking operations, buffers, and `broken_`, `closed_`
  std::condition_variable work_;          // for the progress thread: an operation has been started, or it must stop
  std::condition_variable news_;          // an operation has ended
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<Operation*> blocking_;  // running in other threads
  std::vector<int64_t> begun_;        // by rank, the number of operations
  std::vector<std::pair<int64_t, std::unique_ptr<char[]>>> buffers_;  // size and memory, for reuse
  // Bytes of buffers: in use, kept for reuse, and the most in use at once. Together no more than that are allocated.
  int64_t used_ = 0, kept_ = 0, peak_ = 0;
  std::thread thread_;
  std::string broken_, closed_;  // why no operation can begin
  std::atomic<bool> fails_{false}, interrupted_{false};
  int inside_ = 0;  // operations that have entered and not finished
  int64_t handles_ = 0;
  bool stopping_ = false, ended_ = false, left_ = false;
  int rank_ = 0;  // this rank
  std::mutex leaving_;
  // By rank that has ended, or left: the last operation that it began with this rank.
  std::vector<int64_t> ends_, lasts_;
  std::vector<std::string> causes_;  // by rank that has left: the first failure that it knows of
  // By rank, the messages to it, which must stay valid until they are received.
  std::vector<LeaveMessage> end_messages_, leave_messages_;
  std::string cause_;                // the first failure that this rank knows of, without the line that waits
  std::vector<MPI_Request> leave_requests_;
};

Channel* open_channel(MPI_Comm comm, bool collective);  // see `Channel`; leaves it before MPI is finalized
void end_channels();                     // of all channels of this process: see `Channel::end`
bool release_channel(Channel* channel);  // returns whether its communicators may be freed
void end_job(const std::string& why);  // if it cannot end by itself
std::string as_error(const std::string& why);  // the text that engine_errors.py reads; a verdict may have a code

}  // namespace commplan
