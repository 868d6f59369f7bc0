"""Predicted against measured time, from the results of other benches.

    sudo python -m bench.collectives --algorithms all --calibration lab.toml --out four.json
    sudo python -m bench.fused --sets forty --algorithms all --calibration lab.toml --out forty.json
    python -m bench.prediction four.json forty.json --calibration lab.toml

Compiles each of commplan's figures again for the lab that it was measured in and predicts it; nothing runs.
The error is |predicted - measured| / measured. Prints its median, 90th percentile and maximum by collective,
by range of sizes and by way, with the calibration and (`--model`) without its measured curves. For each
work that was measured in several ways it prints how often the way predicted to be fastest is the fastest
measured one, and how much slower than that it is. With `--of 5` only the five ways with the shortest
predicted times take part.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.harness.arguments import program_parser
from bench.harness.figures import read, size_text, table, time_text
from bench.harness.plans import schedule
from bench.harness.stage import Figure, Surroundings
from commplan.compile_options import RankPlaces
from commplan.cost import Calibration, Predictor, load_calibration, predict
from commplan.diagnostics import CommplanError
from commplan.topology import Topology, parse_topology, places_of_hosts


class Pair(NamedTuple):
    """One figure and its simulation, in seconds."""

    figure: Figure
    simulated: float

    @property
    def error(self) -> float:
        return abs(self.simulated - self.figure.time) / self.figure.time


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        calibration = load_calibration(options.calibration) if options.calibration else None
        if calibration is not None and options.model:
            calibration = msgspec.structs.replace(calibration, curve_list=())
        pairs = [pair for path in options.results for pair in compare(path, calibration)]
    except CommplanError as error:
        print(error, file=sys.stderr)
        return 1
    if not pairs:
        print("no figure of commplan's in these files", file=sys.stderr)
        return 1
    print(table(summary(pairs)))
    print(table(picks(pairs, options.of)))
    print(table(worst(pairs, options.show)))
    return 0


def compare(path: Path, calibration: Calibration | None) -> list[Pair]:
    """Every figure of commplan's in a file of results, simulated."""
    results = read(path)
    where = results.surroundings
    topology = parse_topology(where.topology)
    places = places_of_hosts(topology, where.hosts)
    ours = [f for f in results.figures if f.system == "commplan" and f.work.kind != "empty" and f.seconds]
    return [Pair(figure, seconds(figure, where, topology, places, calibration)) for figure in ours]


def seconds(
    figure: Figure,
    where: Surroundings,
    topology: Topology,
    places: Sequence[int],
    calibration: Calibration | None,
) -> float:
    """The simulated time of one figure."""
    in_order = list(places) == list(range(len(places)))
    compiled = schedule(
        figure.work,
        len(where.hosts),
        topology=topology,
        calibration=calibration,
        ranks=RankPlaces(None if in_order else tuple(places)),
    )
    predictor = Predictor(
        topology, compiled.axes, calibration=calibration, backend="mpi", places=None if in_order else places
    )
    return next(phase.alone for phase in predict(compiled, predictor).phases if phase.name == "step")


def summary(pairs: Sequence[Pair]) -> list[list[str]]:
    """Median, 90th percentile and worst error of all, of each collective, range of sizes and way."""
    rows = [["", "figures", "median error", "90th percentile", "worst"], _row("all", pairs)]
    groups: tuple[Callable[[Pair], str], ...] = (_kind, _range, _way)
    for group in groups:
        for name in dict.fromkeys(map(group, pairs)):
            rows.append(_row(name, [pair for pair in pairs if group(pair) == name]))
    return rows


def picks(pairs: Sequence[Pair], count: int) -> list[list[str]]:
    """How good the way with the shortest predicted time is, of the `count` shortest for each work.

    Times of ways are measured within a few percent: a way is as good as the fastest within 5% of it.
    """
    works: dict[tuple[str, tuple[int, ...]], list[Pair]] = {}
    for pair in pairs:
        if pair.figure.work.how:
            works.setdefault((pair.figure.work.kind, pair.figure.work.counts), []).append(pair)
    losses: list[float] = []
    for ways in works.values():
        nearest = sorted(ways, key=lambda pair: pair.simulated)[:count]
        if len(nearest) > 1:
            losses.append(nearest[0].figure.time / min(pair.figure.time for pair in nearest) - 1)
    if not losses:
        return [["no work was measured in several ways"]]
    row = [f"{sum(loss <= margin for loss in losses)} of {len(losses)}" for margin in (0.0, 0.05)]
    head = [f"predicted best of {count}", "is the measured best", "within 5% of it", "median loss", "worst"]
    return [head, ["", *row, f"{statistics.median(losses):.1%}", f"{max(losses):.0%}"]]


def worst(pairs: Sequence[Pair], count: int) -> list[list[str]]:
    """The figures that are furthest from their simulation."""
    rows = [["", "measured", "simulated", "error", "way"]]
    for pair in sorted(pairs, key=lambda pair: -pair.error)[:count]:
        work = pair.figure.work
        label = f"{_kind(pair)} {size_text(work.nbytes)}"
        times = [time_text(pair.figure.time), time_text(pair.simulated)]
        rows.append([label, *times, f"{pair.error:.0%}", pair.figure.note])
    return rows


def _row(name: str, pairs: Sequence[Pair]) -> list[str]:
    errors = sorted(pair.error for pair in pairs)
    high = errors[math.ceil(0.9 * len(errors)) - 1]
    return [name, str(len(pairs)), f"{statistics.median(errors):.1%}", f"{high:.1%}", f"{errors[-1]:.0%}"]


def _kind(pair: Pair) -> str:
    return pair.figure.work.kind.replace("_", "-")


def _range(pair: Pair) -> str:
    nbytes = pair.figure.work.nbytes
    return "up to 16 KiB" if nbytes <= 16 << 10 else "up to 1 MiB" if nbytes <= 1 << 20 else "above 1 MiB"


def _way(pair: Pair) -> str:
    return pair.figure.work.how or "auto"


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("prediction", __doc__)
    parser.add_argument("results", type=Path, nargs="+", help="what the other benches wrote with --out")
    parser.add_argument("--calibration", type=Path, default=None, help="what it was measured with")
    parser.add_argument("--model", action="store_true", help="leave out the measured curves of collectives")
    parser.add_argument("--of", type=int, default=5, help="ways of a work that are compared (5)")
    parser.add_argument("--show", type=int, default=10, help="how many of the worst to show (10)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
