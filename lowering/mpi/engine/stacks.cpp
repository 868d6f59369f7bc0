// The stack of Python's main thread. Python returns it, unless the main thread holds the interpreter's lock in C
// code. Then the handler of a signal, which needs no lock, writes the frames of all threads to a file
// (`recorder/file.py`).
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "watch.h"

namespace commplan {
namespace {

constexpr int64_t kPython = 500'000'000, kHandler = 300'000'000, kPoll = 20'000'000;  // nanoseconds
constexpr size_t kLongest = 2048;                                                     // bytes of a stack
// Nanoseconds for which a stack is reused, since all ranks query at the same time.
constexpr int64_t kFresh = 1'000'000'000;
constexpr int kFrames = 6;                                                            // number of innermost frames
constexpr char kLocked[] = "it holds the interpreter's lock";

std::atomic<StackWriter> writer{nullptr};
std::mutex mutex;  // guards the following variables
std::string path;
int handled = 0;  // the signal

// Formats `  File "x.py", line 3 in f` as `x.py:3 in f`; empty for another line.
std::string frame(const std::string& line) {
  constexpr char kFile[] = "  File \"", kLine[] = "\", line ";
  size_t at = line.find(kLine);
  if (line.rfind(kFile, 0) != 0 || at == std::string::npos) return {};
  return line.substr(sizeof kFile - 1, at - sizeof kFile + 1) + ":" + line.substr(at + sizeof kLine - 1);
}

// Whether a frame belongs to Python, an installed package or commplan rather than the user's program.
bool installed(const std::string& shown) {
  for (const char* part : {"/site-packages/", "/dist-packages/", "/lib/python3.", "<frozen ", "/commplan/"}) {
    if (shown.find(part) != std::string::npos) return true;
  }
  return false;
}

std::string written(int64_t from) {
  std::ifstream file(path, std::ios::binary);
  file.seekg(from);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The frames that the signal handler has written, innermost first; empty if it has written none.
std::string frames_by_signal() {
  std::lock_guard<std::mutex> lock(mutex);
  struct sigaction action {};
  // Without a handler, which Python removes when it shuts down, the signal would end the process.
  if (handled == 0 || sigaction(handled, nullptr, &action) != 0 || action.sa_handler == SIG_DFL) return {};
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return {};
  int64_t from = file.tellg();
  if (syscall(SYS_tgkill, getpid(), getpid(), handled) != 0) return {};
  std::string text, before;
  for (int64_t until = now() + kHandler; now() < until && (text.empty() || text != before);) {
    sleep_ns(kPoll);
    before = std::move(text);
    text = written(from);
  }
  size_t at = text.find("Current thread"), next = text.find('\n', at);
  std::vector<std::string> every, users;
  while (next != std::string::npos) {
    size_t end = text.find('\n', next + 1);
    std::string shown = frame(text.substr(next + 1, end == std::string::npos ? end : end - next - 1));
    if (shown.empty()) break;
    if (!installed(shown)) users.push_back(shown);
    every.push_back(shown);
    next = end;
  }
  std::string frames;
  for (const std::string& shown : users.empty() ? every : users) {
    if (&shown - (users.empty() ? every : users).data() == kFrames) break;
    frames += (frames.empty() ? "" : ", from ") + shown;
  }
  return frames;
}

std::string asked_stack() {
  StackWriter function = writer.load();
  if (function == nullptr) return {};
  struct Shared {
    std::mutex mutex;
    std::condition_variable done;
    bool ready = false;
    char text[kLongest] = {};
  };
  auto shared = std::make_shared<Shared>();
  std::thread([shared, function] {
    char text[kLongest] = {};
    function(text, kLongest - 1);
    std::lock_guard<std::mutex> lock(shared->mutex);
    std::memcpy(shared->text, text, kLongest);
    shared->ready = true;
    shared->done.notify_one();
  }).detach();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->done.wait_for(lock, std::chrono::nanoseconds(kPython), [&] { return shared->ready; });
  if (shared->ready) return shared->text;
  lock.unlock();
  std::string frames = frames_by_signal();
  return frames.empty() ? kLocked : frames + "; " + kLocked;
}

}  // namespace

void set_stack_writer(StackWriter function) { writer = function; }

void set_stack_signal(const char* file, int signal) {
  std::lock_guard<std::mutex> lock(mutex);
  path = file;
  handled = signal;
}

std::string python_stack() {
  static auto* stack = new std::string;  // used by the watchdog's thread only, which may outlive static objects
  static int64_t at = 0;
  if (at == 0 || now() - at > kFresh) {
    *stack = asked_stack();
    at = now();
  }
  return *stack;
}

}  // namespace commplan
