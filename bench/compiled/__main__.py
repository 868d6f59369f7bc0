"""The costs and the hidden communication of plans in compiled steps for H100, against XLA alone.

    JAX_PLATFORMS=cpu .venv-audit/bin/python -m bench.compiled [--models transformer] [--targets h100:1x8]
        [--ways plan] [--keep FOLDER] [--summary]

Nothing runs, and no GPU is needed: steps are compiled ahead of time, in the environment that `make audit`
makes. XLA alone also gets the best of its options: twelve combinations of a combine threshold and a limit of
concurrent collectives. Columns: collectives; instructions; megabytes that one rank sends; memory in addition
to arguments; milliseconds of the step, and of its waits for communication, as
`commplan.lowering.gpu.estimate` estimates them for a target's rates; and milliseconds of waiting that no
order of the instructions could hide (`commplan.lowering.gpu.bound`). FOLDER stores compiled steps:
they are lowered and estimated, but not compiled again unless the lowered text, the options or JAX changed.
`--summary` prints a line for each model and target: XLA alone, the best
of its options, and the plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from bench.compiled.models import MODELS
from bench.compiled.rows import HEAD, Row, cells, summary
from bench.compiled.steps import ALONE, PLAN, Compiler, ways_of
from bench.harness.arguments import program_parser
from commplan.lowering.audit import target


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """The requested rows, model by model and target by target."""
    compiler = Compiler(options.keep)
    for machine in map(target, options.targets.split(",")):
        for name in options.models.split(";"):
            for way, flags in ways_of(name, machine):
                if way.startswith(tuple(options.ways.split(";"))):
                    yield compiler.row(name, machine, way, flags)


def main() -> None:
    parser = program_parser("compiled", __doc__)
    parser.add_argument("--models", default=";".join(MODELS), help="names, between semicolons")
    parser.add_argument("--targets", default="h100:1x8,h100:4x8,h100:16x8")
    parser.add_argument("--ways", default=";".join((ALONE, PLAN)), help="what names of ways begin with")
    parser.add_argument("--keep", type=Path, help="a folder for compiled steps")
    parser.add_argument("--summary", action="store_true", help="a line for each model and target")
    options = parser.parse_args()
    for (model, machine), group in groupby(rows(options), key=lambda row: row[:2]):
        print(f"\n{f'{model} on {machine}':40}" + "".join(f"{word:>14}" for word in HEAD), flush=True)
        for row in summary(list(group)) if options.summary else group:
            print(f"{row.way:40}" + "".join(f"{cell:>14}" for cell in cells(row)), flush=True)


if __name__ == "__main__":
    main()
