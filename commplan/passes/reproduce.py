"""Run a reproducer file again: `python -m commplan.passes.reproduce FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from commplan.diagnostics import CommplanError
from commplan.ir.text import print_schedule
from commplan.passes.manager import read_reproducer


def main(arguments: list[str]) -> int:
    """Exit status 0 where the passes now succeed, 1 where they fail as before, 2 for wrong use."""
    if len(arguments) != 1:
        print("usage: python -m commplan.passes.reproduce FILE", file=sys.stderr)
        return 2
    try:
        schedule, pipeline, context = read_reproducer(Path(arguments[0]))
        print(print_schedule(pipeline.run(schedule, context)), end="")
    except CommplanError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
