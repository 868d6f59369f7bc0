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
from typing import cast

from bench.harness.arguments import names, size
from bench.harness.cli import in_lab, lab_parser, shape_of
from bench.harness.figures import Results, size_text, table, time_text
from bench.harness.stage import Entry, Figure, Stage, Surroundings
from bench.harness.work import KINDS, Work, count_of
from bench.netlab import Shape
from commplan.collectives.program import Kind
from commplan.collectives.registry import algorithms

SIZES = tuple(4 << (2 * k) for k in range(13))  # 4 B to 64 MiB
QUICK = (4, 1 << 10, 16 << 10, 256 << 10, 4 << 20)
PEERS = ("mpi4jax", "xla", "torch")
SMALL = 16 << 10  # bytes up to here depend on calls and latencies
SYSTEMS = ("commplan", "openmpi", *PEERS)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    sizes = options.sizes or (QUICK if options.quick else SIZES)

    def measure(stage: Stage) -> Results:
        figures: list[Figure] = []
        for kind in options.collectives:
            share = 0.0
            print(f"\n{kind.replace('_', '-')}", flush=True)
            for nbytes in sizes:
                compared = stage.compare(entries(kind, nbytes, options, shape_of(options)))
                print(table(rows(compared, stage.surroundings)), flush=True)
                figures += compared
                share = max(share, share_of_openmpi(compared))
            print(f"up to 16 KiB at most {share:.2f} times (Open MPI + 1.2 empty calls)" if share else "")
        return Results("collectives", stage.surroundings, figures)

    return int(in_lab(options, measure, options.systems, rounds=3 if options.quick else 6) is None)


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


def share_of_openmpi(figures: Sequence[Figure]) -> float:
    """commplan's time at one small size, as a share of Open MPI's from NumPy plus 1.2 empty calls; else 0."""
    times = {figure.label: figure.time for figure in figures if figure.seconds}
    if not {"commplan", "openmpi", "empty call"} <= times.keys():
        return 0.0
    return times["commplan"] / (times["openmpi"] + 1.2 * times["empty call"])


def parser() -> argparse.ArgumentParser:
    parser = lab_parser("collectives", __doc__)
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
