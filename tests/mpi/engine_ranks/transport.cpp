// MPI for ranks that are threads of one process. Messages take a while to arrive, in an order that only MPI's rules
// bound; a long one is copied when it is received, as where a network card reads it. What this file does orders
// nothing for ThreadSanitizer: MPI's locks are none that the engine may rely on.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "mpi.h"

#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreSyncBegin(const char*, int);
void AnnotateIgnoreSyncEnd(const char*, int);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#define EACH(what) what("", 0)
#else
#define EACH(what) static_cast<void>(0)
#endif

namespace {

constexpr int kTags = (1 << 26) - 1;
constexpr size_t kEager = 256;  // bytes of a message that its sender need not keep

struct Collected {
  std::vector<std::vector<char>> parts;
  size_t many = 0;
};

std::mutex mutex;  // of everything here
std::mt19937 draw(7);

// In scope of every call.
class Call {
 public:
  Call() {
    EACH(AnnotateIgnoreSyncBegin), EACH(AnnotateIgnoreReadsBegin), EACH(AnnotateIgnoreWritesBegin);
    mutex.lock();
  }
  ~Call() {
    mutex.unlock();
    EACH(AnnotateIgnoreWritesEnd), EACH(AnnotateIgnoreReadsEnd), EACH(AnnotateIgnoreSyncEnd);
  }
  void wait() {
    mutex.unlock();
    usleep(200);
    mutex.lock();
  }
};

int (*gone)(MPI_Comm, int, void*, void*) = nullptr;

}  // namespace

struct RequestOf {
  bool done = false, cancelled = false;
  MPI_Status status{};
  char* to = nullptr;  // of a receive
  size_t capacity = 0;
  int source = 0, tag = 0;
  struct Box* box = nullptr;
  std::function<bool()> collective;
};

struct MessageOf {
  int source, tag;
  size_t nbytes;
  const char* from;
  std::vector<char> bytes;  // of an eager one, which `from` points to
  RequestOf* sender;        // until it is received
  int64_t arrives;          // with so many looks at the box
};

struct Box {
  std::deque<MessageOf*> arriving;
  std::deque<RequestOf*> posted;
  int64_t looks = 0;
};

namespace {

bool fits(int source, int tag, const MessageOf& message) {
  return (source == MPI_ANY_SOURCE || source == message.source) && (tag == MPI_ANY_TAG || tag == message.tag);
}

// The message is taken, into so many bytes.
MPI_Status taken(MessageOf* message, void* to, size_t capacity) {
  MPI_Status status{message->source, message->tag, MPI_SUCCESS, static_cast<int>(message->nbytes)};
  if (message->nbytes > capacity) status.MPI_ERROR = MPI_ERR_TRUNCATE;
  std::memcpy(to, message->from, std::min(capacity, message->nbytes));
  if (message->sender) message->sender->done = true;
  delete message;
  return status;
}

void look(Box& box) {
  ++box.looks;
  for (auto it = box.arriving.begin(); it != box.arriving.end();) {
    MessageOf* message = *it;
    auto wanted = [&](RequestOf* request) { return fits(request->source, request->tag, *message); };
    auto at = std::find_if(box.posted.begin(), box.posted.end(), wanted);
    if (message->arrives > box.looks || at == box.posted.end()) {
      ++it;
      continue;
    }
    RequestOf* request = *at;
    box.posted.erase(at);
    it = box.arriving.erase(it);
    request->status = taken(message, request->to, request->capacity);
    request->done = true;
  }
}

MessageOf* probed(Box& box, int source, int tag) {
  look(box);
  for (MessageOf* message : box.arriving) {
    if (message->arrives <= box.looks && fits(source, tag, *message)) return message;
  }
  return nullptr;
}

bool ended(RequestOf* request) {
  if (!request->done && request->box) look(*request->box);
  if (!request->done && request->collective) request->done = request->collective();
  return request->done;
}

}  // namespace

struct Shared {
  explicit Shared(int size) : boxes(size), calls(size) {}
  std::vector<Box> boxes;
  std::vector<int64_t> calls;  // by rank, of those that all make
  std::map<int64_t, Shared*> made;
  std::map<int64_t, Collected> collected;
};

struct Communicator {
  Shared* shared;
  int rank;
  bool fails = false;
};

struct GroupOf {
  int size;
};

namespace {

Communicator world{nullptr, 0}, self{nullptr, 0};

int send(const void* data, int count, int rank, int tag, MPI_Comm comm, MPI_Request* request, bool waits) {
  Call call;
  *request = new RequestOf;
  Box& box = comm->shared->boxes[rank];
  auto nbytes = static_cast<size_t>(count);
  auto* message = new MessageOf{comm->rank, tag, nbytes, static_cast<const char*>(data), {}, nullptr, 0};
  message->arrives = box.looks + static_cast<int64_t>(draw() % 4);
  for (MessageOf* before : box.arriving) {
    if (before->source == comm->rank) message->arrives = std::max(message->arrives, before->arrives);
  }
  if (!waits && nbytes <= kEager) {
    message->bytes.assign(message->from, message->from + nbytes);
    message->from = message->bytes.data();
    (*request)->done = true;
  } else {
    message->sender = *request;
  }
  box.arriving.push_back(message);
  return MPI_SUCCESS;
}

int size_of(MPI_Datatype type) { return type == MPI_FLOAT ? 4 : type == MPI_DOUBLE ? 8 : type; }

// What each rank gives, once all have.
std::function<const Collected*()> collect(MPI_Comm comm, const void* data, size_t nbytes) {
  Shared* shared = comm->shared;
  Collected& own = shared->collected[shared->calls[comm->rank]++];
  own.parts.resize(shared->boxes.size());
  auto* bytes = static_cast<const char*>(data);
  own.parts[comm->rank].assign(bytes, bytes + nbytes);
  ++own.many;
  return [&own] { return own.many == own.parts.size() ? &own : nullptr; };
}

std::function<bool()> reduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  auto all = collect(comm, in == MPI_IN_PLACE ? out : in, static_cast<size_t>(count) * size_of(type));
  return [=]() mutable {
    const Collected* parts = all();
    if (parts == nullptr) return false;
    std::memcpy(out, parts->parts[0].data(), parts->parts[0].size());
    for (size_t rank = 1; rank < parts->parts.size(); ++rank) {
      op(const_cast<char*>(parts->parts[rank].data()), out, &count, &type);
    }
    return true;
  };
}

void sum(void* in, void* inout, int* count, MPI_Datatype* type) {
  if (*type != MPI_FLOAT) std::abort();
  for (int i = 0; i < *count; ++i) static_cast<float*>(inout)[i] += static_cast<float*>(in)[i];
}

void none(void*, void*, int*, MPI_Datatype*) { std::abort(); }

}  // namespace

const MPI_Op MPI_SUM = sum, MPI_MAX = none, MPI_MIN = none;
const MPI_Comm MPI_COMM_SELF = &self, MPI_COMM_WORLD = &world;

MPI_Comm* make_world(int ranks) {
  auto* shared = new Shared(ranks);
  auto* handles = new MPI_Comm[ranks];
  for (int rank = 0; rank < ranks; ++rank) handles[rank] = new Communicator{shared, rank};
  return handles;
}

void fail_receives(MPI_Comm comm) {
  Call call;
  comm->fails = true;
}

void finalize() { gone(MPI_COMM_SELF, 0, nullptr, nullptr); }

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* made) {
  Call call;
  Shared* shared = comm->shared;
  Shared*& other = shared->made[shared->calls[comm->rank]++];
  if (other == nullptr) other = new Shared(static_cast<int>(shared->boxes.size()));
  *made = new Communicator{other, comm->rank};
  return MPI_SUCCESS;
}

int MPI_Comm_free(MPI_Comm* comm) {
  Call call;
  Box& box = (*comm)->shared->boxes[(*comm)->rank];
  if (!box.arriving.empty() || !box.posted.empty()) std::abort();  // another communicator of its number would get it
  delete *comm;
  *comm = nullptr;
  return MPI_SUCCESS;
}

int MPI_Comm_rank(MPI_Comm comm, int* rank) {
  Call call;
  *rank = comm->rank;
  return MPI_SUCCESS;
}

int MPI_Comm_size(MPI_Comm comm, int* size) {
  Call call;
  *size = static_cast<int>(comm->shared->boxes.size());
  return MPI_SUCCESS;
}

int MPI_Comm_get_attr(MPI_Comm, int, void* value, int* flag) {
  static int tags = kTags;
  *static_cast<int**>(value) = &tags;
  *flag = 1;
  return MPI_SUCCESS;
}

int MPI_Comm_create_keyval(void*, int (*called)(MPI_Comm, int, void*, void*), int*, void*) {
  gone = called;
  return MPI_SUCCESS;
}

int MPI_Comm_set_errhandler(MPI_Comm, MPI_Errhandler) { return MPI_SUCCESS; }
int MPI_Comm_set_attr(MPI_Comm, int, void*) { return MPI_SUCCESS; }

int MPI_Comm_group(MPI_Comm comm, MPI_Group* group) {
  Call call;
  *group = new GroupOf{static_cast<int>(comm->shared->boxes.size())};
  return MPI_SUCCESS;
}

int MPI_Group_size(MPI_Group group, int* size) {
  Call call;
  *size = group->size;
  return MPI_SUCCESS;
}

int MPI_Group_translate_ranks(MPI_Group, int count, const int* ranks, MPI_Group, int* others) {
  std::copy(ranks, ranks + count, others);
  return MPI_SUCCESS;
}

int MPI_Group_free(MPI_Group* group) {
  Call call;
  delete *group;
  return MPI_SUCCESS;
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm, MPI_Request* request) {
  return send(data, count * size_of(type), rank, tag, comm, request, false);
}

int MPI_Issend(const void* data, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm, MPI_Request* request) {
  return send(data, count * size_of(type), rank, tag, comm, request, true);
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm, MPI_Request* request) {
  Call call;
  if (comm->fails) return MPI_ERR_OTHER;
  Box& box = comm->shared->boxes[comm->rank];
  *request = new RequestOf;
  **request = {false, false, {}, static_cast<char*>(data), static_cast<size_t>(count) * size_of(type), rank, tag, &box, {}};
  box.posted.push_back(*request);
  look(box);
  return MPI_SUCCESS;
}

int MPI_Improbe(int rank, int tag, MPI_Comm comm, int* flag, MPI_Message* message, MPI_Status* status) {
  Call call;
  Box& box = comm->shared->boxes[comm->rank];
  *message = probed(box, rank, tag);
  *flag = *message != nullptr;
  if (!*flag) return MPI_SUCCESS;
  box.arriving.erase(std::find(box.arriving.begin(), box.arriving.end(), *message));
  *status = {(*message)->source, (*message)->tag, MPI_SUCCESS, static_cast<int>((*message)->nbytes)};
  return MPI_SUCCESS;
}

int MPI_Iprobe(int, int, MPI_Comm, int* flag, MPI_Status*) {
  *flag = 0;
  return MPI_SUCCESS;
}

int MPI_Mrecv(void* data, int count, MPI_Datatype type, MPI_Message* message, MPI_Status*) {
  Call call;
  return taken(*message, data, static_cast<size_t>(count) * size_of(type)).MPI_ERROR;
}

int MPI_Get_count(const MPI_Status* status, MPI_Datatype type, int* count) {
  *count = status->count / size_of(type);
  return MPI_SUCCESS;
}

int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) { return MPI_Testall(1, request, flag, status); }

int MPI_Testall(int count, MPI_Request* requests, int* flag, MPI_Status* statuses) {
  Call call;
  auto over = [](MPI_Request request) { return request == nullptr || ended(request); };
  *flag = std::all_of(requests, requests + count, over);
  for (int i = 0; *flag && i < count; ++i) {
    if (statuses && requests[i]) statuses[i] = requests[i]->status;
    delete requests[i];
    requests[i] = nullptr;
  }
  return MPI_SUCCESS;
}

int MPI_Testsome(int count, MPI_Request* requests, int* some, int* indices, MPI_Status* statuses) {
  Call call;
  *some = std::all_of(requests, requests + count, [](auto* each) { return each == nullptr; }) ? MPI_UNDEFINED : 0;
  int code = MPI_SUCCESS;
  for (int i = 0; i < count; ++i) {
    if (requests[i] == nullptr || !ended(requests[i])) continue;
    statuses[*some] = requests[i]->status;
    if (requests[i]->status.MPI_ERROR != MPI_SUCCESS) code = MPI_ERR_IN_STATUS;
    indices[(*some)++] = i;
    delete requests[i];
    requests[i] = nullptr;
  }
  return code;
}

int MPI_Request_get_status(MPI_Request request, int* flag, MPI_Status* status) {
  Call call;
  *flag = ended(request);
  if (*flag && status) *status = request->status;
  return MPI_SUCCESS;
}

int MPI_Cancel(MPI_Request* request) {
  Call call;
  RequestOf& own = **request;
  auto& posted = own.box->posted;
  own.done = true;
  posted.erase(std::remove(posted.begin(), posted.end(), *request), posted.end());
  return MPI_SUCCESS;
}

int MPI_Request_free(MPI_Request* request) {
  *request = nullptr;  // its message may still arrive
  return MPI_SUCCESS;
}

int MPI_Query_thread(int* level) {
  *level = MPI_THREAD_MULTIPLE;
  return MPI_SUCCESS;
}

int MPI_Error_class(int code, int* kind) {
  *kind = code;
  return MPI_SUCCESS;
}

int MPI_Error_string(int code, char* text, int* length) {
  *length = std::snprintf(text, MPI_MAX_ERROR_STRING, "error %d", code);
  return MPI_SUCCESS;
}

int MPI_Abort(MPI_Comm, int code) { _exit(code); }

int MPI_Op_create(MPI_Op function, int, MPI_Op* op) {
  *op = function;
  return MPI_SUCCESS;
}

int MPI_Allgather(const void* in, int count, MPI_Datatype type, void* out, int, MPI_Datatype, MPI_Comm comm) {
  Call call;
  auto all = collect(comm, in, static_cast<size_t>(count) * size_of(type));
  while (all() == nullptr) call.wait();
  auto* to = static_cast<char*>(out);
  for (const std::vector<char>& part : all()->parts) to = std::copy(part.begin(), part.end(), to);
  return MPI_SUCCESS;
}

int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  Call call;
  auto done = reduce(in, out, count, type, op, comm);
  while (!done()) call.wait();
  return MPI_SUCCESS;
}

int MPI_Iallreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Request* request) {
  Call call;
  *request = new RequestOf;
  (*request)->collective = reduce(in, out, count, type, op, comm);
  return MPI_SUCCESS;
}

// What these tests do not ask for.
int MPI_Reduce_scatter_block(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm) { std::abort(); }
int MPI_Ireduce_scatter_block(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request*) { std::abort(); }
int MPI_Iallgather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm, MPI_Request*) { std::abort(); }
int MPI_Alltoall(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm) { std::abort(); }
int MPI_Ialltoall(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm, MPI_Request*) { std::abort(); }
int MPI_Bcast(void*, int, MPI_Datatype, int, MPI_Comm) { std::abort(); }
int MPI_Ibcast(void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*) { std::abort(); }
int MPI_Reduce(const void*, void*, int, MPI_Datatype, MPI_Op, int, MPI_Comm) { std::abort(); }
int MPI_Ireduce(const void*, void*, int, MPI_Datatype, MPI_Op, int, MPI_Comm, MPI_Request*) { std::abort(); }
int MPI_Scatter(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm) { std::abort(); }
int MPI_Iscatter(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*) { std::abort(); }
int MPI_Gather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm) { std::abort(); }
int MPI_Igather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*) { std::abort(); }
