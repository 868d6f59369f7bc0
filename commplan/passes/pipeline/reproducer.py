"""Repeat a failed pass: `python -m commplan.passes.pipeline.reproducer FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from commplan import io
from commplan.cost.schedule.predictor import predictor_for
from commplan.diagnostics import CommplanError, fail
from commplan.ir.schedule import Schedule
from commplan.ir.serialization.canonical_json import plan_digest
from commplan.ir.serialization.text import print_schedule
from commplan.passes.base import PassContext
from commplan.passes.pipeline.manager import Pipeline, Reproducer


def main(arguments: list[str]) -> int:
    """Repeat the passes of the file in `arguments`, and print the resulting schedule or the error.

    Returns:
        Exit status 0 if the passes succeed, 1 if they fail or the file cannot be read, 2 for invalid usage.
    """
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


def read_reproducer(path: Path) -> tuple[Schedule, Pipeline, PassContext]:
    """Read a file written by `write_reproducer`.

    Returns:
        The schedule before the failed pass, the remaining pipeline, and the context.

    Raises:
        CommplanError: CP0723 if the file cannot be read, is not a reproducer, or has a plan with another
            digest.
    """
    try:
        content = io.decode_json(io.read(path, io.SCHEDULE), Reproducer)
    except (OSError, ValueError) as error:
        fail("CP0723", f"{path} is not a reproducer", f"{type(error).__name__}: {error}", file=str(path))
    origin = content.schedule.origin
    if origin is None or plan_digest(origin.plan) != content.schedule.plan_digest:
        note = "the plan in it has another digest"
        fail("CP0723", f"{path} is damaged", note, file=str(path))
    machine = content.topology, content.calibration
    costs = predictor_for(content.schedule.axes, *machine, content.schedule.backend, content.places)
    choices = dict(content.choices) if content.choices is not None else None
    context = PassContext(content.order, *machine, content.places, costs, step=content.step, choices=choices)
    return content.schedule, Pipeline.parse(content.pipeline), context


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
