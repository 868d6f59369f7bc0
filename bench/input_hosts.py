"""The input of an ensemble across hosts: each design's CPU, bytes and rate, against what links and cores
allow.

    sudo python -m bench.input_hosts                          # four hosts at 200 Mbit/s
    sudo python -m bench.input_hosts --rate 400mbit --records 2048 --out input_hosts.json
    sudo python -m bench.input_hosts --quick
 A member of the ensemble runs on each host of a lab, under mpirun; all read the same seeded JPEGs (500 x
375 at quality 90, decoded with Pillow, cut and resized to 224 x 224 u8) through `run.batches()`. The
designs have their epochs in turns. Every member compares the numbers of its records.
 Two limits, both from parts measured in the same run. Links: a host must receive every row that it does not
make, at the line rate of its link. Cores: decodes and nothing else, spread over all cores of this machine,
which the hosts of the lab share (hosts of a real cluster have cores of their own). The larger one binds.
`of links` is the share of the rate that the links allow.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.collectives import lab_flags
from bench.harness.figures import heading, table
from bench.harness.stage import ENVIRONMENT, Stage, Surroundings
from bench.input import hosts
from bench.input.members import DESIGNS
from bench.input.records import SHAPE, pack
from bench.input.team import MALLOC, ROOT
from bench.netlab import Lab, Shape
from commplan.diagnostics import CommplanError, fail
from commplan.input.division import division
from commplan.ir.choice import Design

ROW = SHAPE[0] * SHAPE[1] * SHAPE[2]  # bytes of a decoded record


class Figure(msgspec.Struct, frozen=True):
    """One design. Seconds of a batch: measured (median of the epochs, of the slowest member), and what
    links and cores take at least. cpu_s: per record and member, all hosts together. sent, received: bytes
    of a record, of the busiest host, as the kernel counted them. right: whether every member was given
    every record once."""

    design: str
    batch_s: float
    spread: float
    links_s: float
    cores_s: float
    cpu_s: float
    sent: float
    received: float
    right: bool

    @property
    def of_links(self) -> float:
        return self.links_s / self.batch_s

    @property
    def binds(self) -> str:
        return "links" if self.links_s > self.cores_s else "cores"


class Results(msgspec.Struct, frozen=True):
    """All that was measured. decode_s: CPU seconds of one decode."""

    surroundings: Surroundings
    records: int
    batch: int
    readers: int
    decode_s: float
    figures: list[Figure]
    epochs: dict[str, list[list[hosts.Epoch]]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    shape = Shape(options.hosts, options.racks, options.rate, options.uplink, options.interleave)
    try:
        with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
            records = Path(folder) / "records.bin"
            pack(records, options.records)
            with Stage(shape, (), name=options.name) as stage:
                print(heading(stage.surroundings), flush=True)
                out = Path(folder) / "measured.json"
                orders = hosts.Orders(
                    str(records), options.designs, options.readers, options.batch, options.threads,
                    options.rounds or 3, str(out),
                )  # fmt: skip
                _run(stage.lab, orders)
                found = _results(stage.surroundings, orders, options.records, out)
    except CommplanError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(rows(found)))
    print("\n" + verdict(found))
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0 if all(figure.right for figure in found.figures) else 1


def _run(lab: Lab, orders: hosts.Orders) -> None:
    words = [sys.executable, "-m", hosts.__name__, hosts.orders_text(orders)]
    environment = {**os.environ, **ENVIRONMENT, **MALLOC, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        lab.mpirun(words), env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        fail("CP1124", "the members in the lab failed", *(done.stdout + done.stderr).splitlines()[-20:])


def _results(where: Surroundings, orders: hosts.Orders, count: int, out: Path) -> Results:
    measured = msgspec.json.decode(out.read_bytes(), type=hosts.Measured)
    decode = measured.decoding.seconds
    figures = [
        figure(design, epochs, orders, count, decode, where) for design, epochs in measured.epochs.items()
    ]
    return Results(where, count, orders.batch, orders.readers, decode, figures, measured.epochs)


def figure(
    design: str,
    epochs: Sequence[Sequence[hosts.Epoch]],
    orders: hosts.Orders,
    count: int,
    decode: float,
    where: Surroundings,
) -> Figure:
    """What the epochs of one design come to. decode: CPU seconds of one decode."""
    ranks = len(epochs[0])
    batches = [max(rank.batch_s for rank in ranks_) for ranks_ in epochs]
    usual = statistics.median(batches)
    made, received = least(design, ranks, orders.readers, orders.batch)
    busiest = [[sum(rank.sent for rank in one) for one in zip(*epochs, strict=True)],
               [sum(rank.received for rank in one) for one in zip(*epochs, strict=True)]]  # fmt: skip
    sent, got = (max(each) / len(epochs) / count for each in busiest)
    return Figure(
        design=design,
        batch_s=usual,
        spread=(max(batches) - min(batches)) / 2 / usual,
        links_s=received * ROW / where.line,
        cores_s=made * decode / where.cores,
        cpu_s=statistics.median(sum(rank.cpu_s for rank in one) for one in epochs) / count / ranks,
        sent=sent,
        received=got,
        right=all(rank.right for one in epochs for rank in one),
    )


def least(design: str, ranks: int, readers: int, batch: int) -> tuple[int, int]:
    """Decodes of one batch on all hosts together, and the rows that some host must receive.

    >>> least("all_shared", 4, 2, 64), least("multi_broadcast", 4, 2, 64), least("duplicate", 4, 2, 64)
    ((64, 48), (64, 64), (256, 0))
    """
    if design == "duplicate":
        return ranks * batch, 0
    chosen: Design = "all_shared" if design == "all_shared" else "multi_broadcast"
    found = division(chosen, range(ranks), readers)
    own = [sum(high - low for low, high in (found.part(batch, p) for p in found.of(r))) for r in range(ranks)]
    return batch, batch - min(own)


def rows(found: Results) -> list[list[str]]:
    head = ["design", "ms a batch", "+-", "batches/s", "links ms", "cores ms", "binds", "of links",
            "cpu ms/record/member", "sent KB/record", "received KB/record", "ids"]  # fmt: skip
    body = [
        [
            one.design,
            f"{one.batch_s * 1e3:.0f}",
            f"{one.spread:.0%}",
            f"{1 / one.batch_s:.2f}",
            f"{one.links_s * 1e3:.0f}",
            f"{one.cores_s * 1e3:.0f}",
            one.binds,
            f"{one.of_links:.3f}" if one.links_s else "",
            f"{one.cpu_s * 1e3:.3f}",
            f"{one.sent / 1e3:.1f}",
            f"{one.received / 1e3:.1f}",
            "right" if one.right else "WRONG",
        ]
        for one in found.figures
    ]
    return [head, *body]


def verdict(found: Results) -> str:
    """What all_shared reaches of what binds it."""
    rate = f"line rate {found.surroundings.line / 1e6:.2f} MB/s"
    lines = [f"one decode: {found.decode_s * 1e3:.3f} ms of CPU; {rate}"]
    for one in found.figures:
        if one.design == "all_shared":
            limit = max(one.links_s, one.cores_s)
            lines.append(
                f"all_shared: {one.of_links:.1%} of what the links allow, {limit / one.batch_s:.1%} of what"
                f" binds ({one.binds})"
            )
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.input_hosts", description=(__doc__ or "").split("\n")[0]
    )
    lab_flags(parser)
    parser.add_argument("--designs", type=lambda text: text.split(","), default=list(DESIGNS))
    parser.add_argument("--readers", type=int, default=2, help="of the broadcasts (2)")
    parser.add_argument("--records", type=int, default=1024, help="of an epoch (1024)")
    parser.add_argument("--batch", type=int, default=64, help="records of a batch (64)")
    parser.add_argument("--threads", type=int, default=1, help="that decode, on each host (1)")
    parser.add_argument("--quick", action="store_true", help="256 records, one epoch")
    options = parser.parse_args(arguments)
    if options.quick:
        options.records, options.rounds = 256, 1
    unknown = [design for design in options.designs if design not in DESIGNS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not among {', '.join(DESIGNS)}")
    if options.records % options.batch or options.records < 2 * options.batch:
        parser.error("--records must be a multiple of --batch, and at least two of it")
    if not 1 <= options.readers <= options.hosts * options.racks:
        parser.error("--readers must be between 1 and the number of hosts")
    return options


if __name__ == "__main__":
    sys.exit(main())
