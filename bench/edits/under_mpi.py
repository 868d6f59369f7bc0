"""Accepted edits on ranks: many in one job of `mpirun`, each compared with a run of the unedited schedule.

A campaign puts schedules into a folder (`Batch`) and starts the job (`judged`). Rank 0 writes the result of
each edit to a file at once. If a job ends early or gives no result for `TIMEOUT_S`, that is the result of its
current edit, and a new job starts with the next one. Plans with servers run on workers and servers: the
workers call elastic phases one after another, so that the order of requests is always the same.
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.edits.judge import Judge, Outcome, flat
from bench.edits.plans import Base, base_of
from bench.servers.mpirun import command, environment
from commplan.diagnostics import CommplanError
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Elastic, Exchange, Phase, Schedule
from commplan.ir.serialization.canonical_json import decode, encode
from commplan.pytree import flatten
from tests.support.oracle.layout import Grid, spread

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 90.0  # for one edit, and for the start of a job
TURNS = 2
UNDEFINED = -32766  # of Open MPI


class Batch:
    """A folder of edited schedules, which run on ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words: list[str] = []
        self.ranks = 1
        self._bases: dict[str, str] = {}

    def add(self, base: Base, schedule: Schedule, words: str) -> None:
        if base.name not in self._bases:
            self._bases[base.name] = f"base{len(self._bases)}.json"
            (self.folder / self._bases[base.name]).write_bytes(encode(base.schedule))
            self.ranks = max(self.ranks, ranks_of(base.schedule))
        number = len(self.words)
        (self.folder / f"{number}.json").write_bytes(encode(schedule))
        (self.folder / f"{number}.of").write_text(self._bases[base.name])
        self.words.append(f"{base.name}: {words}")

    def judged(self) -> Iterator[tuple[int, str]]:
        """The number of each edit, and its difference from the unedited schedule ("" for none)."""
        first = 0
        while first < len(self.words):
            with self._log.open("wb") as log:
                job = subprocess.Popen(
                    command(self.ranks, "bench.edits.under_mpi", self.folder, first),
                    env={**environment(), "PYTHONPATH": str(ROOT)}, cwd=ROOT, start_new_session=True,
                    stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
            try:
                for number in range(first, len(self.words)):
                    first = number + 1
                    text = self._result(job, number)
                    yield number, text
                    if text.startswith("ends"):
                        break
            finally:
                _end(job)

    @property
    def _log(self) -> Path:
        return self.folder / "job.log"

    def _result(self, job: subprocess.Popen[bytes], number: int) -> str:
        result = self.folder / f"{number}.result"
        end = time.monotonic() + TIMEOUT_S
        while not result.exists():
            if job.poll() is not None and not result.exists():
                return f"ends the job: {self._log.read_text(errors='replace')[-1500:]}"
            if time.monotonic() > end:
                return f"ends never: no result within {TIMEOUT_S:.0f} s"
            time.sleep(0.02)
        return result.read_text()


def _end(job: subprocess.Popen[bytes]) -> None:
    """End a job and all its ranks."""
    try:
        job.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def ranks_of(schedule: Schedule) -> int:
    """How many ranks a schedule runs on, servers included."""
    servers = [axis.size for axis in schedule.axes if axis.kind is AxisKind.SERVER]
    workers = [axis.size for axis in schedule.axes if axis.kind is not AxisKind.SERVER]
    return math.prod(workers) + sum(servers)


class _OnRanks:
    """Runs schedules on the first ranks of the world."""

    def __init__(self, base: Base, world: Any) -> None:
        self.judge = Judge(base)
        self.size = ranks_of(base.schedule)
        self.comm = world.Split(0 if world.rank < self.size else UNDEFINED, world.rank)
        self.takes_part = world.rank < self.size
        self.served = any(axis.kind is AxisKind.SERVER for axis in base.schedule.axes)
        self.expected = self.run(base.schedule) if self.takes_part else None

    def run(self, schedule: Schedule) -> Outcome:
        """The results of this rank; none on a server."""
        api = importlib.import_module("commplan.api")
        problem, run = "", None
        try:
            run = api.Program(schedule).bind(self.comm, functions=self.judge.base.functions, watchdog_s=30.0)
        except CommplanError as error:
            problem = f"CommplanError: {error.diagnostics[0].code}"
        problems = self.comm.allgather(problem)
        if any(problems):
            return Outcome({}, next(filter(None, problems)))
        assert run is not None
        values: dict[str, Any] = {}
        if self.served and run.serve() is not None:
            return Outcome(values)
        self._phases(schedule, run, values)
        if self.served:
            _wait(run.context.machine.comm)
            run.close()
        return Outcome(values)

    def _phases(self, schedule: Schedule, run: Any, values: dict[str, Any]) -> None:
        state = run.init()
        for turn in range(TURNS):
            for phase in schedule.phases:
                if turn and self.served and phase.kind == "start":
                    continue
                own = arguments(self.judge, schedule, phase, self.comm.Get_rank())
                outputs, state = self._called(run, phase.name, state, own)
                flat(f"{turn} {phase.name}", outputs, values)
                if not self.served and not schedule.state_shards:
                    flat(f"{turn} {phase.name}", state, values)

    def _called(self, run: Any, phase: str, state: Any, own: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The results of a phase. Workers call elastic phases with servers one after another."""
        workers = run.context.machine.comm
        turns = self.served and any(isinstance(op, Elastic) for op in run.context.schedule.phase(phase).ops)
        for worker in range(workers.Get_size() if turns else 1):
            if not turns or worker == workers.Get_rank():
                outputs, state = run.phases[phase](state, **own)
                result = {key: outputs[key] for key in outputs}
                importlib.import_module("jax").block_until_ready(result)
            if turns:
                _wait(workers)
        if self.served:
            _wait(workers)
        # With staleness a reply may be an earlier one: the final states of servers are compared.
        late = any(isinstance(op, Exchange) for op in run.context.schedule.phase(phase).ops) and self.served
        return {} if late else result, state  # pyright: ignore[reportPossiblyUnboundVariable]


def arguments(judge: Judge, schedule: Schedule, phase: Phase, number: int) -> dict[str, Any]:
    """The inputs of a phase that the worker of this number holds."""
    grid = Grid(schedule)
    known = {value.id: value for value in (*schedule.entry, *phase.values)}
    given = {name.rpartition(".")[0]: known[name] for name in phase.inputs}
    given |= {binding.name: known[binding.value] for binding in phase.takes}
    own: dict[str, Any] = {}
    for name, tree in judge.inputs(schedule, phase.name).items():
        pairs, rebuild = flatten(tree)
        held = spread(grid, given[name], [np.asarray(leaf) for _, leaf in pairs])
        own[name] = rebuild(list(held[grid.ranks[number]]))
    return own


def _wait(comm: Any) -> None:
    """A barrier that does not spin: there are fewer cores than ranks."""
    waiting = comm.Ibarrier()
    while not waiting.Test():
        time.sleep(5e-4)


def main(folder: Path, first: int) -> None:
    """One rank of a job."""
    world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
    known: dict[str, _OnRanks] = {}  # by the file of the unedited schedule
    while (folder / f"{first}.json").exists():
        base_name = (folder / f"{first}.of").read_text()
        try:
            if base_name not in known:
                schedule = decode((folder / base_name).read_bytes())
                known[base_name] = _OnRanks(base_of(schedule.plan, schedule), world)
            judge = known[base_name]
            text = ""
            if judge.takes_part:
                expected, edited = judge.expected, judge.run(decode((folder / f"{first}.json").read_bytes()))
                assert expected is not None
                refused = edited.failed.startswith("CommplanError")
                text = "" if refused and not expected.failed else expected.difference(edited)
        except Exception:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            print(f"rank {world.rank}", flush=True)
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            world.Abort(1)
            return
        _wait(world)
        texts: list[str] = world.gather(text) or []
        if world.rank == 0:
            difference = next(filter(None, texts), "")
            partial = folder / f"{first}.partial"
            partial.write_text(difference)
            partial.rename(folder / f"{first}.result")
        first += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
