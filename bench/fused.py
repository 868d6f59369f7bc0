"""Many tensors: one planned exchange against one call for each tensor, and against buckets of 25 MiB.

    sudo python -m bench.fused                             # four hosts on one switch
    sudo python -m bench.fused --hosts 4 --racks 2         # two racks behind 4:1 uplinks
    sudo python -m bench.fused --sets small --quick
    sudo python -m bench.fused --sets forty --algorithms all        # every algorithm of commplan's

Sets: `forty` (256 B to 256 KiB, 2 MB in all), `resnet50` (its 161 gradient tensors, 102 MB) and `small` (200
of 1 KiB). commplan is a plan of one line over the whole tree. `each` is one call for each tensor, `fused` one
concatenated buffer, or several of 25 MiB (for torch, DistributedDataParallel's method), `combined` one jitted
function that XLA may combine freely. Every result is compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.collectives import PEERS, SYSTEMS, ways
from bench.harness.arguments import names
from bench.harness.cli import in_lab, lab_parser, shape_of
from bench.harness.figures import Results, table, time_text
from bench.harness.stage import Entry, Figure, Stage
from bench.harness.work import ITEM, Work

WAYS = {
    "commplan": ("",),
    "openmpi": ("each", "fused"),
    "mpi4jax": ("each", "fused"),
    "xla": ("each", "combined", "fused"),
    "torch": ("each", "fused"),
}


def forty() -> tuple[int, ...]:
    """Elements of forty tensors, small and large ones mixed."""
    sizes = [256 << k for k in range(11) for _ in range(3 if k < 4 else 4)]
    return tuple(sizes[7 * i % 40] // ITEM for i in range(40))


def resnet50() -> tuple[int, ...]:
    """Elements of the parameters of ResNet-50 (He et al. 2015), in the order of the forward pass."""
    counts = [7 * 7 * 3 * 64, 64, 64]
    inside = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            for of_kernel, channels in ((inside * width, width), (9 * width * width, width)):
                counts += [of_kernel, channels, channels]
            counts += [width * 4 * width, 4 * width, 4 * width]
            if block == 0:
                counts += [inside * 4 * width, 4 * width, 4 * width]
            inside = 4 * width
    return (*counts, 2048 * 1000, 1000)


SETS = {"forty": forty(), "resnet50": resnet50(), "small": (1024 // ITEM,) * 200}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    every = ways("all_reduce", shape_of(options))
    asked = every if options.algorithms == "all" else options.algorithms.split(",")

    def measure(stage: Stage) -> Results:
        figures: list[Figure] = []
        for name in options.sets:
            compared = stage.compare(entries(name, options.systems, asked))
            print(f"\n{name}: {len(SETS[name])} tensors, {ITEM * sum(SETS[name]) / 1e6:.2f} MB")
            print(table(rows(compared)), flush=True)
            figures += compared
        return Results("fused", stage.surroundings, figures)

    return int(in_lab(options, measure, options.systems, rounds=3 if options.quick else 6) is None)


def entries(name: str, systems: Sequence[str], algorithms: Sequence[str] = ()) -> list[Entry]:
    """A line for each method of each system. `algorithms`: those of commplan, in addition to its choice."""
    asked = {**WAYS, "commplan": ("", *filter(None, algorithms))}
    return [
        Entry(f"{system} {how}".strip(), system, Work("all_reduce", SETS[name], how))
        for system in systems
        for how in asked[system]
    ]


def rows(figures: Sequence[Figure]) -> list[list[str]]:
    """Times, and how many times as fast as the best fused peer and as the best peer call by call."""
    measured = [figure for figure in figures if figure.seconds and figure.system in PEERS]
    fused = min((f.time for f in measured if f.work.how in ("fused", "combined")), default=float("nan"))
    single = min((f.time for f in measured if f.work.how == "each"), default=float("nan"))
    body: list[list[str]] = []
    for figure in figures:
        if not figure.seconds:
            body.append([figure.label, figure.missing, *[""] * 6])
            continue
        cpu = sum(figure.cpu) / len(figure.cpu)
        ratios = [f"{fused / figure.time:.2f}", f"{single / figure.time:.2f}"]
        sent = f"{figure.crossed / 1e3:.1f}"
        body.append(
            [figure.label, time_text(figure.time), f"{figure.spread:.0%}", time_text(cpu), sent, *ratios,
             figure.note]
        )  # fmt: skip
    return [["", "time", "+-", "cpu", "sent KB", "x best fused", "x best each", "chosen"], *body]


def _parser() -> argparse.ArgumentParser:
    parser = lab_parser("fused", __doc__)
    parser.add_argument("--systems", type=names(SYSTEMS), default=SYSTEMS, help="comma-separated (all)")
    parser.add_argument("--sets", type=names(tuple(SETS)), default=tuple(SETS), help="comma-separated (all)")
    parser.add_argument("--algorithms", default="", help="of commplan: all, or such as 'via ring,via native'")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
