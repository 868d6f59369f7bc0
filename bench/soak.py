"""Thousands of exchanges with servers, while workers are killed by kill -9 and join, at random moments.

    python -m bench.soak --steps 20000 --seed 0

Cases: `async` and `hogwild` (by messages, two servers) and `shared` (hogwild in shared memory) begin with
some of ten workers, and others join later; `0` and `2` are synchronous exchanges at two servers with that
staleness, which all six workers begin. Each case makes --steps exchanges in all, and loses half of its
workers. A worker logs its answers in a file, which survives its death.

No push is lost: with eta rho = 1 the centre becomes the worker's value, and the worker receives the previous
one, so all pushes form a chain that contains each acknowledged push; only unacknowledged pushes of dead
workers may be in it or not. An exchange adds 1 to the elements of its worker. Updates in shared memory take
no lock, so there only requests are counted. No process hangs: there is an answer every 60 s. Memory is flat:
the slope of the servers' resident bytes after the first tenth. Exit 1 if any check fails.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.servers.mpirun import command, environment

WAYS = {"async": (10, 1), "hogwild": (10, 2), "shared": (10, 1), "0": (6, 2), "2": (6, 2)}
UNITS, SPAN = 3, 1 << 17  # of the state; what tells workers' numbers apart, as in bench.servers.soak_ranks
PATIENCE_S = 120.0
FLAT = 0.01  # of the resident bytes may be gained in all steps after the first tenth


@dataclass
class Soak:
    """One way. joined, killed: workers, in that order. samples: exchanges and resident KiB of each server."""

    way: str
    folder: Path
    steps: int
    rng: random.Random
    joined: list[int] = field(default_factory=list[int])
    killed: list[int] = field(default_factory=list[int])
    samples: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def __post_init__(self) -> None:
        self.workers, self.servers = WAYS[self.way]
        self.elastic = self.servers == 1 or self.way == "hogwild"
        self.record = 4 * (UNITS if self.elastic else 1)  # bytes of a note

    def run(self) -> list[str]:
        """The errors."""
        words = command(
            self.workers + self.servers, "bench.servers.soak_ranks", self.folder, self.way, self.servers,
            options=("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"),
        )  # fmt: skip
        with (
            (self.folder / "said").open("wb") as output,
            subprocess.Popen(words, env=environment(), stdout=output, stderr=output) as job,
        ):
            problem = self.watched(job)
            if problem:
                job.terminate()
                try:
                    job.wait(10)
                except subprocess.TimeoutExpired:
                    job.kill()
        if problem:
            return [f"{self.way}: {problem}", (self.folder / "said").read_text(errors="replace")[-2000:]]
        return [f"{self.way}: {text}" for text in (*self.lost(), *self.counted(), *self.memory()[1])]

    # --- while it runs ---

    def watched(self, job: subprocess.Popen[bytes]) -> str:
        """Let workers join and kill them, until all is done; returns the errors."""
        ranks = range(self.workers + self.servers)
        if not self.wait(job, [f"bound-{rank}" for rank in ranks]):
            return "ranks hang before they begin"
        self.pids = [int((self.folder / f"bound-{rank}").read_text()) for rank in ranks]
        events = self.events()
        total, moved, sampled = 0, time.monotonic(), 0.0
        while total < self.steps:
            while events and events[0][0] <= total:
                self.happen(*events.pop(0)[1:])
            if (now := time.monotonic()) - sampled > 0.1:
                self.samples.append((total, *map(_resident, self.pids[self.workers :])))
                sampled = now
            before, total = total, self.total()
            moved = now if total > before else moved
            if now - moved > PATIENCE_S or job.poll() is not None:
                return f"nothing goes on after {total} exchanges; {self.killed} were killed"
            time.sleep(5e-3)
        living = [rank for rank in self.joined if rank not in self.killed]
        (self.folder / f"last-{living[0]}").touch()
        (self.folder / "stop").touch()
        for rank in sorted(set(range(self.workers)) - set(self.joined) - set(self.killed)):
            self.happen("join", rank)
            living.append(rank)
        if not self.wait(job, [f"done-{rank}" for rank in living[1:]]):
            return f"workers do not end: {living[1:]}"
        (self.folder / "finish").touch()
        served = [f"served-{rank}" for rank in ranks if rank >= self.workers]
        if not self.wait(job, ["last.npy", *served]):
            return "the last worker, or the servers, do not end"
        try:
            job.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "mpirun does not end"
        return ""

    def events(self) -> list[tuple[float, str, int]]:
        """The events, by the number of completed exchanges."""
        late = range(self.workers // 3 + 1, self.workers) if self.elastic else range(0)
        events: list[tuple[float, str, int]] = []
        for rank in range(self.workers):
            events.append((self.rng.uniform(0, 0.8) * self.steps if rank in late else 0, "join", rank))
        for rank in self.rng.sample(range(self.workers), self.workers // 2):
            events.append((self.rng.uniform(0.05, 0.95) * self.steps, "kill", rank))
        return sorted(events)

    def happen(self, event: str, rank: int) -> None:
        if event == "kill":
            if rank == 0 and not self.noted(0):
                return  # without its put there is no centre
            time.sleep(self.rng.uniform(0, 0.01))
            os.kill(self.pids[rank], signal.SIGKILL)
            self.killed.append(rank)
        else:
            (self.folder / f"join-{rank}").touch()
            self.joined.append(rank)

    def wait(self, job: subprocess.Popen[bytes], names: Sequence[str]) -> bool:
        until = time.monotonic() + PATIENCE_S
        while not all((self.folder / name).exists() for name in names):
            if time.monotonic() > until or (job.poll() is not None and job.returncode and not self.killed):
                return False
            time.sleep(5e-3)
        return True

    def noted(self, rank: int) -> int:
        path = self.folder / f"note-{rank}"
        return path.stat().st_size // self.record if path.exists() else 0

    def total(self) -> int:
        return sum(map(self.noted, range(self.workers)))

    # --- afterwards ---

    def lost(self) -> list[str]:
        """Pushes that were answered and are not in the weights."""
        if self.way == "shared":
            return []
        last: Any = np.load(self.folder / "last.npy")
        if not self.elastic:
            problems: list[str] = []
            for rank in range(self.workers):
                counts = set(last[np.arange(last.size) % self.workers == rank].tolist())
                may = self.noted(rank) + (rank in self.killed)
                if len(counts) != 1 or not self.noted(rank) <= min(counts) <= may:
                    problems.append(f"worker {rank} was answered {self.noted(rank)} times, not {counts}")
            return problems
        notes = [self.note(rank).reshape(-1, UNITS) for rank in range(self.workers)]
        edges = [last.size * unit // UNITS for unit in range(UNITS + 1)]
        problems: list[str] = []
        for unit in range(UNITS):
            present = set(last[edges[unit] : edges[unit + 1]].tolist())
            problems += self.chained([note[:, unit] for note in notes], present)
        return problems

    def note(self, rank: int) -> Any:
        path = self.folder / f"note-{rank}"
        data = path.read_bytes() if path.exists() else b""
        return np.frombuffer(data[: len(data) // self.record * self.record], np.float32)

    def chained(self, notes: Sequence[Any], last: set[Any]) -> list[str]:
        """Whether a unit's pushes form one chain from 0 to its last value.

        `notes`: the value that each push of each worker found.
        """
        own = {rank * SPAN + i + 1 for rank, note in enumerate(notes) for i in range(len(note))}
        untold = {rank * SPAN + len(notes[rank]) + 1 for rank in self.killed}
        seen = Counter([int(x) for note in notes for x in note] + [int(x) for x in last])
        twice = [x for x, count in seen.items() if count > 1]
        strange = set(seen) - own - untold - {0}
        # Each run of unacknowledged pushes hides the worker before its first one, and shows its last one.
        hidden, shown = (own | {0}) - set(seen), untold & set(seen)
        problems = [f"{sorted(strange)[:5]} were never sent"] if strange else []
        if twice:
            problems.append(f"pushes after {sorted(twice)[:5]} replaced each other")
        if len(hidden) != len(shown) or len(last) != 1:
            problems.append(f"{len(hidden)} pushes have no successor, {len(shown)} may have none")
        return problems

    def counted(self) -> list[str]:
        problems: list[str] = []
        for server in range(self.workers, self.workers + self.servers):
            requests, shared, lost = map(int, (self.folder / f"served-{server}").read_text().split())
            count = shared if self.way == "shared" else requests
            if count < self.total() or lost != len(self.killed):
                problems.append(
                    f"server {server} counts {count} requests and {lost} dead,"
                    f" workers {self.total()} answers, and {len(self.killed)} were killed"
                )
        return problems

    def memory(self) -> tuple[list[tuple[float, float]], list[str]]:
        """For each server its MiB at the end, and KiB gained in 1,000 exchanges; and the servers that
        grow."""
        table = np.array([sample for sample in self.samples if sample[0] >= self.steps / 10], np.float64)
        slopes: list[tuple[float, float]] = []
        problems: list[str] = []
        for server in range(self.servers):
            resident = table[:, server + 1]
            slope = float(np.polyfit(table[:, 0], resident, 1)[0])
            slopes.append((float(resident[-1]) / 1024, 1000 * slope))
            if slope * self.steps > FLAT * resident[-1]:
                problems.append(f"server {server} gains {1000 * slope:.0f} KiB in 1,000 exchanges")
        return slopes, problems


def _resident(pid: int) -> int:
    """KiB of a process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20000, help="exchanges of each way (20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args(arguments)
    failed = False
    for way in str(options.ways).split(","):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            soak = Soak(way, Path(name), options.steps, random.Random(f"{way} {options.seed}"))
            problems = soak.run()
            late = len(soak.joined) - soak.workers // 3 - 1 if soak.elastic else 0
            text = f"{way}: {soak.total()} exchanges of {soak.workers} workers, {late} joined later,"
            text += f" {len(soak.killed)} killed, {time.perf_counter() - begin:.0f} s"
            if not problems:
                each = [f"{size:.0f} MiB {slope:+.1f} KiB/1,000" for size, slope in soak.memory()[0]]
                text += f"; servers {', '.join(each)}"
        print(text, flush=True)
        print("\n".join(problems) or "  nobody hung, no push was lost, memory is flat", flush=True)
        failed |= bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
