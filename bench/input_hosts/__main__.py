"""The input of an ensemble across hosts: each design's CPU, bytes and rate, against what links and cores
allow.

    sudo python -m bench.input_hosts                          # four hosts at 200 Mbit/s
    sudo python -m bench.input_hosts --rate 100mbit --records 2048 --out input_hosts.json
    sudo python -m bench.input_hosts --quick

A member of the ensemble runs on each host of a lab, under mpirun; all read the same seeded JPEGs (500 x 375
at quality 90, decoded with Pillow, cut and resized to 224 x 224 u8) through `run.batches()`. The designs have
their epochs in turns. Every member compares the numbers of its records.

There are two limits, both from parts measured in the same run. Links: the traffic of the busiest host, sent
or received, whichever is more, at the line rate of its link. (The last reader of `single_broadcast` sends its
rows to the other readers, and all rows to the rest.) Cores: decodes alone, spread over all cores of this
machine. The larger limit binds, and `of links` is the share of the rate that the links allow.

The hosts of the lab share the cores of this machine, which also process the packets of the virtual links,
unlike in a real cluster. `busy` is the share of core time that was not idle, and `network` its part for
packets. If the cores are never idle they bind, whatever the time of decodes alone; a lower rate shows the
limit of the links. The last line is the choice of `auto` for such hosts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from bench.harness.arguments import names
from bench.harness.cli import in_lab, lab_parser
from bench.harness.figures import table
from bench.harness.stage import Stage, Surroundings, run_ranks
from bench.input.members import DESIGNS
from bench.input.records import SHAPE, pack
from bench.input.team import MALLOC
from bench.input_hosts import ranks
from commplan import dsl
from commplan.compiler import compile_plan
from commplan.cost.calibration import only_input
from commplan.input.measured_costs import FnCost, InputCosts, SourceCost
from commplan.input.work_partition import division
from commplan.ir.remark import Design
from commplan.ir.schedule import Share
from commplan.lowering.mpi.instructions import RECEIVE, SEND
from commplan.runtime.input.transport.transfer_plan import Form, transfer_list
from commplan.topology import parse_topology

BUSY = 0.9  # of all cores: above this a task waits for a core
COPY, WIRE = 1e-10, 1e-9  # CPU seconds of a byte copied, and sent or received, as machines of today have it
ROW = SHAPE[0] * SHAPE[1] * SHAPE[2]  # bytes of a decoded record


class Figure(msgspec.Struct, frozen=True):
    """The measurements of one design.

    Seconds of a batch: measured (median of the epochs, of the slowest member), and the limits of links and
    cores.

    Attributes:
        cpu_s: per record and member, all hosts together.
        sent, received: bytes per record of the busiest host, as counted by the kernel.
        busy, network: shares of the time of all cores, see `ranks.Epoch`.
        right: whether every member received every record once.
    """

    design: str
    batch_s: float
    spread: float
    links_s: float
    cores_s: float
    cpu_s: float
    sent: float
    received: float
    busy: float
    network: float
    right: bool

    @property
    def of_links(self) -> float:
        return self.links_s / self.batch_s

    @property
    def binds(self) -> str:
        return "links" if self.links_s > self.cores_s and self.busy < BUSY else "cores"


class Results(msgspec.Struct, frozen=True):
    """All measurements. `decode_s`: CPU seconds of one decode. `auto`: the compiler's choice for hosts with
    these links and one core each."""

    surroundings: Surroundings
    records: int
    batch: int
    readers: int
    decode_s: float
    figures: list[Figure]
    epochs: dict[str, list[list[ranks.Epoch]]]
    auto: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)

    def measure(stage: Stage) -> Results:
        with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
            records, out = Path(folder) / "records.bin", Path(folder) / "measured.json"
            pack(records, options.records)
            orders = ranks.Orders(
                str(records), options.designs, options.readers, options.batch, options.threads,
                options.rounds or 3, str(out),
            )  # fmt: skip
            words = ["-m", ranks.__name__, ranks.orders_text(orders)]
            run_ranks(stage.lab, "the members", *words, environment=MALLOC)
            results = _results(stage.surroundings, orders, options.records, out)
        print(table(rows(results)))
        print(f"one decode: {results.decode_s * 1e3:.3f} ms of CPU; auto takes {results.auto}")
        return results

    results = in_lab(options, measure)
    return int(results is None or not all(figure.right for figure in results.figures))


def _results(where: Surroundings, orders: ranks.Orders, count: int, out: Path) -> Results:
    measured = msgspec.json.decode(out.read_bytes(), type=ranks.Measured)
    decode = measured.decoding.seconds
    figures = [
        figure(design, epochs, orders, count, decode, where) for design, epochs in measured.epochs.items()
    ]
    auto = chosen(where, orders, decode)
    return Results(where, count, orders.batch, orders.readers, decode, figures, measured.epochs, auto)


def figure(
    design: str,
    epochs: Sequence[Sequence[ranks.Epoch]],
    orders: ranks.Orders,
    count: int,
    decode: float,
    where: Surroundings,
) -> Figure:
    """The figure of one design from its epochs. `decode`: CPU seconds of one decode."""
    hosts = len(epochs[0])
    batches = [max(rank.batch_s for rank in epoch) for epoch in epochs]
    usual = statistics.median(batches)
    bytes_made, moved = least(design, hosts, orders.readers, orders.batch)
    busiest = [[sum(rank.sent for rank in epoch) for epoch in zip(*epochs, strict=True)],
               [sum(rank.received for rank in epoch) for epoch in zip(*epochs, strict=True)]]  # fmt: skip
    sent, got = (max(each) / len(epochs) / count for each in busiest)
    return Figure(
        design=design,
        batch_s=usual,
        spread=(max(batches) - min(batches)) / 2 / usual,
        links_s=moved * ROW / where.line,
        cores_s=bytes_made * decode / where.cores,
        cpu_s=statistics.median(sum(rank.cpu_s for rank in epoch) for epoch in epochs) / count / hosts,
        sent=sent,
        received=got,
        busy=statistics.median(epoch[0].busy for epoch in epochs),
        network=statistics.median(epoch[0].network for epoch in epochs),
        right=all(rank.right for epoch in epochs for rank in epoch),
    )


def least(design: str, ranks: int, readers: int, batch: int) -> tuple[int, float]:
    """Decodes of one batch on all hosts together, and the rows that its busiest link carries one way: what
    the programs of the design have some host send or receive.

    >>> least("all_shared", 4, 2, 64), least("multi_broadcast", 4, 2, 64), least("duplicate", 4, 2, 64)
    ((64, 48.0), (64, 64.0), (256, 0.0))
    >>> least("single_broadcast", 4, 2, 64)  # the last reader gives half to the other one, all to the rest
    (64, 96.0)
    """
    if design == "duplicate":
        return ranks * batch, 0.0
    partition = division(cast("Design", design), range(ranks), readers)
    bounds = tuple(partition.part(batch, part)[0] for part in range(partition.parts))
    form = Form(1, batch, ROW, (*bounds, batch))
    lists = [transfer_list(partition.moves(), host, (form,)) for host in range(ranks)]
    moved = [
        sum(row.nbytes for row in each.code if row.kind == way) for each in lists for way in (SEND, RECEIVE)
    ]
    return batch, max(moved) / ROW


def chosen(where: Surroundings, orders: ranks.Orders, decode: float) -> str:
    """The compiler's choice and its explanation, for hosts with one core each and the links of `where`, from
    the CPU seconds of one decode."""
    lines = [line for line in ranks.PLAN.splitlines() if "share" not in line]
    written = "\n".join(lines).format(members=len(where.hosts), batch=orders.batch, threads=orders.threads)
    plan, problems = dsl.load(written, "input_hosts.plan")
    if plan is None:
        raise ValueError("\n".join(map(str, problems)))
    costs = InputCosts(
        where.date[:10], 1, COPY, wire=WIRE, source=(SourceCost("images", 0.0),),
        fn=(FnCost("decode", decode, nbytes_out=ROW),),
    )  # fmt: skip
    compiled = compile_plan(
        plan, {}, topology=parse_topology(where.topology), backend="mpi",
        calibration=only_input(where.date[:10], costs),
    )  # fmt: skip
    shares = [op.design for phase in compiled.phases for op in phase.ops if isinstance(op, Share)]
    reasons = "; ".join(choice.why for choice in compiled.choices if choice.by == "share")
    return f"{', '.join(shares) or 'no share'}: {reasons}"


def rows(results: Results) -> list[list[str]]:
    head = ["design", "ms a batch", "+-", "batches/s", "links ms", "cores ms", "binds", "of links",
            "cpu ms/record/member", "sent KB/record", "received KB/record", "busy", "network",
            "ids"]  # fmt: skip
    body = [
        [
            figure.design,
            f"{figure.batch_s * 1e3:.0f}",
            f"{figure.spread:.0%}",
            f"{1 / figure.batch_s:.2f}",
            f"{figure.links_s * 1e3:.0f}",
            f"{figure.cores_s * 1e3:.0f}",
            figure.binds,
            f"{figure.of_links:.3f}" if figure.links_s else "",
            f"{figure.cpu_s * 1e3:.3f}",
            f"{figure.sent / 1e3:.1f}",
            f"{figure.received / 1e3:.1f}",
            f"{figure.busy:.0%}",
            f"{figure.network:.0%}",
            "right" if figure.right else "WRONG",
        ]
        for figure in results.figures
    ]
    return [head, *body]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = lab_parser("input_hosts", __doc__)
    parser.add_argument("--designs", type=names(tuple(DESIGNS)), default=tuple(DESIGNS))
    parser.add_argument("--readers", type=int, default=2, help="of the broadcasts (2)")
    parser.add_argument("--records", type=int, default=1024, help="of an epoch (1024)")
    parser.add_argument("--batch", type=int, default=64, help="records of a batch (64)")
    parser.add_argument("--threads", type=int, default=1, help="that decode, on each host (1)")
    parser.add_argument("--quick", action="store_true", help="256 records, one epoch")
    options = parser.parse_args(arguments)
    if options.quick:
        options.records, options.rounds = 256, 1
    if options.records % options.batch or options.records < 2 * options.batch:
        parser.error("--records must be a multiple of --batch, and at least two of it")
    if not 1 <= options.readers <= options.hosts * options.racks:
        parser.error("--readers must be between 1 and the number of hosts")
    return options


if __name__ == "__main__":
    sys.exit(main())
