// Ctrl-C while Python's main thread waits in an operation. Python handles a signal only when its main thread next
// runs bytecode, so a waiting main thread calls PyErr_CheckSignals periodically.
#include <sys/syscall.h>
#include <unistd.h>

#include "engine.h"

namespace commplan {
namespace {

std::mutex mutex;                    // guards `set_signals`
PythonSignals python;                // valid if `is_set`
std::atomic<bool> is_set{false};     // false before and after Python runs
std::atomic<void*> raised{nullptr};  // the exception of a signal handler, which `interruption` returns

// Whether this is the main thread of the process, in which Python runs signal handlers.
bool main_thread() {
#if defined(SYS_gettid)
  return syscall(SYS_gettid) == getpid();
#else
  return false;
#endif
}

}  // namespace

void set_signals(const PythonSignals& functions) {
  std::lock_guard<std::mutex> lock(mutex);
  python = functions;
  is_set = functions.check != nullptr;
}

bool interrupted() {
  if (!is_set || !main_thread()) return false;
  int state = python.ensure();
  bool raises = python.check() != 0;
  if (raises) {
    void *kind = nullptr, *error = nullptr, *trace = nullptr;
    python.fetch(&kind, &error, &trace);
    python.normalize(&kind, &error, &trace);
    raised = error;
  }
  python.release(state);
  return raises;
}

void* interruption() { return raised.exchange(nullptr); }

}  // namespace commplan
