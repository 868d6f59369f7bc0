// What the engine calls of MPI, for ranks that are threads of one process (transport.cpp): to run it under sanitizers,
// of which no MPI knows. A communicator is one rank's handle of it.
#pragma once

#include <cstddef>

struct Communicator;
struct RequestOf;
struct MessageOf;
struct GroupOf;
using MPI_Comm = Communicator*;
using MPI_Request = RequestOf*;
using MPI_Message = MessageOf*;
using MPI_Group = GroupOf*;
using MPI_Datatype = int;
using MPI_Op = void (*)(void* in, void* inout, int* count, MPI_Datatype*);
using MPI_Errhandler = int;
struct MPI_Status {
  int MPI_SOURCE, MPI_TAG, MPI_ERROR, count;
};

constexpr int MPI_SUCCESS = 0, MPI_ERR_IN_STATUS = 18, MPI_ERR_PENDING = 19, MPI_ERR_TRUNCATE = 15, MPI_ERR_OTHER = 16;
constexpr int MPI_ANY_SOURCE = -1, MPI_ANY_TAG = -1, MPI_UNDEFINED = -32766, MPI_TAG_UB = 1, MPI_KEYVAL_INVALID = -1;
constexpr int MPI_THREAD_SINGLE = 0, MPI_THREAD_MULTIPLE = 3, MPI_MAX_ERROR_STRING = 256, MPI_ERRORS_RETURN = 0;
constexpr MPI_Datatype MPI_BYTE = 1, MPI_UINT8_T = 1, MPI_UINT16_T = 2, MPI_INT32_T = 4, MPI_FLOAT = 5, MPI_INT64_T = 8;
constexpr MPI_Datatype MPI_DOUBLE = 9;
#define MPI_REQUEST_NULL nullptr
#define MPI_COMM_NULL nullptr
#define MPI_COMM_NULL_COPY_FN nullptr
#define MPI_OP_NULL nullptr
#define MPI_IN_PLACE reinterpret_cast<void*>(1)
#define MPI_STATUS_IGNORE static_cast<MPI_Status*>(nullptr)
#define MPI_STATUSES_IGNORE static_cast<MPI_Status*>(nullptr)
extern const MPI_Op MPI_SUM, MPI_MAX, MPI_MIN;
extern const MPI_Comm MPI_COMM_SELF, MPI_COMM_WORLD;

extern "C" {
int MPI_Init(int*, char***);
int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* made);
int MPI_Comm_free(MPI_Comm* comm);
int MPI_Comm_rank(MPI_Comm comm, int* rank);
int MPI_Comm_size(MPI_Comm comm, int* size);
int MPI_Comm_set_errhandler(MPI_Comm, MPI_Errhandler);
int MPI_Comm_get_attr(MPI_Comm, int key, void* value, int* flag);
int MPI_Comm_create_keyval(void*, int (*gone)(MPI_Comm, int, void*, void*), int* key, void*);
int MPI_Comm_set_attr(MPI_Comm, int key, void*);
int MPI_Comm_group(MPI_Comm comm, MPI_Group* group);
int MPI_Group_size(MPI_Group group, int* size);
int MPI_Group_translate_ranks(MPI_Group from, int count, const int* ranks, MPI_Group to, int* others);
int MPI_Group_free(MPI_Group* group);
int MPI_Isend(const void* data, int count, MPI_Datatype, int rank, int tag, MPI_Comm, MPI_Request*);
int MPI_Issend(const void* data, int count, MPI_Datatype, int rank, int tag, MPI_Comm, MPI_Request*);
int MPI_Irecv(void* data, int count, MPI_Datatype, int rank, int tag, MPI_Comm, MPI_Request*);
int MPI_Improbe(int rank, int tag, MPI_Comm, int* flag, MPI_Message*, MPI_Status*);
int MPI_Iprobe(int rank, int tag, MPI_Comm, int* flag, MPI_Status*);
int MPI_Mrecv(void* data, int count, MPI_Datatype, MPI_Message*, MPI_Status*);
int MPI_Get_count(const MPI_Status*, MPI_Datatype, int* count);
int MPI_Test(MPI_Request*, int* flag, MPI_Status*);
int MPI_Testall(int count, MPI_Request*, int* flag, MPI_Status*);
int MPI_Testsome(int count, MPI_Request*, int* some, int* indices, MPI_Status*);
int MPI_Request_get_status(MPI_Request, int* flag, MPI_Status*);
int MPI_Cancel(MPI_Request*);
int MPI_Request_free(MPI_Request*);
int MPI_Query_thread(int* level);
int MPI_Error_class(int code, int* kind);
int MPI_Error_string(int code, char* text, int* length);
int MPI_Abort(MPI_Comm, int code);
int MPI_Op_create(MPI_Op function, int commutes, MPI_Op* op);
int MPI_Allgather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm);
int MPI_Allreduce(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm);
int MPI_Iallreduce(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request*);
int MPI_Reduce_scatter_block(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm);
int MPI_Ireduce_scatter_block(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request*);
int MPI_Iallgather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm, MPI_Request*);
int MPI_Alltoall(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm);
int MPI_Ialltoall(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm, MPI_Request*);
int MPI_Bcast(void*, int, MPI_Datatype, int, MPI_Comm);
int MPI_Ibcast(void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*);
int MPI_Reduce(const void*, void*, int, MPI_Datatype, MPI_Op, int, MPI_Comm);
int MPI_Ireduce(const void*, void*, int, MPI_Datatype, MPI_Op, int, MPI_Comm, MPI_Request*);
int MPI_Scatter(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm);
int MPI_Iscatter(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*);
int MPI_Gather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm);
int MPI_Igather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*);
}

// For tests: the handles of a new communicator, one for each rank; calls that fail from now on; the end of MPI.
MPI_Comm* make_world(int ranks);
void fail_receives(MPI_Comm comm);  // of this rank
void finalize();
