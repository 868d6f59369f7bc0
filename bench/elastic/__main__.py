"""Elastic averaging in the emulated cluster: eight workers and a master, a network trained on real pictures.

    sudo python -m bench.elastic                     # nine hosts, about a quarter of an hour
    sudo python -m bench.elastic --steps 30 --ways round_robin,async,sync_overlap --out elastic.json

Each method trains the same network from the same weights on the same pictures, every worker a share of them,
and averages after every step (tau = 1). Hosts compute on simulated devices: a step's gradients are ready a
fixed time after it began, so that few cores can simulate nine hosts (`bench.elastic.network`). That time is
chosen so that round robin spends between 85 and 90% of a step communicating, as in the paper (You et al., SC
2017); the ratio of computation to communication is printed. `exposed` is the share of a step in which its
worker's device waits for communication: one minus the ratio to a step without any.

Methods: `round_robin`, `async` and `hogwild` go through the master. `sync_each` sums each layer separately,
one after another along a tree; `sync_tree` the same with all layers packed; `sync_packed` is the compiler's
choice; `sync_overlap` also begins the exchange with the step and ends it when needed, and `sync_bf16` in
addition sends half the bytes. `sgd` is synchronous SGD over all workers, for its accuracy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from bench.elastic import network, ranks
from bench.harness.arguments import names
from bench.harness.cli import in_lab, lab_parser
from bench.harness.figures import table
from bench.harness.stage import Stage, Surroundings, run_ranks

UNPACKED = "share,rates,decompose,wire,select,overlap"  # the usual pipeline without buckets
WAYS = (
    ranks.Way("alone", "alone"),
    ranks.Way("round_robin", "round_robin"),
    ranks.Way("async", "async"),
    ranks.Way("hogwild", "hogwild"),
    ranks.Way("sync_each", "sync", "via binomial_tree", passes=UNPACKED),
    ranks.Way("sync_tree", "sync", "via binomial_tree"),
    ranks.Way("sync_packed", "sync"),
    ranks.Way("sync_overlap", "sync", "{ overlap = backward }", overlap=True),
    ranks.Way("sync_bf16", "sync", "{ overlap = backward, wire = bf16, accumulate = f32 }", overlap=True),
    ranks.Way("async_overlap", "async", overlap=True),
    ranks.Way("sgd", "sgd"),
)


class Results(msgspec.Struct, frozen=True):
    """All that was measured. nbytes: of the weights. seconds: of a step on a pretended device."""

    surroundings: Surroundings
    nbytes: int
    seconds: float
    orders: ranks.Orders
    trained: list[ranks.Trained]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    ways = [way for way in WAYS if way.name in ("alone", *options.ways)]

    def measure(stage: Stage) -> Results:
        with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
            pictures, out = Path(folder) / "pictures.npz", Path(folder) / "trained.json"
            _pictures(pictures, options.seed)
            orders = ranks.Orders(
                str(pictures), ways, options.steps, options.seconds, options.batch, options.eta,
                options.rho, options.width, options.seed, str(stage.topology),
                str(options.calibration) if options.calibration else None, str(out),
            )  # fmt: skip
            words = ["-m", ranks.__name__, msgspec.json.encode(orders).decode()]
            run_ranks(stage.lab, "the workers", *words)
            trained = msgspec.json.decode(out.read_bytes(), type=list[ranks.Trained])
        nbytes = sum(x.nbytes for x in network.init(options.seed, options.width).values())
        results = Results(stage.surroundings, nbytes, options.seconds, orders, trained)
        print(table(rows(results)))
        return results

    return int(in_lab(options, measure) is None)


def _pictures(path: Path, seed: int) -> None:
    pixels, labels = network.pictures(2048, seed=seed)
    held_pixels, held_labels = network.pictures(1024, seed=seed, held_out=True)
    np.savez(path, pixels=pixels, labels=labels, held_pixels=held_pixels, held_labels=held_labels)


def step_s(trained: ranks.Trained) -> float:
    """Seconds of a step: the mean over workers of their medians."""
    return statistics.fmean(statistics.median(steps) for steps in trained.step_s)


def exposed(trained: ranks.Trained, alone: float) -> float:
    """The share of a step that is spent communicating."""
    return max(0.0, 1 - alone / step_s(trained))


def rows(results: Results) -> list[list[str]]:
    alone = step_s(next(trained for trained in results.trained if trained.way.mode == "alone"))
    slow = next((step_s(trained) for trained in results.trained if trained.way.mode == "round_robin"), None)
    body = [["way", "ms a step", "+-", "exposed", "x round robin", "loss", "accuracy", "cpu s", "late"]]
    for trained in results.trained:
        medians = [statistics.median(steps) for steps in trained.step_s]
        body.append(
            [
                trained.way.name,
                f"{step_s(trained) * 1e3:.1f}",
                f"{(max(medians) - min(medians)) / 2 / step_s(trained):.0%}",
                f"{exposed(trained, alone):.1%}",
                f"{slow / step_s(trained):.2f}" if slow else "",
                f"{statistics.fmean(trained.losses[-10:]):.3f}",
                f"{trained.accuracy:.1%}" if trained.way.mode != "alone" else "",
                f"{trained.cpu_s:.0f}",
                str(trained.late),
            ]
        )
    return body


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = lab_parser("elastic", __doc__)
    ways = [way.name for way in WAYS if way.mode != "alone"]
    parser.add_argument("--ways", type=names(ways), default=ways, help=", ".join(ways))
    parser.add_argument("--steps", type=int, default=60, help="of each way (60)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a step on a pretended device (0.2)")
    parser.add_argument("--batch", type=int, default=8, help="pictures of a worker's step (8)")
    parser.add_argument("--eta", type=float, default=0.05, help="the learning rate (0.05)")
    parser.add_argument("--rho", type=float, default=2.2, help="how hard workers are pulled (2.2)")
    parser.add_argument("--width", type=int, default=70, help="of the network's hidden layer (70)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(hosts=9, rate="25mbit")
    options = parser.parse_args(arguments)
    if options.hosts < 3 or options.racks != 1:
        parser.error("two workers and a master need three hosts, on one switch")
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
