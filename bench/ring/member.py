"""The processes of `bench.ring`: members of a feed, of a host's group, and of a hand-written ring.

    python -m bench.ring.member SYSTEM --plan FILE --records FILE --members N --place I --memory PATH
        --run-id ID

All return the same batches in the same order: a picture, decoded and then changed at random, and the number
of its record, from a separate load. A member stores the numbers, and a few cells of every picture.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bench.input.records import SHAPE, SIDE, Packed, decode
from bench.input.team import answer, member_parser, serve

BATCH, SEED, APART = 32, 17, 9973
PLAN = """
plan ring
ensemble member = {members}
source images : bytes
source numbers : i32
fn decode(bytes) -> u8[224, 224, 3] on host
fn augment(u8[224, 224, 3]) -> u8[224, 224, 3] on host random
each step {{
    raw     = load images batch 32 visit exactly_once seed 17 {{ cores = {makers} }}
    drawn   = load numbers batch 32 visit exactly_once seed 17
    full    = map decode(raw)
    changed = map augment(full)
    pixels  = share changed over member via {design}
    ids     = share drawn over member via {design}
    output pixels, ids
}}
"""
Batch = Mapping[str, npt.NDArray[Any]]


def augment(pixels: npt.NDArray[np.uint8], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Moved by a random number of columns, and lighter or darker."""
    moved = np.roll(pixels, int(rng.integers(SIDE)), 1)
    return moved ^ np.uint8(rng.integers(256))


class Numbers:
    """The second load: the numbers of the records."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> np.int32:
        return np.int32(number)


class Notes:
    """A member's observations of an epoch: a checksum of numbers and of cells of all pictures, batch by
    batch."""

    def __init__(self) -> None:
        self.checksum, self.records = 0, 0

    def add(self, batch: Batch) -> None:
        pixels, ids = batch["pixels"], batch["ids"]
        cells = pixels.reshape(len(ids), -1)[:, ::APART].tobytes()
        self.checksum = zlib.crc32(cells, zlib.crc32(ids.tobytes(), self.checksum))
        self.records += len(ids)


def expected(records: Packed, epoch: int) -> int:
    """The checksum that every member is to have of `epoch`."""
    notes = Notes()
    for step in range(len(records) // BATCH):
        batch = {"pixels": np.empty((BATCH, *SHAPE), np.uint8), "ids": np.empty(BATCH, np.int32)}
        make(records, epoch, step, batch)
        notes.add(batch)
    return notes.checksum


def make(records: Packed, epoch: int, step: int, batch: Batch) -> None:
    """Fill `batch` as the plan says."""
    from commplan.input.order import Order, generator  # noqa: PLC0415  members of the ring do without

    stage = zlib.crc32(b"augment") * 65536 + 1
    chosen = Order(len(records), BATCH, SEED).records(epoch, step)
    for row, number in enumerate(chosen.tolist()):
        rng = generator(SEED, stage, epoch, step, number, -1)
        batch["pixels"][row] = augment(decode(records[number]), rng)
    batch["ids"][:] = chosen


# --- the ring written by hand ---


def maker(options: Any, records: Packed) -> None:
    """One process makes every batch, straight into its slot."""
    from bench.ring.hand_ring import Ring  # noqa: PLC0415  the others do without

    threading.Thread(target=_end_with_input, daemon=True).start()
    ring = Ring(options.memory, options.members)
    ring.make(len(records) // BATCH, lambda epoch, step, batch: make(records, epoch, step, batch))


def _end_with_input() -> None:
    serve()
    os._exit(0)


def ring_batches(options: Any, records: Packed) -> Callable[[], Iterator[Batch]]:
    from bench.ring.hand_ring import Ring  # noqa: PLC0415

    return Ring(options.memory, options.members).epochs(options.place, len(records) // BATCH)


# --- commplan ---


def feed_batches(options: Any, records: Packed) -> Callable[[], Iterator[Batch]]:
    """A program that joins without a launcher."""
    import commplan  # noqa: PLC0415

    feed = commplan.join(
        options.run_id, options.plan, sources={"images": records, "numbers": Numbers(len(records))},
        functions={"decode": decode, "augment": augment}, member=options.place, timeout=120.0,
    )  # fmt: skip
    return lambda: cast("Iterator[Batch]", iter(feed))


def group_batches(options: Any, records: Packed) -> Callable[[], Iterator[Batch]]:
    """A member of the group that a launcher's processes are in; it loads the compiled program."""
    import commplan  # noqa: PLC0415
    from commplan.runtime.input import PhaseBatches, group  # noqa: PLC0415

    schedule = commplan.Program.load(options.plan.with_suffix(".schedule.json")).schedule
    batches = PhaseBatches(
        schedule, "step", {"images": records, "numbers": Numbers(len(records))},
        {"decode": decode, "augment": augment}, local={"member": (options.place,)},
        group=group(options.run_id, options.place, options.members, timeout=120.0),
    )  # fmt: skip
    names = {binding.value: binding.name for binding in schedule.phase("step").outputs}

    def epoch() -> Iterator[Batch]:
        for batch in batches:
            yield {names[ref]: array for ref, array in batch.values.items()}

    return epoch


MEMBERS: dict[str, Callable[[Any, Packed], Callable[[], Iterator[Batch]]]] = {
    "ring": ring_batches,
    "feed": feed_batches,
    "group": group_batches,
}


def main() -> None:
    parser = member_parser(__doc__, (*MEMBERS, "maker"))
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--memory", type=Path)
    options = parser.parse_args()
    records = Packed(options.records)
    if options.system == "maker":
        maker(options, records)
        return
    begin = MEMBERS[options.system](options, records)

    def epoch() -> dict[str, Any]:
        notes, start, first_s = Notes(), time.perf_counter(), 0.0
        for batch in begin():
            first_s = first_s or time.perf_counter() - start
            notes.add(batch)
        return {"records": notes.records, "checksum": notes.checksum, "first_s": first_s}

    answer(epoch)


if __name__ == "__main__":
    main()
