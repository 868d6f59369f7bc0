// The doors: functions that Python calls through ctypes to make channels and lists, and the three XLA FFI
// handlers. XLA's C interface is used as it is; its C++ one takes far longer to compile.
#include <dlfcn.h>

#include <cstring>
#include <deque>

#include "engine.h"
#include "xla/ffi/api/c_api.h"

namespace commplan {
namespace {

// Something that a compiled program calls by its number. Never freed: XLA may hold a program for ever.
struct Callable {
  Channel* channel;
  std::unique_ptr<List> list;
  std::unique_ptr<Native> native;
};

std::mutex& registry_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}

std::deque<Callable>& registry() {
  static auto* callables = new std::deque<Callable>;
  return *callables;
}

int64_t add(Callable callable) {
  std::lock_guard<std::mutex> lock(registry_mutex());
  registry().push_back(std::move(callable));
  return static_cast<int64_t>(registry().size()) - 1;
}

Callable* find(int64_t number) {
  std::lock_guard<std::mutex> lock(registry_mutex());
  if (number < 0 || number >= static_cast<int64_t>(registry().size())) return nullptr;
  return &registry()[number];
}

XLA_FFI_Error* failure(XLA_FFI_CallFrame* frame, const std::string& message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message.c_str();
  args.errc = XLA_FFI_Error_Code_INTERNAL;
  return frame->api->XLA_FFI_Error_Create(&args);
}

// XLA asks every handler once which version of the interface it was made for.
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

// The only attribute of our calls.
int64_t number_of(XLA_FFI_CallFrame* frame) {
  if (frame->attrs.size != 1 || frame->attrs.types[0] != XLA_FFI_AttrType_SCALAR) return -1;
  auto* scalar = static_cast<XLA_FFI_Scalar*>(frame->attrs.attrs[0]);
  return scalar->dtype == XLA_FFI_DataType_S64 ? *static_cast<int64_t*>(scalar->value) : -1;
}

std::unique_ptr<Operation> begin(Callable& x, const void* input, void* output) {
  std::lock_guard<std::mutex> lock(x.channel->order);
  return x.list ? run_list(*x.channel, *x.list, input, output) : run_native(*x.native, input, output);
}

std::string wrong(Callable* callable) {
  if (callable == nullptr) return "this program was compiled by another process";
  if (callable->channel == nullptr) return "the channel of this program is closed";
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended) return "MPI has been finalized";
  std::string broken = callable->channel->broken();
  return broken.empty() ? broken : "an earlier operation failed: " + broken;
}

std::string text(const std::string& error) { return "commplan: " + error; }

}  // namespace
}  // namespace commplan

using namespace commplan;

#define COMMPLAN_API extern "C" __attribute__((visibility("default")))

// x, token -> y, token (the same buffer)
COMMPLAN_API XLA_FFI_Error* commplan_call(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return nullptr;
  Callable* x = find(number_of(frame));
  std::string error = wrong(x);
  if (error.empty()) {
    Rounding rounding;
    if (x->native) {
      error = call_native(*x->native, argument(frame, 0), result(frame, 0));
      if (!error.empty()) x->channel->fail(error);
    } else {
      auto operation = begin(*x, argument(frame, 0), result(frame, 0));
      error = x->channel->drive(*operation);
    }
  }
  return error.empty() ? nullptr : failure(frame, text(error));
}

// x, token -> pending, handle, token (the same buffer)
COMMPLAN_API XLA_FFI_Error* commplan_start(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return nullptr;
  Callable* x = find(number_of(frame));
  std::string error = wrong(x);
  if (!error.empty()) return failure(frame, text(error));
  Rounding rounding;
  int64_t handle = x->channel->start(begin(*x, argument(frame, 0), result(frame, 0)));
  std::memcpy(result(frame, 1), &handle, sizeof handle);
  return nullptr;
}

// x, pending, handle, token -> y (the same buffer as pending), token (the same buffer)
COMMPLAN_API XLA_FFI_Error* commplan_finish(XLA_FFI_CallFrame* frame) {
  if (answers_metadata(frame)) return nullptr;
  Callable* x = find(number_of(frame));
  if (x == nullptr || x->channel == nullptr) return failure(frame, text(wrong(x)));
  int64_t handle;
  std::memcpy(&handle, argument(frame, 2), sizeof handle);
  std::string error = x->channel->finish(handle, result(frame, 0));
  return error.empty() ? nullptr : failure(frame, text(error));
}

// A handler that does nothing: what a call costs.
COMMPLAN_API XLA_FFI_Error* commplan_empty(XLA_FFI_CallFrame* frame) {
  answers_metadata(frame);
  return nullptr;
}

COMMPLAN_API void* commplan_channel_open(int comm) { return new Channel(MPI_Comm_f2c(comm)); }

// Programs of a closed channel fail with a message.
COMMPLAN_API void commplan_channel_close(void* channel) {
  auto* closed = static_cast<Channel*>(channel);
  closed->stop();
  std::lock_guard<std::mutex> lock(registry_mutex());
  for (Callable& callable : registry()) {
    if (callable.channel == closed) callable.channel = nullptr;
  }
  delete closed;
}

// table: `count` rows of Instruction. settings: scratch, window, synchronous, dtype, op.
COMMPLAN_API int64_t commplan_list(void* channel, const int64_t* table, int64_t count, const int32_t* waits,
                                   const int64_t* begins, const int32_t* next, const int32_t* peers, int64_t many,
                                   const int64_t* settings) {
  auto list = std::make_unique<List>();
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
  for (int64_t i = 0; i < count; ++i) {
    const Instruction& x = rows[i];
    if (x.what == kSend) ++list->sends[x.peer];
    if (x.what == kReceive || x.what == kReceiveReduce) list->receives[x.peer].push_back(static_cast<int32_t>(i));
    if (x.what == kReceiveReduce) {
      list->reduces = true;
      list->largest = std::max(list->largest, (x.nbytes + 63) / 64 * 64);
    }
  }
  return add({static_cast<Channel*>(channel), std::move(list), nullptr});
}

// settings: kind, communicator, count, root, dtype, op.
COMMPLAN_API int64_t commplan_native(void* channel, const int64_t* settings) {
  auto native = std::make_unique<Native>();
  native->kind = static_cast<Collective>(settings[0]);
  native->comm = MPI_Comm_f2c(static_cast<int>(settings[1]));
  native->count = settings[2];
  native->root = static_cast<int>(settings[3]);
  native->dtype = static_cast<DType>(settings[4]);
  native->op = static_cast<Reduction>(settings[5]);
  MPI_Comm_set_errhandler(native->comm, MPI_ERRORS_RETURN);
  return add({static_cast<Channel*>(channel), nullptr, std::move(native)});
}

// The file of the MPI library that the engine calls.
COMMPLAN_API const char* commplan_library() {
  Dl_info info{};
  return dladdr(reinterpret_cast<void*>(&MPI_Init), &info) ? info.dli_fname : "";
}
