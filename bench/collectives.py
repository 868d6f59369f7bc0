"""Collectives of commplan and of its peers on the same arrays, in one lab, in one run.

    sudo python -m bench.collectives                                   # four hosts, 4 B to 64 MiB
    sudo python -m bench.collectives --quick                           # a few sizes, three rounds
    sudo python -m bench.collectives --hosts 4 --racks 2 --interleave
    sudo python -m bench.collectives --algorithms all                  # every algorithm, and `auto`

Systems: commplan (the compiler's choice, and with --algorithms its alternatives), Open MPI from NumPy through
mpi4py, mpi4jax, XLA over Gloo, torch over Gloo. Times of systems inside JAX are from `jax.Array` to
`jax.Array`. Every result of every repetition is compared, element by element.

Prints for every size and system: median time and spread, bus bandwidth, its share of the line rate measured
at the start, CPU time of all ranks, bytes sent by the busiest host, and the speed relative to the best of
mpi4jax, XLA and torch (1.00: equal).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from bench.harness.figures import Results, heading, size_text, table, time_text, write
from bench.harness.judge import PEERS, SMALL, judge
from bench.harness.stage import Entry, Figure, Stage, Surroundings
from bench.harness.work import KINDS, Work, count_of
from bench.netlab import Shape
from commplan.collectives.program import Kind
from commplan.collectives.registry import algorithms
from commplan.diagnostics import CommplanError

SYSTEMS = ("commplan", "openmpi", *PEERS)
SIZES = tuple(4 << (2 * k) for k in range(13))  # 4 B to 64 MiB
QUICK = (4, 1 << 10, 16 << 10, 256 << 10, 4 << 20)
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    shape = Shape(options.hosts, options.racks, options.rate, options.uplink, options.interleave)
    sizes = options.sizes or (QUICK if options.quick else SIZES)
    rounds = options.rounds or (3 if options.quick else 6)
    figures: list[Figure] = []
    try:
        with Stage(
            shape, options.systems, name=options.name, rounds=rounds, calibration=options.calibration
        ) as stage:
            print(heading(stage.surroundings), flush=True)
            for kind in options.collectives:
                print(f"\n{kind.replace('_', '-')}", flush=True)
                for nbytes in sizes:
                    compared = stage.compare(entries(kind, nbytes, options, shape))
                    print(table(rows(compared, stage.surroundings)), flush=True)
                    figures += compared
            print("\n" + "\n".join(judge(figures, stage.surroundings)), flush=True)
            results = Results("collectives", stage.surroundings, figures)
    except CommplanError as error:
        print(error, file=sys.stderr)
        return 1
    if options.out:
        write(options.out, results)
    return 0


def entries(kind: str, nbytes: int, options: argparse.Namespace, shape: Shape) -> list[Entry]:
    """The systems at one size; for commplan also its algorithms, on request, and the cost of an empty
    call."""
    counts = (count_of(kind, nbytes, shape.ranks),)
    listed = [Entry(system, system, Work(kind, counts)) for system in options.systems]
    if "commplan" not in options.systems:
        return listed
    if nbytes <= SMALL:
        listed.append(Entry("empty call", "commplan", Work("empty", counts)))
    asked = ways(kind, shape) if options.algorithms == "all" else options.algorithms.split(",")
    return listed + [Entry(f"commplan {how}", "commplan", Work(kind, counts, how)) for how in asked if how]


def ways(kind: str, shape: Shape) -> list[str]:
    """Every way in which commplan can carry out a collective."""
    algorithms_text = [f"via {name}" for name in ("native", *algorithms(cast("Kind", kind)))]
    algorithms_text = [way for way in algorithms_text if way != "via hierarchical"]
    if shape.racks > 1:
        algorithms_text.append("hierarchical(host = ring, rack = ring)")
    return algorithms_text


def rows(figures: Sequence[Figure], where: Surroundings) -> list[list[str]]:
    """A table of one size: a line for each system."""
    nbytes = figures[0].work.nbytes
    peers = [figure.time for figure in figures if figure.system in PEERS and figure.seconds]
    best = min(peers, default=float("nan"))
    head = [
        size_text(nbytes),
        "time",
        "+-",
        "bus MB/s",
        "of line",
        "cpu",
        "sent KB",
        "of bound",
        "x best peer",
        "chosen",
    ]
    body: list[list[str]] = []
    for figure in figures:
        if not figure.seconds:
            body.append([f"  {figure.label}", figure.missing or "not measured", *[""] * 8])
            continue
        cpu = sum(figure.cpu) / len(figure.cpu)
        racks = where.shape.racks > 1 and figure.work.kind != "empty"
        bound = where.bound(figure.work) if racks else 0.0
        body.append(
            [
                f"  {figure.label}",
                time_text(figure.time),
                f"{figure.spread:.0%}",
                f"{figure.bus / 1e6:.2f}",
                f"{figure.bus / where.line:.3f}",
                time_text(cpu),
                f"{figure.crossed / 1e3:.1f}",
                f"{bound / figure.time:.3f}" if bound else "",
                f"{best / figure.time:.2f}" if figure.work.kind != "empty" else "",
                figure.note,
            ]
        )
    return [head, *body]


def size(text: str) -> int:
    """4B, 16KiB, 4MiB -> bytes."""
    digits = text.rstrip("BKMGi ")
    unit = text[len(digits) :].strip() or "B"
    if unit not in UNITS or not digits.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: write sizes as 4B, 16KiB or 4MiB")
    return int(digits) * UNITS[unit]


def names(known: Sequence[str]):
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not among {', '.join(known)}")
        return chosen

    return parse


def lab_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every bench in the lab has."""
    parser.add_argument("--hosts", type=int, default=4, help="hosts in each rack (4)")
    parser.add_argument("--racks", type=int, default=1, help="racks (1)")
    parser.add_argument("--rate", default="200mbit", help="of a host's link (200mbit)")
    parser.add_argument("--uplink", default="", help="of a rack's uplink (as a host's link)")
    parser.add_argument("--interleave", action="store_true", help="ranks go round the racks")
    parser.add_argument("--name", default="bench", help="of the lab (bench)")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each system, the first thrown away")
    parser.add_argument(
        "--calibration",
        type=Path,
        default=None,
        help="what `commplan calibrate` wrote; measured first where there is no such file",
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.json", help="every repetition")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.collectives", description=(__doc__ or "").split("\n")[0]
    )
    lab_flags(parser)
    parser.add_argument("--collectives", type=names(KINDS), default=KINDS, help="comma-separated (all)")
    parser.add_argument("--systems", type=names(SYSTEMS), default=SYSTEMS, help="comma-separated (all)")
    parser.add_argument("--sizes", type=lambda text: tuple(map(size, text.split(","))), default=(),
                        help="such as 4B,16KiB,4MiB (4 B to 64 MiB in steps of 4)")  # fmt: skip
    parser.add_argument(
        "--algorithms", default="", help="all, or ways such as 'via ring,via native | rounds'"
    )
    parser.add_argument("--quick", action="store_true", help="five sizes, fewer rounds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
