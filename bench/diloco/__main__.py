"""Streaming DiLoCo in the emulated cluster: exchanges that are hidden under steps, and others.

    sudo python -m bench.diloco [--hosts 4] [--steps 4] [--fragments 9] [--mib 9] [--windows 12] [--out FILE]

Every host is an island with a simulated device, whose steps take `--seconds`. In each window of `--steps`
steps the islands exchange one fragment of `--mib` MiB of weights. A host's link carries 1.1 times the mean
bytes, so that an exchange takes 91% of a window. Ways take turns, window by window:

- `alone`: no exchange;
- `hidden`: the exchange begins before the steps and ends after them;
- `fragments`: the same exchange after the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.diloco import ranks
from bench.harness.arguments import names
from bench.harness.cli import in_lab, lab_parser
from bench.harness.figures import table
from bench.harness.stage import Stage, Surroundings, run_ranks

WAYS = ("alone", "hidden", "fragments")
HEADROOM = 1.1  # of a link, over the mean bytes


class Results(msgspec.Struct, frozen=True):
    """All that was measured. seconds: of each window of each way, of its slowest island."""

    surroundings: Surroundings
    orders: ranks.Orders
    seconds: dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)

    def measure(stage: Stage) -> Results:
        with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
            out = Path(folder) / "seconds.json"
            orders = ranks.Orders(
                ["alone", *(way for way in options.ways if way != "alone")], options.mib * 2**18,
                options.seconds, options.steps, options.fragments, options.windows, str(out),
            )  # fmt: skip
            run_ranks(stage.lab, "the islands", "-m", ranks.__name__, msgspec.json.encode(orders).decode())
            seconds = msgspec.json.decode(out.read_bytes(), type=dict[str, list[float]])
        results = Results(stage.surroundings, orders, seconds)
        print(table(rows(results)))
        return results

    return int(in_lab(options, measure) is None)


def rows(results: Results) -> list[list[str]]:
    alone, steps = results.seconds["alone"], results.orders.steps
    body = [["way", "ms a step", "x alone", "quartiles"]]
    for way, seconds in results.seconds.items():
        ratios = [a / b for a, b in zip(seconds, alone, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        step = statistics.median(seconds) / steps * 1e3
        body.append([way, f"{step:.1f}", f"{statistics.median(ratios):.3f}", f"{low:.3f}..{high:.3f}"])
    return body


def rate_of(options: argparse.Namespace) -> str:
    """The rate of a link that carries `HEADROOM` times the bytes of a scatter and a gather in each window."""
    nbytes = options.mib * 2**20 / options.fragments * 2 * (options.hosts - 1) / options.hosts
    return f"{round(nbytes * 8 * HEADROOM / (options.steps * options.seconds) / 1e3)}kbit"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = lab_parser("diloco", __doc__)
    parser.add_argument("--ways", type=names(WAYS), default=WAYS, help=", ".join(WAYS))
    parser.add_argument("--windows", type=int, default=12, help="of each way (12)")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a step on a simulated device (0.1)")
    parser.add_argument("--steps", type=int, default=4, help="of a window (4)")
    parser.add_argument("--fragments", type=int, default=9, help="of the weights (9)")
    parser.add_argument("--mib", type=int, default=9, help="of the weights (9)")
    parser.set_defaults(rate="")
    options = parser.parse_args(arguments)
    options.rate = options.rate or rate_of(options)
    return options


if __name__ == "__main__":
    sys.exit(main())
