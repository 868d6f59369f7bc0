"""A rank of the bench of input between hosts, one on each: `bench.input_hosts` starts it under mpirun.

Every member of an ensemble is a rank. All designs are opened, each with separate batches, and have their
epochs in turns; between two epochs no design works ahead. Traffic of a host and the load of the machine's
cores are the kernel's counts.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import commplan
from bench.input.consumers import Consumer
from bench.input.members import DESIGNS
from bench.input.records import SHAPE, Packed, decode

PLAN = """
plan input_hosts
ensemble member = {members}
source images : bytes
fn decode(bytes) -> u8[224, 224, 3] on host
each step {{
    raw    = load images batch {batch} visit exactly_once seed 17 {{ cores = {threads} }}
    pixels = map decode(raw)
    pixels = share pixels over member via {design}
    output pixels
}}
"""
MPI: Any = importlib.import_module("mpi4py.MPI")


class Orders(msgspec.Struct, frozen=True):
    """What to measure. epochs: of each design, after one that is thrown away. out: where rank 0 writes."""

    records: str
    designs: list[str]
    readers: int
    batch: int
    threads: int
    epochs: int
    out: str


class Epoch(msgspec.Struct, frozen=True):
    """One epoch of one rank.

    Attributes:
        wall_s: until its last batch.
        batch_s: from one batch to the next, between the first and the last.
        cpu_s: of its process.
        sent, received: by its host, headers included.
        busy: the share of the time of all cores of the machine, with all hosts, that was not idle.
        network: the part of it in which the kernel moved packets, including those of virtual links.
        right: whether it received every record once.
    """

    wall_s: float
    batch_s: float
    cpu_s: float
    sent: int
    received: int
    busy: float
    network: float
    right: bool


class Decoding(msgspec.Struct, frozen=True):
    """CPU seconds of one decode into a batch, by one rank with the others idle."""

    seconds: float


class Measured(msgspec.Struct, frozen=True):
    """epochs: [design][epoch][rank]."""

    decoding: Decoding
    epochs: dict[str, list[list[Epoch]]]


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    records = Packed(Path(orders.records))
    comm: Any = MPI.COMM_WORLD
    decoding = _decoding(records) if comm.rank == 0 else 0.0
    comm.Barrier()
    runs = {design: _batches(orders, design, records, comm) for design in orders.designs}
    epochs_by_design: dict[str, list[list[Epoch]]] = {design: [] for design in orders.designs}
    try:
        for turn in range(orders.epochs + 1):
            for design, batches in runs.items():
                comm.Barrier()
                every = comm.gather(_epoch(batches, len(records), orders.batch))
                if comm.rank == 0 and turn:
                    epochs_by_design[design].append(every)
    finally:
        for batches in runs.values():
            batches.close()
    if comm.rank == 0:
        Path(orders.out).write_bytes(msgspec.json.encode(Measured(Decoding(decoding), epochs_by_design)))


def _batches(orders: Orders, design: str, records: Packed, comm: Any) -> Any:
    via = DESIGNS[design].format(readers=orders.readers)
    text = PLAN.format(members=comm.size, batch=orders.batch, threads=orders.threads, design=via)
    program = commplan.loads(text).compile(comm)
    return program.bind(comm, sources={"images": records}, functions={"decode": decode}).batches()


def _epoch(batches: Any, count: int, rows: int) -> Epoch:
    consumer = Consumer("ids", rows)
    sent, received = _counted()
    ticks = _ticks()
    cpu, start = time.process_time(), time.perf_counter()
    taken: list[float] = []
    for item in batches:
        consumer(item["pixels"])
        taken.append(time.perf_counter())
    spent = time.process_time() - cpu
    passed = np.maximum(1e-9, _ticks() - ticks)
    seen = consumer.epoch(count)
    now = _counted()
    each = (taken[-1] - taken[0]) / max(1, len(taken) - 1)
    right = seen["records"] == count and not seen["missing"] and not seen["again"]
    return Epoch(
        taken[-1] - start, each, spent, now[0] - sent, now[1] - received,
        1 - float(passed[1] / passed[0]), float(passed[2] / passed[0]), right,
    )  # fmt: skip


def _counted() -> tuple[int, int]:
    """Bytes that this host's interface has sent and received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == "eth0":
            words = numbers.split()
            return int(words[8]), int(words[0])
    return 0, 0


def _ticks() -> npt.NDArray[np.float64]:
    """The kernel's times of all cores: total, idle, and packets and timers."""
    times = [float(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    _, _, _, idle, waiting, hard, soft, _ = times
    return np.array([sum(times), idle + waiting, hard + soft])


def _decoding(records: Packed) -> float:
    batch = np.zeros((8, *SHAPE), np.uint8)
    many = min(len(records), 128)
    for number in range(8):
        batch[number] = decode(records[number])
    start = time.process_time()
    for number in range(many):
        batch[number % 8] = decode(records[number])
    return (time.process_time() - start) / many


def orders_text(orders: Orders) -> str:
    """As a word of a command."""
    return json.dumps(msgspec.to_builtins(orders))


if __name__ == "__main__":
    main()
