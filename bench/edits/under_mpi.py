"""A sample of the accepted edits on the ranks of a communicator.

    mpirun -n 4 python -m bench.edits.under_mpi --edits 400 --seed 0 --plans exchange_all,sharded

Every rank makes the same edits of the schedules that were compiled for MPI, for as many ranks and no servers,
and compares what an accepted one gives with the oracle on the unedited schedule. Ends with one line; a
difference ends the job.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from mpi4py import MPI

from bench.edits.generate import Generator
from bench.edits.judge import Judge, obeyed
from bench.edits.plans import PLANS, bases
from commplan.api import Program
from commplan.diagnostics import CommplanError
from commplan.ir.plan import AxisKind
from commplan.ir.serialization.canonical_json import encode
from commplan.verify import load_schedule
from tests.support.oracle import Oracle


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.edits.under_mpi")
    parser.add_argument("--edits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", default="exchange_all,exchange_owners,sharded,elastic_sync_05")
    options = parser.parse_args()
    world: Any = MPI.COMM_WORLD
    names = options.plans.split(",")
    known = [
        base for base in bases(tuple(plan for plan in PLANS if plan.name in names)) if _fits(base, world.size)
    ]
    generator = Generator([base.schedule for base in known], options.seed)
    ran = 0
    for number, base in enumerate(known):
        judge = Judge(base, 0)
        for edit in itertools.islice(generator.edits(base.schedule, number), -(-options.edits // len(known))):
            try:
                schedule = load_schedule(encode(edit.schedule))
            except CommplanError:
                continue
            if obeyed(schedule) == judge.obeyed or schedule.backend != "mpi":
                continue
            if schedule.origin != base.schedule.origin or schedule.state_shards != base.schedule.state_shards:
                continue
            ran += 1
            try:
                _check(judge, Program(schedule), world)
            except Exception:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
                print(f"{base.name}, rank {world.rank}: {edit.words}", flush=True)
                traceback.print_exc(file=sys.stdout)
                sys.stdout.flush()
                world.Abort(1)
    if world.rank == 0:
        print(f"{ran} accepted edits of {len(known)} schedules agree on {world.size} ranks", flush=True)


def _fits(base: Any, ranks: int) -> bool:
    axes = base.schedule.axes
    servers = any(axis.kind is AxisKind.SERVER for axis in axes)
    return base.schedule.backend == "mpi" and not servers and math.prod(axis.size for axis in axes) == ranks


def _check(judge: Judge, program: Program[Any], world: Any) -> None:
    """Raise unless every phase gives this rank what the oracle says of the unedited schedule."""
    schedule = judge.schedule
    oracle, answers = Oracle(schedule, judge.base.functions), dict[str, Any]()
    state, inputs = oracle.init(), dict[str, Any]()
    for phase in schedule.phases:
        given = judge.inputs(schedule, phase.name)
        inputs |= given
        outputs, state = oracle.phase(phase.name, state, given)
        answers[phase.name] = outputs, state
    entry = {value.id.rpartition(".")[0]: value for value in schedule.entry}
    ways: Any = SimpleNamespace(
        case=judge.base, phases=[phase.name for phase in schedule.phases], inputs=inputs, entry=entry
    )
    under_mpi: Any = importlib.import_module("support.under_mpi")  # which finds its own modules by path
    under_mpi.UnderMpi(ways, world, program).check(answers)


if __name__ == "__main__":
    main()
