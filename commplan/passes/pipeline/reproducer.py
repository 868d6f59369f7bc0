"""Run a reproducer file again: `python -m commplan.passes.pipeline.reproducer FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from commplan.cost.calibration import Calibration
from commplan.diagnostics import CommplanError, fail
from commplan.ir.schedule import Schedule
from commplan.ir.text import print_schedule
from commplan.passes.pipeline.base import Context
from commplan.passes.pipeline.manager import Pipeline
from commplan.select.cost_model import costs_for
from commplan.topology import Topology


def main(arguments: list[str]) -> int:
    """Exit status 0 where the passes now succeed, 1 where they fail as before, 2 for wrong use."""
    if len(arguments) != 1:
        print("usage: python -m commplan.passes.pipeline.reproducer FILE", file=sys.stderr)
        return 2
    try:
        schedule, pipeline, context = read_reproducer(Path(arguments[0]))
        print(print_schedule(pipeline.run(schedule, context)), end="")
    except CommplanError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def read_reproducer(path: Path) -> tuple[Schedule, Pipeline, Context]:
    """What `write_reproducer` wrote. Raises CP0723 where the file is none of its."""
    try:
        content: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        schedule = msgspec.convert(content["schedule"], Schedule)
        order = msgspec.convert(content["order"], dict[str, tuple[str, ...]])
        topology = msgspec.convert(content["topology"], Topology | None)
        calibration = msgspec.convert(content["calibration"], Calibration | None)
        places = msgspec.convert(content["places"], tuple[int, ...] | None)
        pipeline = Pipeline.parse(str(content["pipeline"]))
    except (OSError, KeyError, msgspec.DecodeError, msgspec.ValidationError) as error:
        fail("CP0723", f"{path} is no reproducer", f"{type(error).__name__}: {error}", file=str(path))
    costs = costs_for(schedule.axes, topology, calibration, schedule.backend, places)
    return schedule, pipeline, Context(order, topology, calibration, places, costs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
