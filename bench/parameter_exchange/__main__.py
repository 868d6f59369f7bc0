"""Parameter exchange in the emulated cluster: the location of the weights, and the cost of a step.

    sudo python -m bench.parameter_exchange                      # eight workers and two servers on one switch
    sudo python -m bench.parameter_exchange --racks 2 --out racks.json    # two racks of five, 4:1 uplinks
    sudo python -m bench.parameter_exchange --megabytes 2 --ways sharded,reduce

A model of 25 MB in forty tensors, SGD with momentum. `central` is the usual first version: one server, one
message for each tensor, the update after all have arrived. By commplan: `server` and `servers` are one and
two separate processes, `colocated` one worker that owns everything, `sharded` all workers, each a part, and
`rack` the same with sums within a rack first (on two racks). `reduce` is an all-reduce, and then a local
update on each worker; `ddp` is torch's DistributedDataParallel over Gloo, if torch is installed. A step is
timed until the last worker has its weights, which are compared with NumPy's; the kernel counts the bytes.

Bounds, with n workers and S bytes of weights, of the busiest link in each direction: sharded, rack and reduce
2 (n-1)/n S, one worker S (sums may be made on the way), one server n S, two servers n S / 2. Between two
racks at least S crosses each way (2 S together) if each byte crosses once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.harness.arguments import names
from bench.harness.cli import in_lab, lab_parser
from bench.harness.figures import table
from bench.harness.stage import Stage, Surroundings, run_ranks
from bench.netlab import Counters, Shape, counters
from bench.parameter_exchange import ranks

WAYS = (
    ranks.Way("central", "central", 1),
    ranks.Way("server", "exchange", 1),
    ranks.Way("servers", "exchange", 2),
    ranks.Way("colocated", "exchange", 0, "via parameter_server(owners = 1)"),
    ranks.Way("sharded", "exchange", 0, "via parameter_server(owners = {workers})"),
    ranks.Way("rack", "exchange", 0, "via parameter_server(within = rack)"),
    ranks.Way("auto", "exchange", 0),
    ranks.Way("reduce", "reduce"),
    ranks.Way("ddp", "ddp"),
)
TENSORS = 40
SAMPLE_S = 0.2  # between two looks at the counters


class Figure(msgspec.Struct, frozen=True):
    """One method.

    Attributes:
        busiest: bytes of a step that the busiest host sent or received.
        bound: the lower bound of `busiest`.
        crossed, crossing: the same for the uplinks, both directions together; 0 on one switch.
    """

    measured: ranks.Measured
    busiest: float
    bound: float
    crossed: float
    crossing: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured.seconds)


class Results(msgspec.Struct, frozen=True):
    """All that was measured. nbytes: of the weights."""

    surroundings: Surroundings
    nbytes: int
    workers: int
    figures: list[Figure]


def sizes(nbytes: int) -> list[int]:
    """Elements of forty tensors, small and large ones mixed, as in a network: `nbytes` in all, nearly."""
    shares = [1.35 ** (number * 7 % TENSORS) for number in range(TENSORS)]
    return [max(1, round(share / sum(shares) * nbytes / 4)) for share in shares]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    workers = options.workers

    def measure(stage: Stage) -> Results:
        with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
            out = Path(folder) / "measured.json"
            orders = ranks.Orders(
                _ways(options), _order(stage.lab.shape, workers), workers, options.racks,
                sizes(int(options.megabytes * 1e6)), options.rounds or 3, stage.lab.hosts[0].address,
                str(stage.topology), str(options.calibration) if options.calibration else None, str(out),
            )  # fmt: skip
            with _Watch(stage) as watch:
                words = ["-m", ranks.__name__, msgspec.json.encode(orders).decode()]
                run_ranks(stage.lab, "the workers", *words, out=sys.stderr)
            measured = msgspec.json.decode(out.read_bytes(), type=list[ranks.Measured])
        figures = [_figure(step, watch, orders) for step in measured]
        results = Results(stage.surroundings, 4 * sum(orders.sizes), workers, figures)
        print(table(rows(results)))
        return results

    return int(in_lab(options, measure) is None)


class _Watch:
    """Samples the kernel's counters, to compute the traffic between two times later."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._end = stage, threading.Event()
        self._seen: list[tuple[float, Counters]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(SAMPLE_S):
            before = time.time()
            now = counters(self._stage.lab)
            self._seen.append(((before + time.time()) / 2, now))

    def between(self, began: float, ended: float) -> Counters:
        """The traffic in that time, with the precision of one sample at either end."""
        first = max((sample for sample in self._seen if sample[0] <= began), key=lambda sample: sample[0])
        later = [sample for sample in self._seen if sample[0] >= ended]
        last = min(later, key=lambda sample: sample[0], default=self._seen[-1])
        return last[1].since(first[1])


def _order(shape: Shape, workers: int) -> list[int]:
    """World ranks in the bench's order: workers rack by rack, then servers, going round the racks."""
    each = workers // shape.racks
    working = [rack * shape.hosts + i for rack in range(shape.racks) for i in range(each)]
    serving = [rack * shape.hosts + i for i in range(each, shape.hosts) for rack in range(shape.racks)]
    return working + serving


def _ways(options: argparse.Namespace) -> list[ranks.Way]:
    chosen = [way for way in WAYS if way.name in options.ways and (way.name != "rack" or options.racks > 1)]
    return [msgspec.structs.replace(way, how=way.how.format(workers=options.workers)) for way in chosen]


def _figure(measured: ranks.Measured, watch: _Watch, orders: ranks.Orders) -> Figure:
    if measured.missing:
        return Figure(measured, 0, 0, 0, 0)
    crossed = watch.between(measured.began, measured.ended)
    busiest = max(*crossed.sent, *crossed.received) / orders.steps
    nbytes, n = 4 * sum(orders.sizes), orders.workers
    if measured.way.servers:
        bound = nbytes * n / measured.way.servers
    else:
        bound = nbytes * (1 if measured.way.name == "colocated" else 2 * (n - 1) / n)
    uplinks = sum(crossed.uplinks) / orders.steps
    return Figure(measured, busiest, bound, uplinks, 2.0 * nbytes * (orders.racks - 1))


def rows(results: Results) -> list[list[str]]:
    by_name = {
        figure.measured.way.name: figure.seconds for figure in results.figures if not figure.measured.missing
    }
    body = [["way", "s a step", "+-", "x central", "x reduce", "x ddp", "busiest MB", "of bound", "uplink MB",
             "right"]]  # fmt: skip
    for figure in results.figures:
        measured = figure.measured
        if measured.missing:
            body.append([measured.way.name, measured.missing, *[""] * 8])
            continue
        ratios = [f"{by_name[peer] / figure.seconds:.2f}" if peer in by_name else "" for peer in PEERS]
        spread = (max(measured.seconds) - min(measured.seconds)) / 2 / figure.seconds
        body.append(
            [
                measured.way.name,
                f"{figure.seconds:.3f}",
                f"{spread:.0%}",
                *ratios,
                f"{figure.busiest / 1e6:.1f}",
                f"{figure.busiest / figure.bound:.2f}",
                f"{figure.crossed / 1e6:.1f}" if figure.crossed else "",
                "right" if measured.wrong < 1e-5 else f"WRONG by {measured.wrong:.1e}",
            ]
        )
    return body


PEERS = ("central", "reduce", "ddp")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = lab_parser("parameter_exchange", __doc__)
    ways = [way.name for way in WAYS]
    parser.add_argument("--ways", type=names(ways), default=ways, help=", ".join(ways))
    parser.add_argument("--workers", type=int, default=8, help="in all (8)")
    parser.add_argument("--megabytes", type=float, default=25.0, help="of weights (25)")
    parser.set_defaults(hosts=0)
    options = parser.parse_args(arguments)
    options.hosts = options.hosts or (options.workers + 2) // options.racks
    if options.interleave:
        parser.error("workers fill one rack after another")
    if options.workers % options.racks or options.hosts * options.racks < options.workers + 2:
        parser.error("--workers must be a multiple of --racks, and two hosts must be left for servers")
    return options


if __name__ == "__main__":
    sys.exit(main())
