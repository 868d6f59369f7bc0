// MPI's own collectives on XLA's buffers. `NativeRun` polls a non-blocking call, `NativeCall` blocks in a call.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace commplan {
namespace {

constexpr char kCannotCancel[] = "; MPI's own collectives cannot be broken off";
constexpr int64_t kMaxCount = int64_t{1} << 30;  // elements per call: counts are 32-bit
// Nanoseconds that a failed collective has to end: by itself if it cannot be revoked; and if it is revoked, which may
// take long on a busy machine.
constexpr int64_t kAlone = 500'000'000;
constexpr int64_t kRevoked = 10'000'000'000;

// Reductions of MPI by the engine's kernels, for dtypes and operations whose own ones differ (`op_of`).
template <DType kType, Reduction kOp>
void user_function(void* in, void* inout, int* count, MPI_Datatype*) {
  kernel(kType, kOp)(inout, inout, in, *count);
}

template <DType kType, Reduction kOp>
MPI_Op user_op() {
  static MPI_Op op = [] {
    MPI_Op made;
    MPI_Op_create(user_function<kType, kOp>, 1, &made);
    return made;
  }();
  return op;
}

template <DType kType>
MPI_Op user_op(Reduction op) {
  if (op == kSum) return user_op<kType, kSum>();
  return op == kMax ? user_op<kType, kMax>() : user_op<kType, kMin>();
}

// The type of MPI with the size of `dtype`. Booleans are bytes, and 16-bit floats are integers.
MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case kI32: return MPI_INT32_T;
    case kI64: return MPI_INT64_T;
    case kF16:
    case kBF16: return MPI_UINT16_T;
    case kF32: return MPI_FLOAT;
    case kF64: return MPI_DOUBLE;
    default: return MPI_UINT8_T;
  }
}

// MPI has no 16-bit floats and does not specify the maximum of a number and a NaN. Open MPI adds bytes with
// saturation on some processors.
MPI_Op op_of(DType dtype, Reduction op) {
  if (dtype == kF16) return user_op<kF16>(op);
  if (dtype == kBF16) return user_op<kBF16>(op);
  if (dtype == kU8 && op == kSum) return user_op<kU8>(op);
  if (dtype == kF32 && op != kSum) return user_op<kF32>(op);
  if (dtype == kF64 && op != kSum) return user_op<kF64>(op);
  if (op == kSum) return dtype == kBool ? MPI_MAX : MPI_SUM;
  return op == kMax ? MPI_MAX : MPI_MIN;
}

// Calls MPI once, or several times for a long buffer. Without a `request` the calls block.
class Call {
 public:
  Call(const Native& native, const void* input, void* output)
      : x_(native), type_(type_of(native.dtype)), in_(static_cast<const char*>(input)),
        out_(static_cast<char*>(output)) {
    if (x_.kind == kAllReduce || x_.kind == kReduceScatter || x_.kind == kReduce) op_ = op_of(x_.dtype, x_.op);
    whole_ = x_.kind == kAllReduce || x_.kind == kBroadcast || x_.kind == kReduce;
    MPI_Comm_rank(x_.comm, &rank_);
  }

  bool more() const { return whole_ ? begun_ < x_.count : !called_; }

  int next(MPI_Request* request) {
    int64_t most = whole_ ? std::min(kMaxCount, x_.count - begun_) : x_.count;
    int count = static_cast<int>(most);
    int64_t offset = begun_ * size_of(x_.dtype);
    const void* in = in_ == out_ && whole_ ? MPI_IN_PLACE : in_ + offset;
    char* out = out_ + offset;
    begun_ += most;
    called_ = true;
    MPI_Comm comm = x_.comm;
    switch (x_.kind) {
      case kAllReduce:
        return request ? MPI_Iallreduce(in, out, count, type_, op_, comm, request)
                       : MPI_Allreduce(in, out, count, type_, op_, comm);
      case kReduceScatter:
        return request ? MPI_Ireduce_scatter_block(in, out, count, type_, op_, comm, request)
                       : MPI_Reduce_scatter_block(in, out, count, type_, op_, comm);
      case kAllGather:
        return request ? MPI_Iallgather(in, count, type_, out, count, type_, comm, request)
                       : MPI_Allgather(in, count, type_, out, count, type_, comm);
      case kAllToAll:
        return request ? MPI_Ialltoall(in, count, type_, out, count, type_, comm, request)
                       : MPI_Alltoall(in, count, type_, out, count, type_, comm);
      case kBroadcast:
        if (rank_ == x_.root && in_ != out_) std::memcpy(out, in_ + offset, count * size_of(x_.dtype));
        return request ? MPI_Ibcast(out, count, type_, x_.root, comm, request)
                       : MPI_Bcast(out, count, type_, x_.root, comm);
      case kReduce:
        if (rank_ != x_.root) {
          if (in_ != out_) std::memcpy(out, in_ + offset, count * size_of(x_.dtype));
          in = in_ + offset;
        }
        return request ? MPI_Ireduce(in, out, count, type_, op_, x_.root, comm, request)
                       : MPI_Reduce(in, out, count, type_, op_, x_.root, comm);
      case kScatter:
        return request ? MPI_Iscatter(in, count, type_, out, count, type_, x_.root, comm, request)
                       : MPI_Scatter(in, count, type_, out, count, type_, x_.root, comm);
      default:
        if (rank_ != x_.root) fill_gathered(count);
        return request ? MPI_Igather(in, count, type_, out, count, type_, x_.root, comm, request)
                       : MPI_Gather(in, count, type_, out, count, type_, x_.root, comm);
    }
  }

 private:
  // The plan leaves a gathered buffer undefined except on the root. There it is this rank's block and zeros.
  void fill_gathered(int64_t count) {
    int64_t block = count * size_of(x_.dtype);
    int size = 0;
    MPI_Comm_size(x_.comm, &size);
    std::memset(out_, 0, block * size);
    std::memcpy(out_ + block * rank_, in_, block);
  }

  const Native& x_;
  MPI_Datatype type_;
  MPI_Op op_ = MPI_OP_NULL;
  const char* in_;
  char* out_;
  int rank_ = 0;         // in the communicator of the collective
  int64_t begun_ = 0;    // elements of the buffer in earlier calls
  bool whole_ = false;   // whether there are no blocks, so that a long buffer may be cut into several calls
  bool called_ = false;  // whether MPI has been called
};

// All calls of a long buffer begin at once, so that the calls of no other operation come in between.
class NativeRun final : public Operation {
 public:
  NativeRun(Channel& channel, const Native& native, const void* input, void* output)
      : Operation(channel, native.where), comm_(native.comm) {
    join(native.ranks);
    output_ = output;
    Call call(native, input, output);
    while (call.more()) {
      requests_.push_back(MPI_REQUEST_NULL);
      if (!check(call.next(&requests_.back()), "MPI's collective")) return;
    }
  }

  // MPI cannot cancel a collective: it must complete, or fail.
  ~NativeRun() override {
    auto ended = [](MPI_Request request) { return request == MPI_REQUEST_NULL; };
    if (std::all_of(requests_.begin(), requests_.end(), ended)) return;
    revoke(comm_);
    if (!drain(requests_, can_revoke() ? kRevoked : kAlone)) end_job(error_ + kCannotCancel);
  }

  bool step() override {
    if (done_) return false;
    int flag = 0;
    statuses_.resize(requests_.size());
    int code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &flag, statuses_.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (const MPI_Status& status : statuses_) {
        if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) code = status.MPI_ERROR;
      }
    }
    if (!check(code, "MPI's collective")) return true;
    done_ = flag != 0;
    return done_;
  }

 private:
  const MPI_Comm comm_;
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
};

// The calling thread blocks in MPI.
class NativeCall final : public Operation {
 public:
  NativeCall(Channel& channel, const Native& native, const void* input, void* output)
      : Operation(channel, native.where), comm_(native.comm), call_(native, input, output) {
    join(native.ranks);
    output_ = output;
  }

  bool blocks() const override { return true; }

  bool step() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      inside_ = true;
    }
    int code = call_.next(nullptr);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      inside_ = false;
      if (code != MPI_SUCCESS && !why_.empty()) error_ = why_, done_ = true;
    }
    if (!done_ && check(code, "MPI's collective")) {
      done_ = !call_.more();
    }
    return true;
  }

  void break_off(const std::string& why) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!inside_) return;
    if (why_.empty()) {
      why_ = why;
      since_ = now();
      revoke(comm_);
    } else if (now() - since_ > (can_revoke() ? kRevoked : kAlone)) {
      channel_.record_failure();
      end_job(why + kCannotCancel);
    }
  }

 private:
  const MPI_Comm comm_;
  Call call_;
  int64_t since_ = 0;    // when it was broken off
  std::mutex mutex_;     // guards `why_`, `since_` and `inside_`
  std::string why_;      // why it was broken off; empty before
  bool inside_ = false;  // whether the thread is in a call of MPI
};

}  // namespace

std::unique_ptr<Operation> run_native(Channel& channel, const Native& native, const void* input, void* output,
                                      bool blocks) {
  if (blocks) return std::make_unique<NativeCall>(channel, native, input, output);
  return std::make_unique<NativeRun>(channel, native, input, output);
}

}  // namespace commplan
