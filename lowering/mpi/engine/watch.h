// The watchdog of a channel (watch.cpp, verdict.cpp).
#pragma once

#include <unordered_map>

#include "engine.h"

namespace commplan {

// Writes the stack of Python's main thread, at most `most` bytes.
using StackWriter = void (*)(char* text, int64_t most);
void set_stack_writer(StackWriter function);
// The main thread writes its frames to `file` on `signal`; 0: none.
void set_stack_signal(const char* file, int signal);
std::string python_stack();  // the stack of the main thread, or empty; takes at most a second
void add_busy(int change);  // this process announces that it will join later
constexpr char kThreadName[] = "commplan-watch";  // of the thread that answers (also `runtime/observe/watchdog.py`)
bool waits_for_core(int64_t pid);  // whether that thread of a process on this machine is runnable but not running
std::string first_line(const char* path);

// Writes the flight record of a rank (recorder.cpp). base: the mapped file, or null.
class Recorder {
 public:
  static constexpr int64_t kNameBytes = 128;
  enum Happened : int64_t { kBegin = 1, kEnd = 2, kFailed = 3, kVerdict = 4, kWaited = 5, kRound = 7 };
  explicit Recorder(char* base) : base_(base) {}
  void add(Happened kind, const std::string& text, int64_t operation, int64_t runs, int64_t nbytes);
  void release() { base_ = nullptr; }  // stops writing to the memory

 private:
  int64_t name(const std::string& text);
  char* base_;
  std::unordered_map<std::string, int64_t> names_;
};

// bound: nanoseconds without progress after which the other ranks are queried. If five times the median interval
// between two runs of the operation is longer, this applies instead. first: the bound in the first runs of an
// operation, as long as the late ranks are alive, since they may be compiling. busy: nanoseconds that ranks have
// that are alive and late; they are printed before the operation fails. requests: a channel of workers and servers,
// where a busy server counts as late. Constructed collectively.
class Watch {
 public:
  Watch(MPI_Comm channel, int64_t bound, int64_t first, int64_t busy, char* record, bool requests);
  int64_t begin(Operation& operation);  // returns its number among the operations of this rank
  void end(Operation& operation);
  // Records how long the program waited for an operation that was started before.
  void waited(int64_t number, int64_t nanoseconds);
  void moved() { moved_.store(now(), std::memory_order_relaxed); }
  // The program of `rank` has ended; `last` is the last operation that it has begun with this rank. leaves:
  // it has left, too.
  void has_ended(int rank, int64_t last, bool leaves);
  std::string verdict();  // why all pending operations must end; empty if there is no reason
  std::string summary();  // the first line of the verdict, and the line of the plan that waited
  void serve(const ServerStatus& status);
  void part();            // from now on this rank waits for the others to leave
  bool abandoned() const { return abandoned_; }  // no rank that it waits for will leave: see `verdict`
  void stop();
  bool release();  // after `stop`: frees the communicator; false if messages are pending

 private:
  struct Active {
    Operation* operation;
    int64_t since, number, runs;
  };
  struct Cadence {  // the times of one operation of the program
    int64_t runs = 0, began = 0;
    std::vector<int64_t> intervals;
  };
  struct Process {
    int64_t pid;
    char machine[128], host[72];
  };
  struct Sent {
    std::string bytes;
    MPI_Request request;
  };
  // The answer of a rank. waited: nanoseconds in its oldest operation, -1 if there is none. idle: nanoseconds since
  // anything moved. begun: by rank, the number of the last operation with it. runs: how often `last` has run. at: the
  // progress of its oldest operation.
  struct Report {
    int64_t waited = -1, idle = 0, busy = 0, runs = 0;
    std::vector<int64_t> begun;
    std::vector<Partner> partners;  // of the oldest operation
    std::string where, at, last, stack;
  };

  struct Watches;
  static Watches& all();

  void listen();
  void answer(int rank, int64_t serial);
  void record_progress();
  void look();
  void conclude();
  void conclude_parting();
  void judge(const std::string& text, const std::string& line);
  void tell(const std::string& verdict, const std::string& line);
  void send(int rank, int tag, const std::string& bytes);
  int64_t time_limit(const Operation& operation, bool alive);
  Report own_report();
  std::vector<int64_t> locked(const std::vector<int64_t>& numbers);  // a copy
  char state(int rank) const;  // the state of its process according to the kernel; ? on another machine
  bool could_run(int rank) const;
  bool starved(const std::vector<int>& ranks) const;  // on a busy machine a thread may wait seconds for a core
  std::string silent(int rank) const;
  std::string identity(int rank) const;
  std::string described(int rank, const Report& report) const;

  const int64_t bound_, first_, busy_;
  const bool requests_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 0;
  std::vector<Process> processes_;
  std::atomic<int64_t> moved_{0};
  std::mutex mutex_;  // guards the following members
  Recorder recorder_;
  int64_t operations_ = 0;
  std::vector<Active> active_;  // in the order in which they began
  int64_t recorded_ = 0;        // the operation whose progress was recorded last
  Progress progress_;
  std::unordered_map<const std::string*, Cadence> cadences_;
  std::vector<int64_t> begun_;
  std::vector<int64_t> ended_, left_;  // by rank, the argument of `has_ended`, or kRunning
  const std::string* last_ = nullptr;
  int64_t last_runs_ = 0, effective_ = 0;
  int64_t reported_ = 0;  // time of this server's last report
  std::vector<Partner> awaited_;
  bool worker_waits_ = false, patient_ = false;  // see `ServerStatus`
  std::atomic<int64_t> parting_{0};
  std::atomic<bool> abandoned_{false};
  std::string verdict_, line_;
  // Used only by the watchdog's thread.
  std::vector<std::unique_ptr<Sent>> sent_;
  std::vector<std::unique_ptr<Report>> reports_;
  std::vector<char> asks_;
  int64_t serial_ = 0, asked_ = 0, next_ = 0;
  bool announced_ = false;
  int64_t noticed_ = 0;  // the operation of which it was printed who is late
};

}  // namespace commplan
