// The entry points: functions that Python calls through ctypes, and the XLA FFI handlers. They use XLA's C API,
// because its C++ API takes far longer to compile.
#include <dlfcn.h>

#include <cstring>
#include <deque>
#include <shared_mutex>

#include "watch.h"
#include "xla/ffi/api/c_api.h"

namespace commplan {
namespace {

// A program that compiled code calls by its number. Only one of its pointers to operations is set. Never freed, since
// XLA may keep compiled code indefinitely.
struct Callable {
  Channel* channel;
  std::unique_ptr<List> list;
  std::unique_ptr<Native> native;
  std::unique_ptr<Request> request;
  std::unique_ptr<Packed> packed;
};

std::mutex& registry_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}

std::deque<Callable>& registry() {
  static auto* callables = new std::deque<Callable>;
  return *callables;
}

// Returns the number of the program.
int64_t add(Callable callable) {
  std::lock_guard<std::mutex> lock(registry_mutex());
  registry().push_back(std::move(callable));
  return static_cast<int64_t>(registry().size()) - 1;
}

// The program with this number; null if there is none.
Callable* find(int64_t number) {
  std::lock_guard<std::mutex> lock(registry_mutex());
  if (number < 0 || number >= static_cast<int64_t>(registry().size())) return nullptr;
  return &registry()[number];
}

// Guards callbacks to Python from threads that run a list; `ended` once Python is shutting down.
struct Looks {
  std::shared_mutex mutex;
  bool ended = false;
};

Looks& looks() {
  static auto* all = new Looks;
  return *all;
}

// An error of XLA, which raises an exception of JAX.
XLA_FFI_Error* failure(XLA_FFI_CallFrame* frame, const std::string& message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message.c_str();
  args.errc = XLA_FFI_Error_Code_INTERNAL;
  return frame->api->XLA_FFI_Error_Create(&args);
}

// XLA queries the API version of every handler once.
bool answers_metadata(XLA_FFI_CallFrame* frame) {
  auto* extension = frame->extension_start;
  if (extension == nullptr || extension->type != XLA_FFI_Extension_Metadata) return false;
  auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return true;
}

void* argument(XLA_FFI_CallFrame* frame, int i) { return static_cast<XLA_FFI_Buffer*>(frame->args.args[i])->data; }
void* result(XLA_FFI_CallFrame* frame, int i) { return static_cast<XLA_FFI_Buffer*>(frame->rets.rets[i])->data; }

// The number of the program, which is the only attribute of our calls.
int64_t number_of(XLA_FFI_CallFrame* frame) {
  if (frame->attrs.size != 1 || frame->attrs.types[0] != XLA_FFI_AttrType_SCALAR) return -1;
  auto* scalar = static_cast<XLA_FFI_Scalar*>(frame->attrs.attrs[0]);
  return scalar->dtype == XLA_FFI_DataType_S64 ? *static_cast<int64_t*>(scalar->value) : -1;
}

struct Buffers {
  std::vector<const void*> from;
  std::vector<void*> to;
};

// Inputs are the first arguments, outputs the first results.
Buffers buffers(XLA_FFI_CallFrame* frame, int64_t inputs, int64_t outputs) {
  Buffers found{std::vector<const void*>(inputs), std::vector<void*>(outputs)};
  for (int64_t i = 0; i < inputs; ++i) found.from[i] = argument(frame, static_cast<int>(i));
  for (int64_t i = 0; i < outputs; ++i) found.to[i] = result(frame, static_cast<int>(i));
  return found;
}

// An operation, or null and the reason that it cannot begin.
struct Begun {
  std::unique_ptr<Operation> operation;
  std::string error;
};

// Begins the program `x`. inputs, outputs: the numbers of its arrays. blocks: whether the calling thread may block in
// MPI.
Begun begin(Callable* x, XLA_FFI_CallFrame* frame, int64_t inputs, int64_t outputs, bool blocks) {
  if (x == nullptr) return {nullptr, "this program was compiled by another process"};
  Channel& channel = *x->channel;
  std::lock_guard<std::mutex> lock(channel.order);
  std::string error = channel.enter();
  if (!error.empty()) return {nullptr, error};
  if (x->list) return {run_list(channel, *x->list, argument(frame, 0), result(frame, 0)), {}};
  if (x->native) return {run_native(channel, *x->native, argument(frame, 0), result(frame, 0), blocks), {}};
  auto [from, to] = buffers(frame, inputs, outputs);
  if (x->packed) return {run_packed(channel, *x->packed, std::move(from), std::move(to), blocks), {}};
  return {run_request(channel, *x->request, std::move(from), std::move(to)), {}};
}

// Returns an error. Waits first for started operations, since XLA frees their buffers after an error.
XLA_FFI_Error* refusal(Callable* x, XLA_FFI_CallFrame* frame, const std::string& error) {
  if (x != nullptr) x->channel->rest();
  return failure(frame, error.rfind("interrupted", 0) == 0 ? "commplan: " + error : as_error(error));
}

}  // namespace
}  // namespace commplan

using namespace commplan;

#define COMMPLAN_API extern "C" __attribute__((visibility("default")))

// inputs, token -> outputs, token (the same buffer)
COMMPLAN_API XLA_FFI_Error* commplan_call(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return nullptr;
  Callable* x = find(number_of(frame));
  Rounding rounding;
  Begun begun = begin(x, frame, frame->args.size - 1, frame->rets.size - 1, true);
  if (!begun.operation) return refusal(x, frame, begun.error);
  std::string error = x->channel->drive(std::move(begun.operation));
  return error.empty() ? nullptr : refusal(x, frame, error);
}

// inputs, token -> pending outputs, handle, token (the same buffer)
COMMPLAN_API XLA_FFI_Error* commplan_start(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return nullptr;
  Callable* x = find(number_of(frame));
  Rounding rounding;
  int64_t outputs = frame->rets.size - 2;
  Begun begun = begin(x, frame, frame->args.size - 1, outputs, false);
  if (!begun.operation) return refusal(x, frame, begun.error);
  int64_t handle = x->channel->start(std::move(begun.operation));
  std::memcpy(result(frame, static_cast<int>(outputs)), &handle, sizeof handle);
  return nullptr;
}

// inputs, pending outputs, handle, token -> outputs (the same buffers as pending), token (the same buffer)
COMMPLAN_API XLA_FFI_Error* commplan_finish(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return nullptr;
  Callable* x = find(number_of(frame));
  if (x == nullptr) return refusal(x, frame, "this program was compiled by another process");
  int64_t handle;
  std::memcpy(&handle, argument(frame, static_cast<int>(frame->args.size - 2)), sizeof handle);
  std::string error = x->channel->finish(handle, frame->rets.size > 1 ? result(frame, 0) : nullptr);
  return error.empty() ? nullptr : refusal(x, frame, error);
}

// A handler that does nothing, to measure the cost of a call.
COMMPLAN_API XLA_FFI_Error* commplan_empty(XLA_FFI_CallFrame* frame) {
  answers_metadata(frame);
  return nullptr;
}

// collective: a failure on one rank ends the operations of all ranks.
COMMPLAN_API void* commplan_channel_open(int comm, int collective) {
  return open_channel(MPI_Comm_f2c(comm), collective != 0);
}

// record: the memory of a flight record. See `Watch`.
COMMPLAN_API void commplan_channel_watch(void* channel, void* record) {
  static_cast<Channel*>(channel)->watch(static_cast<char*>(record));
}

// Functions of Python's C API, or null to handle signals no more. See signals.cpp.
COMMPLAN_API void commplan_signals(int (*ensure)(), void (*release)(int), int (*check)(),
                                   void (*fetch)(void**, void**, void**), void (*normalize)(void**, void**, void**)) {
  set_signals({ensure, release, check, fetch, normalize});
}
COMMPLAN_API void* commplan_interruption() { return interruption(); }

COMMPLAN_API int commplan_channel_busy(void* channel) { return static_cast<Channel*>(channel)->busy() ? 1 : 0; }

// Waits for running operations. Programs of a closed channel fail with a message.
COMMPLAN_API void commplan_channel_close(void* channel) {
  static_cast<Channel*>(channel)->close("the channel of this program is closed");
}

// Rejects further operations of this process, and reports its end to the other ranks.
COMMPLAN_API void commplan_end_channels() { end_channels(); }

// Returns whether all ranks have left a closed channel, so that its communicators and its record may be freed. Must
// not be called again after it has returned 1.
COMMPLAN_API int commplan_channel_release(void* channel) {
  return release_channel(static_cast<Channel*>(channel)) ? 1 : 0;
}

// Creates an instruction list and returns its number. table: `count` rows of Instruction. waits, begins, next, peers:
// see `List`. many: the number of peers. settings: scratch, window, synchronous, dtype, op, label, the number of
// rounds, and the first instruction of each round. where: see `Where::line`.
COMMPLAN_API int64_t commplan_list(void* channel, const int64_t* table, int64_t count, const int32_t* waits,
                                   const int64_t* begins, const int32_t* next, const int32_t* peers, int64_t many,
                                   const int64_t* settings, const char* where) {
  auto list = std::make_unique<List>();
  list->where.line = where;
  auto* rows = reinterpret_cast<const Instruction*>(table);
  list->code.assign(rows, rows + count);
  list->waits.assign(waits, waits + count);
  list->begins.assign(begins, begins + count + 1);
  list->next.assign(next, next + begins[count]);
  list->peers.assign(peers, peers + many);
  list->receives.resize(many);
  list->sends.resize(many);
  list->scratch = settings[0];
  list->window = settings[1];
  list->synchronous = settings[2] != 0;
  list->dtype = static_cast<DType>(settings[3]);
  list->op = static_cast<Reduction>(settings[4]);
  list->label = settings[5];
  list->rounds.assign(settings + 7, settings + 7 + settings[6]);
  for (int64_t i = 0; i < count; ++i) {
    const Instruction& x = rows[i];
    if (x.kind == kSend) ++list->sends[x.peer];
    if (x.kind == kReceive || x.kind == kReceiveReduce) list->receives[x.peer].push_back(static_cast<int32_t>(i));
    if (x.kind == kReceiveReduce) {
      list->reduces = true;
      list->largest = std::max(list->largest, (x.nbytes + 63) / 64 * 64);
    }
  }
  for (int64_t p = 0; p < many; ++p) {
    if (list->sends[p] > 0) list->links.push_back(2 * peers[p]);
    if (!list->receives[p].empty()) list->links.push_back(2 * peers[p] + 1);
  }
  return add({static_cast<Channel*>(channel), std::move(list), nullptr, nullptr, nullptr});
}

// Frees a list that no compiled program calls.
COMMPLAN_API void commplan_list_free(int64_t number) { find(number)->list.reset(); }

// Runs a list without input whose messages are in `memory`. pace: nanoseconds, see `Pace`. look: called periodically
// with the nanoseconds since anything moved, and the rank that is absent or waited for, or -1; any result except 0
// cancels the list. Copies the error, at most `most` bytes and a zero, and returns its length, 0 if there is none.
// After an error the channel cannot be used again, and pending messages may still access the memory.
COMMPLAN_API int64_t commplan_run(int64_t number, void* memory, const int64_t* pace, int (*look)(int64_t, int64_t),
                                  char* text, int64_t most) {
  Callable& x = *find(number);
  x.list->kept = true;
  Begun begun;
  {
    std::lock_guard<std::mutex> lock(x.channel->order);
    begun.error = x.channel->enter();
    if (begun.error.empty()) begun.operation = run_list(*x.channel, *x.list, nullptr, memory);
  }
  auto callback = [look](const Progress& progress, int64_t idle) {
    std::shared_lock<std::shared_mutex> lock(looks().mutex);
    return !looks().ended && look(idle, progress.absent >= 0 ? progress.absent : progress.rank) == 0;
  };
  if (begun.operation) {
    begun.error = x.channel->drive(std::move(begun.operation), {pace[0], pace[1], pace[2], pace[3]}, callback);
  }
  std::string error = begun.error.substr(0, most);
  std::memcpy(text, error.c_str(), error.size() + 1);
  return static_cast<int64_t>(error.size());
}

// The interpreter is about to shut down: `look` is called no more, and running lists are canceled.
COMMPLAN_API void commplan_end_looks() {
  std::unique_lock<std::shared_mutex> lock(looks().mutex);
  looks().ended = true;
}

// Creates a collective of MPI and returns its number. settings: kind, communicator, count, root, dtype, op (`Native`).
COMMPLAN_API int64_t commplan_native(void* channel, const int64_t* settings, const char* where) {
  auto native = std::make_unique<Native>();
  native->where.line = where;
  native->kind = static_cast<Collective>(settings[0]);
  native->comm = MPI_Comm_f2c(static_cast<int>(settings[1]));
  native->count = settings[2];
  native->root = static_cast<int>(settings[3]);
  native->dtype = static_cast<DType>(settings[4]);
  native->op = static_cast<Reduction>(settings[5]);
  MPI_Comm_set_errhandler(native->comm, MPI_ERRORS_RETURN);
  auto* opened = static_cast<Channel*>(channel);
  opened->uses(native->comm);
  native->ranks = opened->others(native->comm);
  return add({opened, nullptr, std::move(native), nullptr, nullptr});
}

// Sets the details of a program for flight records. Must be called before it first runs.
COMMPLAN_API void commplan_describe(int64_t number, const char* details) {
  const Callable& callable = *find(number);
  Where& where = callable.list ? callable.list->where : callable.native ? callable.native->where : callable.request->where;
  where.details = details;
}

// Creates the list, or MPI's own collective, `number` on several arrays, and returns its number. from, to: the bytes of
// the buffer, then `inputs` and `outputs` rows of Run. last: the `many` instructions of the list whose output is final.
// late: offset and bytes of the `rest` other parts of the output.
COMMPLAN_API int64_t commplan_packed(int64_t number, const int64_t* from, int64_t inputs, const int64_t* to,
                                     int64_t outputs, const int64_t* last, int64_t many, const int64_t* late,
                                     int64_t rest) {
  const Callable& whole = *find(number);
  auto packed = std::make_unique<Packed>();
  packed->list = whole.list.get();
  packed->native = whole.native.get();
  auto layout = [](const int64_t* table, int64_t count) {
    auto* runs = reinterpret_cast<const Run*>(table + 1);
    return Layout{std::vector<Run>(runs, runs + count), table[0]};
  };
  packed->from = layout(from, inputs);
  packed->to = layout(to, outputs);
  if (packed->list) packed->last.resize(packed->list->code.size());
  for (int64_t i = 0; i < many; ++i) packed->last[last[i]] = 1;
  for (int64_t i = 0; i < rest; ++i) packed->late.push_back({late[2 * i], late[2 * i + 1]});
  return add({whole.channel, nullptr, nullptr, nullptr, std::move(packed)});
}

// Creates a request to servers and returns its number. where: see `Where::line`. peers, names: the ranks and the names
// of `many` servers. table: `count` rows of Message, in the order in which they are posted. window: messages in flight
// to one peer. put_counter: a number that is incremented whenever the request begins, or null.
COMMPLAN_API int64_t commplan_request(void* channel, const char* where, const int32_t* peers, const char** names,
                                      int64_t many, const int64_t* table, int64_t count, int64_t window, void* put_counter) {
  auto request = std::make_unique<Request>();
  request->where.line = where;
  request->peers.assign(peers, peers + many);
  request->names.assign(names, names + many);
  request->sends.resize(many);
  request->window = window;
  request->put_counter = static_cast<int64_t*>(put_counter);
  auto* rows = reinterpret_cast<const Message*>(table);
  for (int64_t i = 0; i < count; ++i) {
    auto& list = rows[i].answer ? request->receives : request->sends[rows[i].peer];
    list.push_back(rows[i]);
  }
  return add({static_cast<Channel*>(channel), nullptr, nullptr, std::move(request), nullptr});
}

// Adds states in shared memory to a new request. headers: for each state its peer, and the addresses of ready, puts,
// requests, closed and put_counter. updates: rows of state, input, output, offset, count, dtype and the address of
// the state. factors: for eta and rho the input, or -1 for a literal, and its dtype.
COMMPLAN_API void commplan_request_shares(int64_t number, const int64_t* headers, int64_t states,
                                          const int64_t* updates, int64_t count, const int64_t* factors,
                                          const double* literals) {
  Request& request = *find(number)->request;
  auto counter = [](int64_t address) { return reinterpret_cast<std::atomic<int64_t>*>(address); };
  for (const int64_t* h = headers; h < headers + 6 * states; h += 6) {
    request.shared.push_back({h[0], counter(h[1]), counter(h[2]), counter(h[3]), counter(h[4]),
                              reinterpret_cast<const int64_t*>(h[5])});
  }
  for (const int64_t* m = updates; m < updates + 7 * count; m += 7) {
    request.updates.push_back({m[0], m[1], m[2], m[3], m[4], m[5], reinterpret_cast<char*>(m[6])});
  }
  for (int i = 0; i < 2; ++i) {
    request.factors[i] = factors[2 * i];
    request.types[i] = factors[2 * i + 1];
    request.literals[i] = literals[i];
  }
}

// The file of the MPI library that the engine is linked to.
COMMPLAN_API const char* commplan_library() {
  Dl_info info{};
  return dladdr(reinterpret_cast<void*>(&MPI_Init), &info) ? info.dli_fname : "";
}
