// Finds the ranks that block the others from their answers, and sends the verdict to all ranks.
#include <dirent.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "watch.h"

namespace commplan {
namespace {

constexpr int64_t kSettle = 200'000'000;  // nanoseconds until all ranks have received a verdict

std::string seconds(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(nanoseconds) * 1e-9);
  return text;
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  constexpr size_t kShown = 8;
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > kShown ? text + " and " + std::to_string(ranks.size() - kShown) + " more" : text;
}

// The state of a process or thread according to the kernel; X if it does not exist. folder: its folder in
// `/proc`.
char state_in(const std::string& folder) {
  std::string line = first_line((folder + "/stat").c_str());
  size_t at = line.rfind(')');
  return at == std::string::npos || at + 2 >= line.size() ? 'X' : line[at + 2];
}

}  // namespace

bool waits_for_core(int64_t pid) {
  std::string tasks = "/proc/" + std::to_string(pid) + "/task/";
  std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(tasks.c_str()), closedir);
  for (const dirent* task; folder != nullptr && (task = readdir(folder.get())) != nullptr;) {
    std::string thread = tasks + task->d_name;
    if (first_line((thread + "/comm").c_str()) == kThreadName) return state_in(thread) == 'R';
  }
  return false;
}

char Watch::state(int rank) const {
  if (std::strcmp(processes_[rank].machine, processes_[rank_].machine) != 0) return '?';
  return state_in("/proc/" + std::to_string(processes_[rank].pid));
}

bool Watch::could_run(int rank) const {
  char state = this->state(rank);
  return state == 'R' || state == 'S';
}

bool Watch::starved(const std::vector<int>& ranks) const {
  return std::any_of(ranks.begin(), ranks.end(),
                     [this](int rank) { return could_run(rank) && waits_for_core(processes_[rank].pid); });
}

std::string Watch::silent(int rank) const {
  const Process& process = processes_[rank];
  const Process& mine = processes_[rank_];
  char state = this->state(rank);
  if (state == '?') {
    return "does not answer: it is stopped or dead, or host " + std::string(process.host) + " cannot be reached";
  }
  if (state == 'Z' || state == 'X') return "has died";
  if (state == 'T' || state == 't') return "is stopped (SIGSTOP, or a debugger)";
  if (state == 'D') return "is stuck in the kernel (a disk or a file system that does not answer)";
  bool near = std::strcmp(process.host, mine.host) == 0;  // otherwise the host may be unreachable
  const char* why = waits_for_core(process.pid) ? "gets no core: the machine is too busy" : "its threads do not run";
  return std::string("does not answer: its process lives, and ") + why +
         (near ? std::string() : ", or " + std::string(process.host) + " cannot be reached");
}

// A note with the PID and the host of a rank.
std::string Watch::identity(int rank) const {
  std::string pid = std::to_string(processes_[rank].pid);
  bool stopped = state(rank) == 'T' || state(rank) == 't';
  return "\nnote: rank " + std::to_string(rank) + " is PID " + pid + " on " + processes_[rank].host +
         (stopped ? ", and lives: kill -CONT " + pid + " lets it end" : "");
}

std::string Watch::described(int rank, const Report& report) const {
  std::string text = "\nnote: rank " + std::to_string(rank) + " (process " + std::to_string(processes_[rank].pid) +
                     " on " + processes_[rank].host + ") is alive, in no collective for " + seconds(report.idle);
  if (!report.last.empty()) {
    text += "; it last finished " + report.last + ", " + std::to_string(report.runs) + " times so far";
  }
  return report.stack.empty() ? text : text + "\nnote: its Python: " + report.stack;
}

// Blames the ranks that do not answer. If there are none, it blames ranks that have not begun an operation that
// others wait in, and are in no operation themselves. Otherwise the ranks wait for one another.
void Watch::conclude() {
  reports_[rank_] = std::make_unique<Report>(own_report());
  const Report& mine = *reports_[rank_];
  if (mine.waited < 0 || mine.idle < bound_) return;
  std::vector<int> silent_ranks, late, waiting{rank_};
  std::vector<char> reached(size_, 0);
  reached[rank_] = 1;
  int64_t least = mine.idle;
  std::vector<int64_t> ended = locked(ended_), left = locked(left_);
  for (size_t next = 0; next < waiting.size(); ++next) {
    int rank = waiting[next];
    for (const Partner& partner : reports_[rank]->partners) {
      int other = partner.rank;
      // The channel reports a partner whose program has ended without the operation.
      if (rank == rank_ && ended[other] < partner.number) return;
      if (reached[other] || left[other] != Channel::kRunning) continue;
      if (!reports_[other]) {
        reached[other] = 1;
        silent_ranks.push_back(other);
        continue;
      }
      const Report& report = *reports_[other];
      bool late_here = report.begun[rank] < partner.number;
      if (!late_here && report.waited < 0) continue;
      reached[other] = 1;
      if (report.waited >= 0) {
        waiting.push_back(other);
        least = std::min(least, report.idle);
      } else {
        late.push_back(other);
      }
    }
  }
  std::string waited = seconds(mine.waited), text;
  std::sort(waiting.begin(), waiting.end());
  auto able = std::stable_partition(silent_ranks.begin(), silent_ranks.end(), [this](int rank) { return !could_run(rank); });
  if (able != silent_ranks.begin()) silent_ranks.erase(able, silent_ranks.end());
  if (starved(silent_ranks) && mine.idle < first_) return;
  if (!silent_ranks.empty()) {
    for (int rank : silent_ranks) {
      text += (text.empty() ? "rank " : "\nnote: rank ") + std::to_string(rank) + " " + silent(rank);
    }
    for (size_t i = 0; i < std::min<size_t>(silent_ranks.size(), 4); ++i) text += identity(silent_ranks[i]);
    text += "\nnote: nothing has moved for " + seconds(mine.idle) + "; " + listed(waiting) +
            (waiting.size() > 1 ? " wait" : " waits");
    for (size_t i = 0; i < std::min<size_t>(waiting.size(), 4); ++i) {
      const std::string& at = reports_[waiting[i]]->at;
      if (!at.empty()) text += "\nnote: rank " + std::to_string(waiting[i]) + " waits " + at;
    }
  } else if (!late.empty()) {
    bool excused = std::any_of(late.begin(), late.end(), [&](int rank) { return reports_[rank]->busy > 0; });
    std::lock_guard<std::mutex> lock(mutex_);
    if (excused || active_.empty() || mine.idle < time_limit(*active_.front().operation, true)) return;
    text = listed(late) + (late.size() > 1 ? " have" : " has") + " not come within " + waited;
    for (size_t i = 0; i < std::min<size_t>(late.size(), 4); ++i) text += described(late[i], *reports_[late[i]]);
    std::string limit = seconds(busy_);
    if (mine.idle < busy_) {
      if (waiting.front() == rank_ && noticed_ != active_.front().number) {
        noticed_ = active_.front().number;
        text += "\nnote: " + mine.where + " waits for it";
        std::fprintf(stderr, "commplan: %s\nnote: it ends after %s: put longer work into `with run.late():`, or %s\n",
                     text.c_str(), limit.c_str(), "bind(.., busy_s=SECONDS) waits longer");
      }
      return;
    }
    text += "\nnote: the limit is " + limit + ": put longer work into `with run.late():`, or " +
            "bind(.., busy_s=SECONDS) waits longer";
  } else {
    if (least < bound_) return;
    bool same = true;
    for (int rank : waiting) same &= reports_[rank]->where == mine.where;
    text = same ? "all ranks have come, and nothing has moved for " + seconds(least)
                : "the ranks wait for one another since " + seconds(least) + ", in another order of collectives";
    for (size_t i = 0; i < std::min<size_t>(waiting.size(), 4); ++i) {
      const Report& report = *reports_[waiting[i]];
      text += "\nnote: rank " + std::to_string(waiting[i]) + " waits in " + report.where;
      if (!report.at.empty()) text += ", " + report.at;
    }
  }
  judge(text, mine.where);
}

void Watch::judge(const std::string& text, const std::string& line) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!verdict_.empty()) return;
    verdict_ = text;
    line_ = line;
    effective_ = now() + kSettle;
    recorder_.add(Recorder::kVerdict, text.substr(0, text.find('\n')), 0, 0, 0);
  }
  tell(text, line);
}

// Decides whether the ranks that this rank waits for at its end are dead. A living rank may still have work
// to do.
void Watch::conclude_parting() {
  std::vector<int> silent_ranks;
  std::vector<int64_t> left = locked(left_);
  for (int rank = 0; rank < size_; ++rank) {
    if (left[rank] != Channel::kRunning || !asks_[rank]) continue;
    if (!reports_[rank]) {
      silent_ranks.push_back(rank);
      continue;
    }
    if (reports_[rank]->waited < 0 && now() - parting_ > first_ && !announced_) {
      announced_ = true;
      std::string text = "this process has ended and waits for rank " + std::to_string(rank);
      text += described(rank, *reports_[rank]);
      std::fprintf(stderr, "commplan: %s\n", text.c_str());
    }
    return;
  }
  if (silent_ranks.empty() || (starved(silent_ranks) && now() - parting_ < first_)) return;
  std::string text;
  for (int rank : silent_ranks) {
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " " + silent(rank);
  }
  abandoned_ = true;
  judge(text + ", and all others have ended" + identity(silent_ranks[0]), "");
}

}  // namespace commplan
