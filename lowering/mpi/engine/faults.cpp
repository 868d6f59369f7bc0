// What MPI says of the dead, where it lives on after them (ULFM, MPI 5). Elsewhere `mpirun` ends everyone.
#include <time.h>

#include "engine.h"
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

namespace commplan {

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void sleep_ns(int64_t nanoseconds) {
  timespec t{nanoseconds / 1'000'000'000, static_cast<long>(nanoseconds % 1'000'000'000)};
  nanosleep(&t, nullptr);
}

#if defined(MPIX_ERR_PROC_FAILED)

bool lost(int code) {
  int kind = code;
  MPI_Error_class(code, &kind);
  return kind == MPIX_ERR_PROC_FAILED || kind == MPIX_ERR_PROC_FAILED_PENDING || kind == MPIX_ERR_REVOKED;
}

std::vector<int> dead(MPI_Comm comm) {
  int flag = 0, many = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_SELF, &flag, MPI_STATUS_IGNORE);  // news come while MPI is called
  MPI_Group gone, all;
  if (MPIX_Comm_get_failed(comm, &gone) != MPI_SUCCESS) return {};
  MPI_Group_size(gone, &many);
  std::vector<int> theirs(many), ours(many);
  for (int i = 0; i < many; ++i) theirs[i] = i;
  MPI_Comm_group(comm, &all);
  MPI_Group_translate_ranks(gone, many, theirs.data(), all, ours.data());
  MPI_Group_free(&gone);
  MPI_Group_free(&all);
  return ours;
}

void acknowledge(MPI_Comm comm) { MPIX_Comm_failure_ack(comm); }

void revoke(MPI_Comm comm) {
  int flag = 0;
  if (MPIX_Comm_is_revoked(comm, &flag) == MPI_SUCCESS && !flag) MPIX_Comm_revoke(comm);
}

#else

bool lost(int) { return false; }
std::vector<int> dead(MPI_Comm) { return {}; }
void acknowledge(MPI_Comm) {}
void revoke(MPI_Comm) {}

#endif

bool drain(std::vector<MPI_Request>& requests) {
  constexpr int64_t kLongest = 2'000'000'000, kLook = 1'000'000;
  std::vector<int> indices(requests.size());
  std::vector<MPI_Status> statuses(requests.size());
  for (int64_t until = now() + kLongest; now() < until; sleep_ns(kLook)) {
    int some = 0;
    MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &some, indices.data(), statuses.data());
    if (some == MPI_UNDEFINED) return true;  // none is left
    for (int k = 0; k < some; ++k) {
      if (requests[indices[k]] != MPI_REQUEST_NULL) MPI_Request_free(&requests[indices[k]]);
    }
  }
  for (MPI_Request& request : requests) {
    if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
  }
  return false;
}

}  // namespace commplan
