"""Starts and stops of processes that share their input, a third of them ended by kill -9 at some moment.

    python -m bench.lifecycle --count 1000 --seed 0

Each start is a group of two to four processes that make a few batches together, by some design and with
either `on_failure`; four groups run at a time, some of them of the same plan. In a third of the starts one or
two processes are killed: after a random time, or by themselves at a chosen point, such as after the creation
of the shared memory. Checked: no process hangs or dies of anything but a kill, every record that is handed
out belongs to the run that asked for it, and all processes and their memory are gone. Exit 1 if not.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from commplan import compiler
from commplan.diagnostics import CommplanError
from commplan.dsl import load
from commplan.ir.schedule import Schedule
from commplan.runtime.input import PhaseBatches
from commplan.runtime.input.group import group
from commplan.runtime.input.prefetch.prefetch import Prefetcher
from commplan.runtime.input.ring import forming, meeting
from commplan.runtime.input.ring.exchange import GroupExchange
from commplan.runtime.input.ring.ring import Ring

PLAN = """
plan lifecycle
ensemble member = {members}
source numbers : i32
fn twice(i32) -> i32[16] on host
each step {{
    raw = load numbers batch 12 visit exactly_once seed 5 {{ on_failure = {failure}, cores = 1 }}
    values = map twice(raw)
    values = share values over member via {design}
    output values
}}
"""
DESIGNS = ("all_shared", "single_broadcast(readers = 1)", "multi_broadcast(readers = 2)")
RECORDS = 120
PATIENCE_S = 4.0  # of a group for a process that does not come, where some are killed
DEADLINE_S = 60.0  # nothing that waits so long will ever end
FINE, REFUSED, BROKEN = 0, 3, 4
TOKEN = uuid.uuid4().hex[:8]  # another campaign may go on at the same time
PLACES = ("made", "met", "filled", "taken", "leaving")


@functools.cache
def schedule(members: int, design: str, failure: str) -> Schedule:
    plan, problems = load(PLAN.format(members=members, design=design, failure=failure), "lifecycle.plan")
    if plan is None:
        raise SystemExit("\n".join(map(str, problems)))
    return compiler.compile_plan(plan, {}, {}, pipeline="")


@dataclass
class Start:
    """One group. victims: process -> seconds after which it is killed, or the place where it kills itself."""

    run: str
    made: Schedule
    count: int
    base: int  # what tells its records from those of other runs
    victims: dict[int, float | str]
    children: dict[int, int] = field(default_factory=dict[int, int])  # process id -> index


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(place: str, rng: random.Random) -> None:
    """Arrange for this process to die at `place`, the first time or a later one."""
    times = rng.randint(0, 4)

    def then(function: Callable[..., object], after: bool, owner: object, name: str, left: int) -> None:
        def wrapped(*args: object, **more: object) -> object:
            nonlocal left
            left -= 1
            if left < 0 and not after:
                die()
            result = function(*args, **more)
            if left < 0:
                die()
            return result

        setattr(owner, name, wrapped)

    match place:
        case "made":
            then(meeting.created, True, meeting, "created", 0)
        case "met":  # all have come, and one may not have seen it
            meet: Callable[..., object] = getattr(forming, "_meet")  # noqa: B009
            then(meet, True, forming, "_meet", 0)
        case "filled":
            then(Ring.done, False, Ring, "done", times)
        case "taken":
            then(GroupExchange.handed, True, GroupExchange, "handed", times)
        case _:
            close: Callable[..., object] = getattr(Prefetcher, "close")  # noqa: B009  of any items
            then(close, False, Prefetcher, "close", 0)


def member(start: Start, index: int, seed: int) -> int:
    """What one process does; its exit code."""
    victim = start.victims.get(index)
    if isinstance(victim, str):
        die_at(victim, random.Random(seed))
    source = np.arange(start.base, start.base + RECORDS, dtype=np.int32)

    def twice(record: np.int32) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.full(16, 2 * record, np.int32)

    patience = PATIENCE_S if start.victims else DEADLINE_S
    team = group(start.run, index, start.count, timeout=patience)
    try:
        with PhaseBatches(
            start.made, "step", {"numbers": source}, {"twice": twice}, local={"member": (index,)}, group=team
        ) as feed:
            for _ in range(2):
                seen = [batch.values["values.1"] for batch in feed]
                rows = np.sort(np.concatenate([rows[:, 0] for rows in seen]))
                if not np.array_equal(rows, 2 * source):
                    sys.stderr.write(f"process {index} of {start.run} was given {rows.tolist()}\n")
                    return BROKEN
    except CommplanError as error:
        expected = {"CP0920", "CP0921"}
        if start.victims and error.diagnostics[0].code in expected:
            return REFUSED
        sys.stderr.write(f"{error}\n")
        return BROKEN
    return FINE


def forked(start: Start, seed: int) -> None:
    """Start the processes of a group: copies of this one, which has no threads, with everything loaded."""
    for index in range(start.count):
        child = os.fork()
        if child:
            start.children[child] = index
            continue
        code = BROKEN
        try:
            code = member(start, index, seed + index)
        except BaseException:  # noqa: BLE001  a child must not go on as its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def watched(starts: Sequence[Start]) -> list[str]:
    """Wait until all have ended, killing the victims meanwhile; what was wrong."""
    problems: list[str] = []
    begin = time.monotonic()
    living = {child: start for start in starts for child in start.children}
    while living:
        now = time.monotonic() - begin
        for child, start in list(living.items()):
            victim = start.victims.get(start.children[child])
            if (isinstance(victim, float) and now > victim) or now > DEADLINE_S:
                os.kill(child, signal.SIGKILL)
            done, status = os.waitpid(child, os.WNOHANG)
            if not done:
                continue
            del living[child]
            code = os.waitstatus_to_exitcode(status)
            name = f"process {start.children[child]} of {start.count} of run {start.run}"
            if now > DEADLINE_S:
                problems.append(f"{name} hung")
            elif code == -signal.SIGKILL and start.children[child] in start.victims:
                continue
            elif code not in ((FINE, REFUSED) if start.victims else (FINE,)):
                problems.append(f"{name} ended with {code}; victims: {start.victims}")
        time.sleep(0.002)
    return problems


def variants() -> list[tuple[int, str, str]]:
    return [(n, design, failure) for n in (2, 3, 4) for design in DESIGNS for failure in ("stop", "continue")]


def left_behind() -> list[str]:
    """Memory of this campaign's runs."""
    memories = meeting.found(None, forming.KIND)
    return [memory.name for memory in memories if memory.name.startswith(TOKEN)]


def run_id() -> str:
    return f"{TOKEN}-{uuid.uuid4().hex[:12]}"


def drawn(rng: random.Random, killed: bool) -> Start:
    """One start, with victims or without."""
    count, design, failure = rng.choice(variants())
    victims: dict[int, float | str] = {}
    for index in rng.sample(range(count), rng.choice((1, 1, 2)) if killed else 0):
        victims[index] = rng.choice(PLACES) if rng.random() < 0.5 else rng.random() * 0.12
    return Start(run_id(), schedule(count, design, failure), count, 1000 * rng.randint(1, 10**5), victims)


def campaign(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Counts of events, and problems."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    problems: list[str] = []
    while counts["starts"] < count and not problems:
        starts = [drawn(rng, rng.random() < 1 / 3) for _ in range(4)]
        for start in starts:
            forked(start, rng.randint(0, 1 << 30))
            counts["starts"] += 1
            counts["processes"] += start.count
            counts["starts with a kill"] += bool(start.victims)
            counts["kills"] += len(start.victims)
        problems += watched(starts)
    return counts, problems + [f"the memory of {name} is left" for name in left_behind()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    counts, problems = campaign(options.count, options.seed)
    summary = {**counts, "seconds": round(time.perf_counter() - begin, 1), "problems": problems}
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        print(
            ", ".join(f"{number} {event}" for event, number in counts.items()), f"in {summary['seconds']} s"
        )
        print("\n".join(problems) or "nobody hung, nothing is left behind")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
