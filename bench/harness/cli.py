"""The command line of benches in the lab: common flags, and running in it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.harness.arguments import program_parser
from bench.harness.figures import heading, write
from bench.harness.stage import Stage
from bench.netlab import Shape
from commplan.diagnostics import CommplanError

R = TypeVar("R", bound=msgspec.Struct)


def in_lab(
    options: argparse.Namespace, measure: Callable[[Stage], R], systems: Sequence[str] = (),
    *, rounds: int = 5, budget: float = 0.25,
) -> R | None:  # fmt: skip
    """Call `measure` in the lab that the flags describe, and write its result to `--out`.

    Returns:
        The result, or None after an error, which is printed.
    """
    try:
        with Stage(
            shape_of(options), systems, name=options.name, rounds=options.rounds or rounds, budget=budget,
            calibration=options.calibration,
        ) as stage:  # fmt: skip
            print(heading(stage.surroundings), flush=True)
            results = measure(stage)
    except CommplanError as error:
        print(error, file=sys.stderr)
        return None
    if options.out:
        write(options.out, results)
    return results


def shape_of(options: argparse.Namespace) -> Shape:
    return Shape(options.hosts, options.racks, options.rate, options.uplink, options.interleave)


def lab_parser(program: str, summary: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that every bench in the lab has. summary: the docstring of the program."""
    parser = program_parser(program, summary)
    parser.add_argument("--hosts", type=int, default=4, help="hosts in each rack (4)")
    parser.add_argument("--racks", type=int, default=1, help="racks (1)")
    parser.add_argument("--rate", default="200mbit", help="of a host's link (200mbit)")
    parser.add_argument("--uplink", default="", help="of a rack's uplink (as a host's link)")
    parser.add_argument("--interleave", action="store_true", help="ranks go round the racks")
    parser.add_argument("--name", default="bench", help="of the lab (bench)")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each system, the first discarded")
    parser.add_argument(
        "--calibration", type=Path, help="a file of `commplan calibrate`; measured first if it does not exist"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every repetition")
    return parser
