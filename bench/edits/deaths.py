"""Accepted edits in runs in which a process dies, each compared with the same run of the unedited schedule.

Edits that change an op that loads, shares or asks servers (`at_deaths`) run

- for plans that share: in one process per member, of which the first is killed after its second batch;
- for other plans that load: with worker processes, one of which is killed by the record `FATAL`;
- for plans with servers: on ranks under an MPI that outlives them, of which the first worker is killed, and
  in a second run the last server.

The errors of the surviving processes, the workers that servers report as lost, and the results that both
runs give must be the same. How many batches or steps a process finishes before it detects a death depends on
timing, and so do the results of elastic and late exchanges: these are not compared.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.edits.judge import BATCHES, Judge, Outcome, flat, obeyed
from bench.edits.plans import RECORDS, Base, base_of
from bench.edits.under_mpi import arguments, ranks_of
from bench.faults.campaign import begin, happen, observed
from bench.faults.mpi import ULFM
from bench.servers.mpirun import command, environment
from commplan.diagnostics import CommplanError
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Elastic, Exchange, Get, Map, Phase, Put, Read, Schedule, Share
from commplan.ir.serialization.canonical_json import decode, encode

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0  # of a job
NO_RESULT = "no result in time"
SILENT_S = 20.0  # after which processes that share end by themselves
SOUND = [record for record in RECORDS if record[0] % 7 != 6]  # that no function refuses
FATAL = 11  # the record at which a worker process dies, once
DEADLY_BATCH = 2  # after which a member dies
DEADLY_TURN = 1  # before which a worker or a server dies
DYING_S = 0.3  # seconds between a kill and the next step of the other processes
TURNS = 3


def at_deaths(schedule: Schedule) -> tuple[Any, ...]:
    """The fields that runtimes read of the ops that load, share or ask servers, and of host functions."""
    hosted = {fn.name for fn in schedule.fns if fn.where == "host"}
    kinds = (Read, Share, Exchange, Elastic, Get, Put)
    return tuple(
        (phase.name, obeyed(op))
        for phase in schedule.phases
        for op in phase.ops
        if isinstance(op, kinds) or (isinstance(op, Map) and op.fn in hosted)
    )


class Death(NamedTuple):
    """A run in which a process dies.

    kind: worker, server or reader. words: the command of a job, given the file of the schedule and a folder.
    survivors: the names of the files that its processes leave in the folder.
    """

    kind: str
    words: Callable[[Path, Path], list[str]]
    survivors: tuple[str, ...]


def deaths(schedule: Schedule, phases: Sequence[str]) -> tuple[Death, ...]:
    """The runs of a schedule in which a process dies. phases: names of phases; those that load run."""
    servers = sum(axis.size for axis in schedule.axes if axis.kind is AxisKind.SERVER)
    if servers:
        count = ranks_of(schedule)
        return tuple(
            Death(kind, _on_ranks(count, culprit), tuple(str(n) for n in range(count) if n != culprit))
            for kind, culprit in (("worker", 0), ("server", count - 1))
        )
    loading = [name for name in phases if _feeds(schedule.phase(name))]
    if loading:
        return (Death(f"reader of {' and '.join(loading)}", _with_readers(loading), ("readers",)),)
    return ()


def _on_ranks(count: int, culprit: int) -> Callable[[Path, Path], list[str]]:
    def words(file: Path, folder: Path) -> list[str]:
        return command(count, "bench.edits.deaths", "rank", file, folder, culprit, options=ULFM)

    return words


def _with_readers(phases: Sequence[str]) -> Callable[[Path, Path], list[str]]:
    def words(file: Path, folder: Path) -> list[str]:
        return [sys.executable, "-m", "bench.edits.deaths", "readers", str(file), str(folder), *phases]

    return words


def _feeds(phase: Phase) -> bool:
    """Whether a phase loads, with one clock for all members."""
    reads = [op for op in phase.ops if isinstance(op, Read)]
    return bool(reads) and all(op.clock is None for op in reads)


class Deaths:
    """Compares edits of many bases. Each unedited schedule runs once per kind of death."""

    def __init__(self) -> None:
        self._expected: dict[tuple[str, str], Mapping[str, Outcome]] = {}

    def difference(self, base: Base, schedule: Schedule) -> str:
        """The first difference of an edit, "" for none."""
        changed = set(at_deaths(base.schedule)) ^ set(at_deaths(schedule))
        phases = [phase.name for phase in schedule.phases if phase.name in {name for name, _ in changed}]
        for death in deaths(base.schedule, phases):
            text = self._compared(base, schedule, death)
            if text:  # both again: a busy machine delays processes beyond a timeout
                self._expected.pop((base.name, death.kind))
                text = self._compared(base, schedule, death)
            if text:
                return f"when a {death.kind} dies, {text}"
        return ""

    def _compared(self, base: Base, schedule: Schedule, death: Death) -> str:
        key = base.name, death.kind
        if key not in self._expected:
            self._expected[key] = outcomes(death, base.schedule)
        edited = outcomes(death, schedule)
        for name, expected in self._expected[key].items():
            if expected.failed == NO_RESULT:
                return f"process {name} of the unedited schedule gives {NO_RESULT}"
            text = _common(expected, edited[name])
            if text:
                return f"process {name} {text}"
        return ""


def _common(expected: Outcome, edited: Outcome) -> str:
    if expected.failed != edited.failed:
        return f"ends with {edited.failed}, and unedited with {expected.failed}"
    names = [name for name in expected.values if name in edited.values]
    first, second = (
        Outcome({name: outcome.values[name] for name in names}) for outcome in (expected, edited)
    )
    return first.difference(second)


def outcomes(death: Death, schedule: Schedule) -> dict[str, Outcome]:
    """Run a job, and return the outcome of each surviving process; `failed` is its error or its end."""
    with tempfile.TemporaryDirectory(prefix="deaths-") as name, tempfile.TemporaryFile("w+") as output:
        folder = Path(name)
        file = folder / "schedule.json"
        file.write_bytes(encode(schedule))
        files = [folder / f"{survivor}.result" for survivor in death.survivors]
        env = {**environment(), "PYTHONPATH": str(ROOT), "COMMPLAN_RECORDS": name}
        job = subprocess.Popen(
            death.words(file, folder), env=env, cwd=ROOT, start_new_session=True, stdout=output, stderr=output
        )
        end = time.monotonic() + TIMEOUT_S

        def over(_: str) -> bool:
            done = job.poll() is not None or time.monotonic() > end
            return done or all(file.exists() for file in files)

        observed([job], output, over)
        results: dict[str, Outcome] = {}
        for survivor, each in zip(death.survivors, files, strict=True):
            ended = each.exists()
            results[survivor] = pickle.loads(each.read_bytes()) if ended else Outcome({}, NO_RESULT)
        return results


def _leave(folder: Path, name: str, outcome: Outcome) -> None:
    partial = folder / f"{name}.partial"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(folder / f"{name}.result")


# --- processes that load ---


class Fatal:
    """A host function that kills its worker process at the record `FATAL`, once."""

    def __init__(self, function: Callable[..., Any], marker: Path) -> None:
        self.function, self.marker = function, marker

    def __call__(self, record: Any, *others: Any) -> Any:
        if isinstance(record, bytes) and record[0] == FATAL and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.function(record, *others)


def readers(file: Path, folder: Path, phases: Sequence[str]) -> None:
    """Load the batches of these phases while a process dies."""
    schedule = decode(file.read_bytes())
    base = base_of(schedule.plan, schedule)
    values: dict[str, Any] = {}
    begin()
    for phase in map(schedule.phase, phases):
        members = [op for op in phase.ops if isinstance(op, Share) and op.design != "duplicate"]
        first = _of_members(base, phase, members[0], folder) if members else _of_workers(base, phase, folder)
        values |= {f"{phase.name}, {name}": value for name, value in first.items()}
    _leave(folder, "readers", Outcome(values))


def _of_workers(base: Base, phase: Phase, folder: Path) -> dict[str, Any]:
    """The batches of one process whose functions run in worker processes."""
    own = importlib.import_module("bench.edits.deaths")  # not `__main__`, which workers cannot import
    marker = folder / f"{phase.name}.dead"
    functions = {name: own.Fatal(function, marker) for name, function in base.functions.items()}
    return _taken(base.schedule, phase, functions, {"workers": "processes"}, lambda _: None) | {
        "a worker died": str(marker.exists())
    }


def _of_members(base: Base, phase: Phase, share: Share, folder: Path) -> dict[str, Any]:
    """The batches of all members but the first, which dies; each is a process."""
    from commplan.runtime.input.group import group  # noqa: PLC0415 - only where processes share

    sizes = {axis.name: axis.size for axis in base.schedule.axes}
    (axis,), run, children = share.axes, uuid.uuid4().hex[:12], list[int]()
    for index in range(sizes[axis]):
        child = os.fork()
        if child:
            children.append(child)
            continue

        def dies(taken: int, index: int = index) -> None:
            if index == 0 and taken == DEADLY_BATCH:
                os.kill(os.getpid(), signal.SIGKILL)

        team = group(run, index, sizes[axis], timeout=SILENT_S)
        values = _taken(
            base.schedule, phase, base.functions, {"local": {axis: (index,)}, "group": team}, dies
        )
        _leave(folder, f"{phase.name} {index}", Outcome(values))
        os._exit(0)
    values: dict[str, Any] = {}
    for index, child in enumerate(children):
        os.waitpid(child, 0)
        left = folder / f"{phase.name} {index}.result"
        member = pickle.loads(left.read_bytes()).values if left.exists() else {"end": "dead"}
        values |= {f"member {index}, {name}": value for name, value in member.items()}
    return values


def _taken(
    schedule: Schedule,
    phase: Phase,
    functions: Mapping[str, Callable[..., Any]],
    options: Mapping[str, Any],
    after: Callable[[int], None],
) -> dict[str, Any]:
    """The first batches, and the error or "all" as `end`. after: called after each batch."""
    from commplan.runtime.input import PhaseBatches  # noqa: PLC0415 - as above

    values: dict[str, Any] = {}
    sources = dict.fromkeys((source.name for source in schedule.sources), SOUND)
    try:
        with PhaseBatches(schedule, phase.name, sources, functions, **options) as feed:
            for number, batch in enumerate(itertools.islice(feed, BATCHES)):
                flat(f"{number}", batch.values, values)
                after(number + 1)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the result
        values["end"] = _end(error)
    else:
        values["end"] = "all"
    return values


def _end(error: Exception) -> str:
    code = f" {error.diagnostics[0].code}" if isinstance(error, CommplanError) else ""
    return f"{type(error).__name__}{code}"


# --- ranks ---


def rank(file: Path, folder: Path, culprit: int) -> None:
    """One worker or server of a job in which the rank `culprit` dies."""
    world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
    schedule = decode(file.read_bytes())
    base = base_of(schedule.plan, schedule)
    judge = Judge(base)
    reached, gone = folder / "reached", folder / "gone"
    dies, values = world.rank == culprit, dict[str, Any]()
    run = importlib.import_module("commplan.api").Program(schedule).bind(
        world, functions=base.functions, watchdog_s=10.0
    )  # fmt: skip

    def die() -> None:
        gone.touch()
        happen("kill")

    def due() -> bool:
        if dies and reached.exists():
            die()
        return False

    try:
        served = run.serve(stop=due)
        if served is not None:
            _leave(folder, str(world.rank), Outcome({}, f"served, lost {served.lost}"))
            return
        state = run.init()
        for turn in range(TURNS):
            if turn == DEADLY_TURN and world.rank == 0:
                begin()
                reached.touch()
            if turn == DEADLY_TURN and dies:
                die()
            while turn == DEADLY_TURN and not gone.exists():
                time.sleep(0.01)
            time.sleep(DYING_S if turn == DEADLY_TURN else 0.0)
            for phase in schedule.phases:
                if turn and phase.kind == "start":
                    continue
                outputs, state = run.phases[phase.name](
                    state, **arguments(judge, schedule, phase, world.rank)
                )
                results = {key: outputs[key] for key in outputs}
                importlib.import_module("jax").block_until_ready(results)
                if _is_repeatable(schedule):
                    flat(f"{turn} {phase.name}", results, values)
        run.close()
        outcome = Outcome(values, "all turns")
    except Exception as error:  # noqa: BLE001 - whatever it raises is the result
        outcome = Outcome(values, _end(error))
    _leave(folder, str(world.rank), outcome)
    time.sleep(TIMEOUT_S)  # the campaign ends the job when all results are there


def _is_repeatable(schedule: Schedule) -> bool:
    """Whether results do not depend on the order of requests."""
    ops = [op for phase in schedule.phases for op in phase.ops]
    late = any(isinstance(op, Exchange) and (op.hints.staleness or 0) > 0 for op in ops)
    return not late and not any(isinstance(op, Elastic) for op in ops)


if __name__ == "__main__":
    _, kind, *words = sys.argv
    if kind == "rank":
        rank(Path(words[0]), Path(words[1]), int(words[2]))
    else:
        readers(Path(words[0]), Path(words[1]), words[2:])
