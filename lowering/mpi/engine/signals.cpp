// Ctrl-C while Python's main thread waits in an operation: Python notes a signal at once and handles it when it next
// runs, which it would not before the wait ends. So whoever waits lets it.
#include <sys/syscall.h>
#include <unistd.h>

#include "engine.h"

namespace commplan {
namespace {

std::mutex mutex;
PythonSignals python;
std::atomic<bool> known{false};
std::atomic<void*> raised{nullptr};

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
  known = functions.check != nullptr;
}

bool interrupted() {
  if (!known || !main_thread()) return false;
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
