// Failures of processes, for MPI libraries that survive them (ULFM, MPI 5). With others, `mpirun` ends the
// job.
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine.h"
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

namespace commplan {
namespace {

// Whether this process outlives the failure of another one: with `mpirun --with-ft ulfm` of Open MPI.
const bool outlives = [] {
  const char* value = std::getenv("OMPI_MCA_mpi_ft_enable");
  return value != nullptr && (std::strcmp(value, "1") == 0 || std::strcmp(value, "true") == 0);
}();

}  // namespace

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

bool can_revoke() { return outlives; }

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
  // MPI learns of failures only inside calls.
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_SELF, &flag, MPI_STATUS_IGNORE);
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

bool cut_off(MPI_Comm comm, const std::vector<int32_t>& ranks) {
  if (!outlives) return false;
  int flag = 0;
  if (MPIX_Comm_is_revoked(comm, &flag) == MPI_SUCCESS && flag) return true;
  for (int rank : dead(comm)) {
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) return true;
  }
  return false;
}

#else

bool lost(int) { return false; }
std::vector<int> dead(MPI_Comm) { return {}; }
void acknowledge(MPI_Comm) {}
void revoke(MPI_Comm) {}
bool cut_off(MPI_Comm, const std::vector<int32_t>&) { return false; }

#endif

// Open MPI frees a request in the call that reports its failure. It reports a failed send as soon as the receiver has
// died or the communicator is revoked, even if bytes of it are still in transit. If these fail later, Open MPI ends
// the job ("Send error after request freed"). MPI_Request_get_status does not free the request, so a send is tested
// only once it is complete. A failed receive is complete.
int test_some(std::vector<MPI_Request>& requests, const std::vector<int32_t>& lanes, int* some, std::vector<int>& indices,
              std::vector<MPI_Status>& statuses) {
  int many = static_cast<int>(requests.size());
  indices.resize(many);
  statuses.resize(many);
  if (!outlives) return MPI_Testsome(many, requests.data(), some, indices.data(), statuses.data());
  std::vector<MPI_Request> receives;
  std::vector<int> places;
  for (int k = 0; k < many; ++k) {
    if (lanes[k] < 0) receives.push_back(requests[k]), places.push_back(k);
  }
  *some = 0;
  int code = MPI_SUCCESS;
  if (!receives.empty()) {
    code = MPI_Testsome(static_cast<int>(receives.size()), receives.data(), some, indices.data(), statuses.data());
    if (*some == MPI_UNDEFINED) *some = 0;
    for (int k = 0; k < *some; ++k) indices[k] = places[indices[k]];
    for (size_t k = 0; k < places.size(); ++k) requests[places[k]] = receives[k];
  }
  auto is_over = [&](int k) {
    MPI_Status& status = statuses[*some];
    int flag = 0;
    MPI_Request_get_status(requests[k], &flag, &status);
    if (!flag) return false;
    status.MPI_ERROR = MPI_Test(&requests[k], &flag, MPI_STATUS_IGNORE);  // a complete send may be freed
    if (status.MPI_ERROR != MPI_SUCCESS) code = MPI_ERR_IN_STATUS;
    indices[(*some)++] = k;
    return true;
  };
  std::vector<int32_t> busy;  // peers with an incomplete send
  std::vector<int> later;     // sends to them after that
  for (int k = 0; k < many; ++k) {
    if (lanes[k] < 0) continue;
    if (std::find(busy.begin(), busy.end(), lanes[k]) != busy.end()) {
      later.push_back(k);
    } else if (!is_over(k)) {
      busy.push_back(lanes[k]);
    }
  }
  // If nothing else is complete, the first send may depend on a later one.
  for (size_t i = 0; i < later.size() && *some == 0; ++i) is_over(later[i]);
  return code;
}

bool drain(std::vector<MPI_Request>& requests, int64_t longest) {
  return drain({}, {}, requests, std::vector<int32_t>(requests.size(), -1), false, longest);
}

bool drain(const std::vector<int>& gone, const std::vector<int32_t>& peers, std::vector<MPI_Request>& requests,
           std::vector<int32_t> lanes, bool kept, int64_t longest) {
  constexpr int64_t kPause = 1'000'000;  // nanoseconds between two tests
  auto remove = [&](size_t k) {
    requests[k] = requests.back();
    lanes[k] = lanes.back();
    requests.pop_back();
    lanes.pop_back();
  };
  // Do not wait for sends that may be abandoned.
  for (size_t k = requests.size(); k-- > 0;) {
    auto to_dead = [&] { return std::find(gone.begin(), gone.end(), peers[lanes[k]]) != gone.end(); };
    if (requests[k] == MPI_REQUEST_NULL || (lanes[k] >= 0 && (kept || to_dead()))) remove(k);
  }
  std::vector<int> indices;
  std::vector<MPI_Status> statuses;
  for (int64_t until = now() + longest; !requests.empty() && now() < until; sleep_ns(kPause)) {
    int some = 0;
    test_some(requests, lanes, &some, indices, statuses);
    if (some == MPI_UNDEFINED) return true;
    std::sort(indices.begin(), indices.begin() + some, std::greater<int>());
    for (int k = 0; k < some; ++k) {
      size_t at = indices[k];
      if (lanes[at] < 0 && requests[at] != MPI_REQUEST_NULL) MPI_Request_free(&requests[at]);
      remove(at);
    }
  }
  bool all = requests.empty();
  for (MPI_Request& request : requests) {
    if (!outlives) MPI_Request_free(&request);
  }
  return all;
}

}  // namespace commplan
