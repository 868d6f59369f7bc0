"""Starts and stops of processes that share their input, checked by the batches that they log.

    python -m bench.lifecycle --count 300 --seed 0 --json summary.json
    python -m bench.lifecycle --kinds feed,group --case 17          # one of them again

A start is two to four processes that read a few epochs together. They are started by hand (`feed`, `group`,
`group clocks`), by `mpirun` (`mpirun`, `mpirun clocks`) or with `jax.distributed` (`jax`, `jax clocks`). In
most starts some processes are killed (-9), are stopped for a while, begin late, close early, or return with
the state that they wrote last. An event is due some milliseconds after its process has written a certain
line, the first of which precedes the opening of batches.

Each process writes each batch to a separate file before it takes the next. The checks: each member has each
record of an epoch once, over all its lives; a position in the order has the same records for all members;
contents are correct; processes end within the limit, with an error only if one was killed; a start leaves
nothing behind. A start is a pure function of seed and number. Exit 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import mpirun
from bench.harness.arguments import names, program_parser

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
from tests.support import interpreter, ports  # noqa: E402  processes need not import JAX again

HAND, LAUNCHED = ("feed", "group", "group clocks"), ("mpirun", "mpirun clocks", "jax", "jax clocks")
KINDS = (*HAND, *LAUNCHED)
WEIGHTS = (10, 4, 4, 2, 2, 2, 2)  # a start of a launcher takes seconds
DESIGNS = ("all_shared", "single_broadcast(readers = 1)", "multi_broadcast(readers = 2)")
TOKEN = uuid.uuid4().hex[:8]  # another campaign may go on at the same time
BATCH = 4
DIED = {"CP0920", "CP0921"}  # errors of processes that end with a dead one
Place = tuple[int, int]  # epoch and step


@dataclass(frozen=True)
class Event:
    """kind: kill, stop or close. line: the line of its log after which it is due, in `delay` seconds. length:
    seconds for which it is stopped."""

    kind: str
    line: int
    delay: float = 0.0
    length: float = 0.0


@dataclass
class Life:
    """One process of a start. orders: its own."""

    orders: dict[str, Any]
    event: Event | None = None
    starts_at: float = 0.0  # seconds after the first
    process: subprocess.Popen[bytes] | None = None  # of a launcher: that of the whole job
    due: float = 0.0  # when the event is due, or its end if it has happened
    happened: bool = False

    @property
    def log(self) -> Path:
        return Path(self.orders["log"])

    @property
    def lines(self) -> list[dict[str, Any]]:
        try:
            text = self.log.read_bytes()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]

    def word(self, name: str) -> Any:
        """The first value of that name in its log."""
        return next((line[name] for line in self.lines if name in line), None)

    @property
    def batches(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "records" in line]

    def signal(self, number: int) -> None:
        pid = self.word("pid")
        with contextlib.suppress(ProcessLookupError):
            if pid and _is_alive(pid):
                os.kill(pid, number)


@dataclass
class Start:
    number: int
    kind: str
    folder: Path
    orders: dict[str, Any]  # of all its processes
    lives: list[Life]
    again: bool = False  # killed members of a feed start again; of a job, all processes
    problems: list[str] = field(default_factory=list[str])

    @property
    def count(self) -> int:
        return self.orders["count"]

    @property
    def killed(self) -> bool:
        return any(life.event is not None and life.event.kind == "kill" for life in self.lives)

    def __str__(self) -> str:
        events = {life.orders["index"]: life.event for life in self.lives if life.event}
        return f"start {self.number} ({self.kind}, {self.count} processes, {events})"


def drawn(seed: int, number: int, kinds: Sequence[str], folder: Path, limit: float) -> Start:
    """Start `number` of a campaign."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choices(kinds, [WEIGHTS[KINDS.index(kind)] for kind in kinds])[0]
    count = rng.choice((2, 2, 3, 4) if kind in HAND else (2, 2, 3))
    clocks, feed = kind.endswith("clocks"), kind == "feed"
    records, epochs = rng.choice((26, 40, 61)), rng.choice((1, 2, 3))
    sizes = [rng.choice((1, 1, 2)) * BATCH for _ in range(count)]
    orders: dict[str, Any] = {
        "kind": kind, "count": count, "name": f"{TOKEN}-{number}", "base": 1000 * number,
        "members": "?" if feed else count, "seed": rng.randrange(100), "records": records, "epochs": epochs,
        "design": "" if feed or clocks else rng.choice(DESIGNS), "failure": rng.choice(("stop", "continue")),
        "batch": f"{sizes} over member" if clocks else BATCH, "timeout": limit / 4, "state": None,
        "goal": 0, "close": None,
    }  # fmt: skip
    if feed or clocks:
        orders["failure"] = "continue"
    lives: list[Life] = []
    for index in range(count):
        own = {"index": index, "log": str(folder / f"{index}.0.log"), "pace": rng.choice((0, 0, 0.002, 0.01))}
        own["own_batch"] = sizes[index] if feed and rng.random() < 0.5 else 0
        lives.append(Life({**orders, **own}))
        if rng.random() < 0.3 and kind in HAND:
            lives[-1].starts_at = rng.random()
    lines = 2 + epochs * records // BATCH
    for life in rng.sample(lives, rng.choice((0, 1, 1, 1, 2))):
        happens = rng.choices(("kill", "stop", "close"), (6, 3, 0 if kind.startswith("jax") else 1))[0]
        # Processes of a job wait in `bind` for one that dies there, for longer than a start has.
        line = rng.choice((1 if kind in HAND else 2, 2, rng.randint(2, lines)))
        length = rng.choice((0.05, 0.3, 1.0, 6.5) if feed else (0.05, 0.3, 1.0))
        if happens == "close":
            life.orders["close"] = rng.randint(1, max(1, lines - 3))
        life.event = Event(happens, line, rng.random() * rng.choice((0.002, 0.02, 0.3)), length)
    return Start(number, kind, folder, orders, lives, rng.random() < 0.5)


# --- running ---


def command(start: Start, life: Life) -> list[str]:
    return ["-m", "bench.lifecycle.member", json.dumps(life.orders)]


def launched(start: Start, lives: Sequence[Life]) -> None:
    """Start processes; those of mpirun by one command."""
    environment = {**mpirun.environment(), "PYTHONPATH": str(ROOT)}
    if start.kind.startswith("group"):
        environment["JAX_NUM_CPU_DEVICES"] = str(start.count)
    if start.kind.startswith("jax"):
        port = ports.free_port()
        for life in lives:
            life.orders["port"] = port
    python = interpreter.words(environment, jax=start.kind != "feed")
    words = [[*python, *command(start, life)] for life in lives]
    if start.kind.startswith("mpirun"):
        options = mpirun.ULFM if start.orders["failure"] == "continue" else ()
        words = [_job(options, words)]
    with (start.folder / "errors.txt").open("ab") as errors:
        processes = [
            subprocess.Popen(
                each, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment, cwd=ROOT
            )
            for each in words
        ]
    for place, life in enumerate(lives):
        life.process = processes[min(place, len(processes) - 1)]


def _job(options: Sequence[str], ranks: Sequence[Sequence[str]]) -> list[str]:
    """An mpirun whose ranks have a command each."""
    path = str(Path(sys.executable).parent / "mpirun")
    command = [path, *options, "--oversubscribe", "--bind-to", "none"]
    for number, words in enumerate(ranks):
        command += [*([":"] if number else []), "-n", "1", *words]
    return command


def tended(start: Start, lives: Sequence[Life], limit: float) -> None:
    """Run `lives` to their end, and apply their events."""
    begin = time.monotonic()
    waiting = sorted(lives, key=lambda life: life.starts_at)
    if start.kind not in HAND:
        launched(start, waiting)
        waiting = []
    while True:
        now = time.monotonic()
        while waiting and now - begin >= waiting[0].starts_at:
            launched(start, [waiting.pop(0)])
        running = [life for life in lives if life.process is None or life.process.poll() is None]
        for life in running:
            _let_happen(life, now)
        if not running:
            return
        if now - begin > limit:
            _end(start, running)
            return
        time.sleep(0.003)


def _let_happen(life: Life, now: float) -> None:
    event = life.event
    if event is None or event.kind == "close":
        return
    if life.happened:
        if life.due and now >= life.due:
            life.signal(signal.SIGCONT)
            life.due = 0.0
        return
    if not life.due:
        with contextlib.suppress(FileNotFoundError):
            if life.log.read_bytes().count(b"\n") >= event.line:
                life.due = now + event.delay
        return
    if now >= life.due:
        life.signal(signal.SIGKILL if event.kind == "kill" else signal.SIGSTOP)
        life.happened, life.due = True, now + event.length if event.kind == "stop" else 0.0


def _end(start: Start, running: Sequence[Life]) -> None:
    """End processes that have run for too long, once they have written their stacks."""
    for life in running:
        life.signal(signal.SIGCONT)
        life.signal(signal.SIGUSR1)
    time.sleep(1.0)
    for life in running:
        start.problems.append(f"process {life.orders['index']} hung after {life.lines[-1:]}")
        life.signal(signal.SIGKILL)
    for process in {id(life.process): life.process for life in running if life.process}.values():
        process.kill()
        process.wait()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def second_lives(start: Start) -> list[Life]:
    """The second lives of killed members of a feed, or of all processes of a job."""
    dead = [life for life in start.lives if life.happened and life.word("pid") and not _ended(life)]
    if not start.again or not dead or start.problems:
        return []
    if start.kind == "feed":
        states = [_state(life) for life in dead]
    elif start.kind.endswith("clocks") or not all(life.word("joined") for life in start.lives):
        return []
    else:  # from the place of the process that is furthest behind
        dead = start.lives
        least = min(filter(None, map(_state, dead)), key=lambda state: (state["epoch"], state["step"]))
        states = [least for _ in dead]
    again: list[Life] = []
    for life, state in zip(dead, states, strict=True):
        log = life.orders["log"].replace(".0.log", ".1.log")
        own = {"state": state, "goal": life.word("goal") or 0, "log": log, "close": None}
        again.append(Life({**life.orders, **own}))
    return again


def _state(life: Life) -> dict[str, int] | None:
    """The state that it wrote last, if it wrote one."""
    return life.batches[-1]["state"] if life.batches else life.word("joined")


def _ended(life: Life) -> bool:
    return any("ended" in line for line in life.lines)


def run(start: Start, limit: float) -> Counter[str]:
    """Run a start, check the logs of its processes, and count the errors."""
    tended(start, start.lives, limit)
    _judge_ends(start, start.lives)
    again = second_lives(start)
    if again:
        tended(start, again, limit)
        _judge_ends(start, again)
    start.problems += problems_of_records(start, again)
    living = [life for life in (*start.lives, *again) if (pid := life.word("pid")) and _is_alive(pid)]
    start.problems += [f"process {life.orders['index']} is still there" for life in living]
    left = [path for path in Path("/dev/shm").iterdir() if start.orders["name"] in path.name]
    start.problems += [f"{path} is left" for path in left]
    events = Counter(life.event.kind for life in start.lives if life.event and _happened(life))
    return Counter(
        {
            start.kind: 1, "processes": len(start.lives) + len(again), **events, "returned": len(again),
            "late": sum(life.starts_at > 0 for life in start.lives),
            "batches": sum(len(life.batches) for life in (*start.lives, *again)),
        }
    )  # fmt: skip


def _happened(life: Life) -> bool:
    return life.happened or (life.event is not None and life.event.kind == "close")


# --- looking ---


def _judge_ends(start: Start, lives: Sequence[Life]) -> None:
    """Processes end well, or because one of them was killed."""
    dead = [life for life in lives if life.event is not None and life.event.kind == "kill" and life.happened]
    # A group that has not formed is ended by a death; so is a job of JAX, or of MPI that does not survive.
    goes_on = all(life.batches for life in dead) and start.orders["failure"] == "continue"
    closed = [life for life in lives if life.orders["close"] is not None]
    may_fail = dead and not (start.kind == "feed" or (goes_on and not start.kind.startswith("jax")))
    may_fail = may_fail or (closed and start.orders["failure"] == "stop")
    for life in lives:
        error, name = life.word("error"), f"process {life.orders['index']}"
        start.problems += [f"{name}: {line['wrong']}" for line in life.lines if "wrong" in line]
        if life in dead or _ended(life):
            continue
        if not may_fail:
            start.problems.append(f"{name} did not end well: {life.lines[-1:]}")
        elif error is not None and error not in DIED:
            start.problems.append(f"{name} ended with {life.lines[-1]}")


def problems_of_records(start: Start, again: Sequence[Life]) -> Iterator[str]:
    """Records that a member lacks, has twice, or has at another place than the others."""
    order: dict[tuple[int, int, int], list[int]] = {}
    for first in start.lives:
        index = first.orders["index"]
        lives = [first, *(life for life in again if life.orders["index"] == index)]
        taken: dict[Place, list[int]] = {}
        begun: Place | None = None
        for life in lives:
            joined = life.word("joined")
            if joined is None:
                continue
            at = (joined["epoch"], joined["step"])
            if life.orders["state"] is None:
                taken = {}  # it began anew
            begun = at if not taken else begun
            taken = {place: records for place, records in taken.items() if place < at}
            for line in life.batches:
                place = (line["epoch"], line["step"])
                if place in taken:
                    yield f"process {index} was given batch {place} twice"
                taken[place] = line["records"]
                size = _size(first)
                if order.setdefault((size, *place), line["records"]) != line["records"]:
                    yield f"process {index} has other records at {place} than others"
        if begun is not None:
            yield from (f"process {index}: {text}" for text in _wrong_epochs(start, taken, begun, lives[-1]))


def _size(life: Life) -> int:
    """The records of its batches."""
    batch = life.orders["batch"]
    if isinstance(batch, str):
        return json.loads(batch.removesuffix(" over member"))[life.orders["index"]]
    return life.orders["own_batch"] or batch


def _wrong_epochs(start: Start, taken: dict[Place, list[int]], begun: Place, last: Life) -> Iterator[str]:
    epochs: dict[int, list[int]] = {}
    for (epoch, _), records in sorted(taken.items()):
        epochs.setdefault(epoch, []).extend(records)
    goal, is_complete = last.word("goal"), _ended(last) and last.orders["close"] is None
    expected = range(begun[0], goal) if is_complete else range(begun[0], max(epochs, default=begun[0]))
    for epoch, records in epochs.items():
        twice = [record for record, times in Counter(records).items() if times > 1]
        if twice:
            yield f"epoch {epoch} has records {twice} twice"
    for epoch in expected:
        missing = set(range(start.orders["records"])) - set(epochs.get(epoch, ()))
        if missing and (epoch, 0) >= begun:
            yield f"epoch {epoch} lacks records {sorted(missing)}"


# --- the campaign ---


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    begin, counts, problems = time.perf_counter(), Counter[str](), list[str]()
    numbers = range(options.count) if options.case is None else [options.case]
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="commplan-lifecycle-") as folder:
            start = drawn(options.seed, number, options.kinds, Path(folder), options.limit)
            counts += run(start, options.limit) + Counter({"starts": 1})
            if start.problems or options.case is not None:
                text = "\n  ".join([str(start), *start.problems, _tail(start.folder / "errors.txt")])
                print(f"{text}\n  again: --seed {options.seed} --case {number}", flush=True)
            problems += [f"{start}: {problem}" for problem in start.problems]
        if len(problems) > options.most:
            break
    seconds = round(time.perf_counter() - begin, 1)
    print(", ".join(f"{count} {event}" for event, count in counts.items()), f"in {seconds} s")
    print(f"{len(problems)} problems" if problems else "each record once, no process hung, nothing is left")
    if options.json:
        summary = {**counts, "seed": options.seed, "seconds": seconds, "problems": problems}
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if problems else 0


def _tail(errors: Path) -> str:
    return "\n  ".join(errors.read_text(errors="replace").splitlines()[-60:]) if errors.exists() else ""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = program_parser("lifecycle", __doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this start alone, with what its processes wrote to stderr")
    parser.add_argument("--kinds", type=names(KINDS), default=KINDS)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a start to end")
    parser.add_argument("--most", type=int, default=10, help="problems after which the campaign ends")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
