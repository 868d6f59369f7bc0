// What watches the operations of a channel (watch.cpp, verdict.cpp).
#pragma once

#include <unordered_map>

#include "engine.h"

namespace commplan {

// Writes what Python's main thread does, at most so many bytes.
using StackWriter = void (*)(char* text, int64_t most);
void set_stack_writer(StackWriter function);
void set_stack_signal(const char* file, int signal);  // has the main thread write its frames to a file; 0: none
std::string python_stack();  // what the main thread does, or nothing; within a second
void add_busy(int change);  // this process says itself that it will come later
constexpr char kThreadName[] = "commplan-watch";  // of the thread that answers (also `runtime/observe/watchdog.py`)
bool waits_for_core(int64_t pid);  // whether that thread of a process of this machine could run, and does not yet
std::string first_line(const char* path);

// What a rank began and ended (recorder.cpp). base: a file's memory, or null; it stays mapped.
class Recorder {
 public:
  static constexpr int64_t kNameBytes = 128;
  enum Happened : int64_t { kBegin = 1, kEnd = 2, kFailed = 3, kVerdict = 4, kWaited = 5, kRound = 7 };
  explicit Recorder(char* base) : base_(base) {}
  void add(Happened kind, const std::string& text, int64_t operation, int64_t runs, int64_t nbytes);
  void release() { base_ = nullptr; }  // the memory is not written to any more

 private:
  int64_t name(const std::string& text);
  char* base_;
  std::unordered_map<std::string, int64_t> names_;
};

// bound: nanoseconds in which nothing moves before the others are asked, or five times what usually passes between two
// runs of the operation, whichever is longer; `first` of an operation that has seldom run, if the late are alive:
// they may be compiling. Ranks that are alive and late are printed then, and have `busy` nanoseconds before the
// operation fails. All ranks make one alike. requests: of workers to servers, which do not answer while they do
// something else: then they are late as others are.
class Watch {
 public:
  Watch(MPI_Comm channel, int64_t bound, int64_t first, int64_t busy, char* record, bool requests);
  int64_t begin(Operation& operation);  // its number, of those of this rank
  void end(Operation& operation);
  void waited(int64_t number, int64_t nanoseconds);  // for what was begun before, until it had ended
  void moved() { moved_.store(now(), std::memory_order_relaxed); }
  // last: of the operations in common, the last that a rank has begun whose program ends. leaves: it has left, too.
  void has_ended(int rank, int64_t last, bool leaves);
  std::string verdict();  // why all that waits must end, or empty
  std::string summary();  // the first line of the verdict, and the plan's line that waited
  void serve(const Served& served);
  void part();            // from now on this rank waits for the others to leave
  bool abandoned() const { return abandoned_; }  // none of those that it waits for will: see `verdict`
  void stop();
  bool release();  // once stopped: gives its communicator back, unless something is on its way to others

 private:
  struct Active {
    Operation* operation;
    int64_t since, number, runs;
  };
  struct Cadence {  // of one operation of the program
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
  // What a rank says of itself. waited: nanoseconds in its oldest operation, -1 where it is in none; idle: since
  // something last moved. begun: by rank, of the operations in common, the last that it has begun. runs: of `last`. at:
  // where in its oldest operation.
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
  int64_t patience(const Operation& operation, bool alive);
  Report own_report();
  std::vector<int64_t> locked(const std::vector<int64_t>& numbers);  // a copy
  char state(int rank) const;  // of its process, as the kernel says it; ? on another machine
  bool could_run(int rank) const;
  bool starved(const std::vector<int>& ranks) const;  // on a busy machine a thread may wait for a core for seconds
  std::string silent(int rank) const;
  std::string identity(int rank) const;
  std::string described(int rank, const Report& report) const;

  const int64_t bound_, first_, busy_;
  const bool requests_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int own_ = 0, size_ = 0;
  std::vector<Process> processes_;
  std::atomic<int64_t> moved_{0};
  std::mutex mutex_;  // of what follows
  Recorder recorder_;
  int64_t operations_ = 0;
  std::vector<Active> active_;  // in the order in which they began
  int64_t recorded_ = 0;        // the operation whose progress was recorded last, and what that was
  Progress progress_;
  std::unordered_map<const std::string*, Cadence> cadences_;
  std::vector<int64_t> begun_;
  std::vector<int64_t> ended_, left_;  // by rank, what `has_ended` said, or kHere
  const std::string* last_ = nullptr;
  int64_t last_runs_ = 0, effective_ = 0;
  int64_t served_ = 0;  // when this server last said something of itself
  std::vector<Partner> awaited_;
  bool holds_ = false, patient_ = false;  // see `Served`
  std::atomic<int64_t> parting_{0};
  std::atomic<bool> abandoned_{false};
  std::string verdict_, line_;
  // The watching thread's own.
  std::vector<std::unique_ptr<Sent>> sent_;
  std::vector<std::unique_ptr<Report>> reports_;
  std::vector<char> asks_;
  int64_t serial_ = 0, asked_ = 0, next_ = 0;
  bool announced_ = false;
  int64_t noticed_ = 0;  // the operation of which it was printed who is late
};

}  // namespace commplan
