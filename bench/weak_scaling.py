"""Weak scaling: measured on 2 to 8 hosts, simulated on as many and on to 4,253.

    sudo python -m bench.weak_scaling --out weak.json        # 1 MiB, 0.3 s a step, links of 50 Mbit/s
    python -m bench.weak_scaling --measured weak.json        # simulate once more, measure nothing
    python -m bench.weak_scaling --measured weak.json --fabric 10Gbit/s --nbytes 100MiB --seconds 0.2

A step is `seconds` of work on a pretended device and one exchange of `nbytes`, on every number of hosts. Two
ways: `elastic` averages with a common centre in every step, under the step; `gradients` are summed after it.
Efficiency is the time of a step of one worker, without any exchange, over that of a step on n.

The lab's links are measured once, on the largest number of hosts, by `commplan calibrate`; its curves of
whole collectives are left out, so every number of hosts is simulated from the links alone, as those that
nobody measured are. The step without an exchange is taken as measured on two hosts. Simulated is the
schedule that the compiler makes for that number of hosts on one switch; what it counts as work comes before
and behind the exchange. On a fabric of other links (`--fabric`) nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.collectives import size
from bench.exchange import scaling
from bench.harness.figures import heading, plots, size_text, table, time_text
from bench.harness.stage import Stage, Surroundings, run_ranks
from bench.netlab import Shape
from commplan import dsl
from commplan.compiler import compile_plan
from commplan.cost import Calibration, Predictor, load_calibration, predict
from commplan.cost.calibration import parse_calibration, write_calibration
from commplan.diagnostics import CommplanError, fail
from commplan.pytree import shapes_of
from commplan.topology import Topology, parse_topology

HOSTS = (2, 4, 6, 8)
RANKS = (2, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4253)
PAPER = 0.915  # on 4,253 nodes: You, Buluc and Demmel, SC 2017


class Point(msgspec.Struct, frozen=True):
    """A step on `ranks` hosts in seconds, simulated, and measured if it was. chosen: of the largest part."""

    way: str
    ranks: int
    simulated: float
    measured: float | None
    alone: float
    chosen: str

    @property
    def error(self) -> float | None:
        return None if self.measured is None else self.simulated / self.measured - 1


class Results(msgspec.Struct, frozen=True):
    """All that was measured, and what was simulated. calibration: the links, as the file says them."""

    nbytes: int
    seconds: float
    surroundings: list[Surroundings]
    calibration: str
    measured: list[scaling.Measured]
    points: list[Point] = []


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.measured:
            read = [msgspec.json.decode(path.read_bytes(), type=Results) for path in options.measured]
            results = merged(read)
        else:
            results = _measure(options)
        nbytes = options.nbytes or results.nbytes
        seconds = options.seconds or results.seconds
        if options.fabric:
            text = _switch(options.ranks[-1], options.fabric, options.latency)
            results = Results(nbytes, seconds, results.surroundings, "", [])
        else:
            text = results.surroundings[-1].topology
        points = simulated(results, parse_topology(text), options.ranks)
        results = msgspec.structs.replace(results, points=points)
    except CommplanError as error:
        print(error, file=sys.stderr)
        return 1
    for where in results.surroundings if results.measured else ():
        print(heading(where))
    print(f"{size_text(results.nbytes)} of weights, steps of {time_text(results.seconds)}", end="")
    print(f", a fabric of {options.fabric}" if options.fabric else "")
    print(table(rows(points)))
    print("\n".join(verdict(points)))
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        plot(results, options.out.with_suffix(".png"))
    return 0


def merged(parts: Sequence[Results]) -> Results:
    """What was measured in several runs with one calibration, as one."""
    first = parts[0]
    alike = {(part.nbytes, part.seconds, part.calibration) for part in parts}
    if len(alike) > 1:
        fail("CP1124", "the files do not go together", "give one --nbytes, --seconds and --calibration")
    measured = sorted((point for part in parts for point in part.measured), key=lambda point: point.ranks)
    where = [surroundings for part in parts for surroundings in part.surroundings]
    return msgspec.structs.replace(first, measured=measured, surroundings=where)


def simulated(results: Results, lab: Topology, ranks: Sequence[int]) -> list[Point]:
    """Both ways on every number of ranks; the lab's switch has as many hosts as it needs."""
    links = parse_calibration(results.calibration) if results.calibration else None
    by = {(point.way, point.ranks): point.time for point in results.measured}
    alone = by.get(("alone", min((point.ranks for point in results.measured), default=0)), results.seconds)
    points: list[Point] = []
    for way in ("elastic", "gradients"):
        for count in ranks:
            work, network, chosen = step(way, count, results.nbytes, lab, links)
            exposed = max(alone, network) if way == "elastic" else alone + network
            points.append(Point(way, count, exposed + work, by.get((way, count)), alone, chosen))
    return points


def step(
    way: str, ranks: int, nbytes: int, lab: Topology, links: Calibration | None
) -> tuple[float, float, str]:
    """Seconds of work and of the exchange in one step, and how the largest part of it is exchanged."""
    plan, mistakes = dsl.load(scaling.plan_text(way, ranks), way)
    if plan is None:
        raise CommplanError(*mistakes)
    first = msgspec.structs.replace(lab.levels[0], count=max(2, ranks))
    topology = Topology(lab.name, (first,), lab.cores)
    shapes = {
        "params" if way == "elastic" else "grads": shapes_of(
            {f"w{i:02}": {"shape": [n], "dtype": "f32"} for i, n in enumerate(scaling.counts(nbytes))}
        )
    }
    compiled = compile_plan(plan, shapes, topology=topology, calibration=links, backend="mpi")
    predictor = Predictor(topology, compiled.axes, calibration=links, backend="mpi")
    phase = next(p for p in predict(compiled, predictor).phases if p.name == scaling.PHASE[way])
    largest = max((op for op in phase.ops if op.algorithm), key=lambda op: op.alone)
    return phase.compute, phase.network, largest.algorithm


def _switch(hosts: int, rate: str, latency: str) -> str:
    level = f'name = "host"\ncount = {hosts}\nlatency = "{latency}"\nbandwidth = "{rate}"\n'
    return f'name = "fabric"\n[[level]]\n{level}'


def _measure(options: argparse.Namespace) -> Results:
    nbytes, seconds = options.nbytes or 1 << 20, options.seconds or 0.3
    surroundings: list[Surroundings] = []
    measured: list[scaling.Measured] = []
    calibration = options.calibration
    with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
        for hosts in sorted(options.hosts, reverse=True):  # the most first: they are calibrated on
            with Stage(Shape(hosts, 1, options.rate, "", False), (), name=options.name) as stage:
                print(heading(stage.surroundings), flush=True)
                surroundings.append(stage.surroundings)
                if calibration is None or not calibration.exists():
                    calibration = calibration or Path(folder) / "lab.calibration.toml"
                    words = ["-m", "commplan.cli", "calibrate", "--topology", str(stage.topology), "-o"]
                    more = [str(calibration), "--seconds", "30", "--largest", "1MiB"]
                    run_ranks(stage.lab, "a program", *words, *more)
                links = Path(folder) / "links.toml"
                links.write_text(_links(calibration), encoding="utf-8")
                out = Path(folder) / "measured.json"
                orders = scaling.Orders(
                    nbytes, seconds, options.steps, str(stage.topology), str(links), str(out)
                )
                words = ["-m", scaling.__name__, msgspec.json.encode(orders).decode()]
                run_ranks(stage.lab, "a program", *words)
                measured += msgspec.json.decode(out.read_bytes(), type=list[scaling.Measured])
        assert calibration is not None
        return Results(nbytes, seconds, surroundings, _links(calibration), measured)


def _links(path: Path) -> str:
    """A calibration without curves: those of eight hosts would tell of eight hosts alone."""
    return write_calibration(msgspec.structs.replace(load_calibration(path), curve_list=()))


def rows(points: Sequence[Point]) -> list[list[str]]:
    body = [["way", "hosts", "measured", "simulated", "error", "efficiency", "simulated", "chosen"]]
    for point in points:
        error = "" if point.error is None else f"{point.error:+.1%}"
        efficiency = "" if point.measured is None else f"{point.alone / point.measured:.1%}"
        measured = "" if point.measured is None else time_text(point.measured)
        body.append(
            [
                point.way, f"{point.ranks:,}", measured, time_text(point.simulated), error, efficiency,
                f"{point.alone / point.simulated:.1%}", point.chosen,
            ]
        )  # fmt: skip
    return body


def verdict(points: Sequence[Point]) -> list[str]:
    """The simulator's error where there is something to compare, and the efficiency on the most ranks."""
    sentences: list[str] = []
    errors = [abs(point.error) for point in points if point.error is not None]
    if errors:
        mean = sum(errors) / len(errors)
        sentences.append(
            f"simulated steps are {mean:.1%} off on average, {max(errors):.1%} at worst, of {len(errors)}"
        )
    for way in dict.fromkeys(point.way for point in points):
        last = max((point for point in points if point.way == way), key=lambda point: point.ranks)
        share = last.alone / last.simulated
        compared = f" (You et al. measured {PAPER:.1%} on 4,253 nodes)" if way == "elastic" else ""
        sentences.append(f"{way}: {share:.1%} on {last.ranks:,} hosts{compared}")
    return sentences


def plot(results: Results, path: Path) -> bool:
    """Efficiency over hosts; False where matplotlib is not installed."""
    pyplot = plots()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for color, way in enumerate(dict.fromkeys(point.way for point in results.points)):
        own = [point for point in results.points if point.way == way]
        at = [point.ranks for point in own]
        axes.plot(
            at, [point.alone / point.simulated for point in own], f"C{color}-", label=f"{way}, simulated"
        )
        seen = [point for point in own if point.measured is not None]
        share = [point.alone / (point.measured or 1.0) for point in seen]
        axes.plot([point.ranks for point in seen], share, f"C{color}o", label=f"{way}, measured")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("hosts")
    axes.set_ylabel("efficiency: a step of one worker / a step")
    axes.set_title(f"weak scaling: {size_text(results.nbytes)}, {time_text(results.seconds)} of work a step")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench.weak_scaling", description=summary)
    parser.add_argument("--hosts", type=_numbers, default=HOSTS, help="that are measured (2,4,6,8)")
    parser.add_argument("--ranks", type=_numbers, default=RANKS, help="that are simulated (2 to 4,253)")
    parser.add_argument("--nbytes", type=size, default=0, help="of the weights (1MiB)")
    parser.add_argument("--seconds", type=float, default=0.0, help="of work in a step (0.3)")
    parser.add_argument("--steps", type=int, default=15, help="that are measured of each way (15)")
    parser.add_argument("--rate", default="50mbit", help="of a host's link (50mbit)")
    parser.add_argument("--name", default="weak", help="of the lab (weak)")
    parser.add_argument("--calibration", type=Path, default=None, help="the lab's; measured if there is none")
    parser.add_argument("--measured", type=Path, nargs="+", help="what --out wrote: measure nothing")
    parser.add_argument("--fabric", default="", help="simulate links of this rate, such as 10Gbit/s")
    parser.add_argument("--latency", default="5us", help="of the links of --fabric (5us)")
    parser.add_argument("--out", type=Path, default=None, help="JSON file; a plot is written beside it")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError("numbers from 2 on")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
