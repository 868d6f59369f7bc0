"""One member's process, of commplan, of plain Python or of Grain, or one that measures a part of the limit.

python -m bench.input.members SYSTEM --records FILE --members N --place I --run-id ID --threads T --consumer
KIND"""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.input.consumers import KINDS, Batch, Consumer
from bench.input.records import SHAPE, Packed, decode
from bench.input.team import answer, cannot, member_parser

BATCH = 64
DESIGNS = {
    "duplicate": "duplicate",
    "all_shared": "all_shared",
    "single_broadcast": "single_broadcast(readers = {readers})",
    "multi_broadcast": "multi_broadcast(readers = {readers})",
}
PLAN = """
plan ensemble_input
ensemble member = {members}
source images : bytes
fn decode(bytes) -> u8[224, 224, 3] on host
each step {{
    raw    = load images batch {batch} visit exactly_once seed 17 tail short {{ cores = {threads} }}
    pixels = map decode(raw)
    pixels = share pixels over member via {design}
    output pixels
}}
"""


def text(design: str, members: int, threads: int) -> str:
    """The plan; with as many readers as this process may use cores, if the design has readers."""
    via = DESIGNS[design].format(readers=min(len(os.sched_getaffinity(0)), members))
    return PLAN.format(members=members, batch=BATCH, threads=threads, design=via)


def commplan(options: Any, records: Packed) -> None:
    """A member whose input is a plan's; `one_process` holds all members."""
    from commplan import compiler  # noqa: PLC0415  a member of plain Python does without
    from commplan.dsl import load  # noqa: PLC0415
    from commplan.runtime.input import PhaseBatches, group  # noqa: PLC0415

    alone = options.system == "one_process"
    written = text("all_shared" if alone else options.system, options.members, options.threads)
    plan, problems = load(written, "ensemble_input.plan")
    if plan is None:
        raise SystemExit("\n".join(map(str, problems)))
    schedule = compiler.compile_plan(plan, {}, passes="")
    local = None if alone else {"member": (options.place,)}
    team = None if alone else group(options.run_id, options.place, options.members, timeout=120.0)
    consumers = [Consumer(options.consumer, BATCH) for _ in range(options.members if alone else 1)]
    made_by: Any = PhaseBatches(
        schedule, "step", {"images": records}, {"decode": decode}, local=local, group=team
    )
    with made_by as batches:

        def made() -> int:
            return sum(line.nbytes for line in batches.summary().lines if line.what == "map decode")

        def epoch() -> dict[str, Any]:
            before = made()
            for batch in batches:
                (pixels,) = batch.values.values()
                for consumer in consumers:
                    consumer(pixels)
            answers = [consumer.epoch(len(records)) for consumer in consumers]
            answer = {
                key: sum((partial[key] for partial in answers[1:]), answers[0][key]) for key in answers[0]
            }
            return {**answer, "made": made() - before, "members": options.members if alone else 1}

        epoch()
        answer(epoch)


def plain(options: Any, records: Packed) -> None:
    """A training script without commplan: read, decode, stack, with as many threads as it has cores."""
    rng = np.random.default_rng(17)
    consumer = Consumer(options.consumer, BATCH)
    pool = ThreadPoolExecutor(options.threads) if options.threads > 1 else None

    def fill(batch: Batch, rows: Sequence[int], chosen: Sequence[int]) -> None:
        for row in rows:
            batch[row] = decode(records[chosen[row]])

    def epoch() -> dict[str, Any]:
        order = rng.permutation(len(records)).tolist()
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            batch = np.empty((len(chosen), *SHAPE), np.uint8)
            if pool is None:
                fill(batch, range(len(chosen)), chosen)
            else:
                parts = [range(first, len(chosen), options.threads) for first in range(options.threads)]
                for part in [pool.submit(fill, batch, rows, chosen) for rows in parts]:
                    part.result()
            consumer(batch)
        return consumer.epoch(len(records))

    epoch()
    answer(epoch)


def grain(options: Any, records: Packed) -> None:
    """Grain's MapDataset with a thread for each core: every member reads and decodes for itself.

    https://google-grain.readthedocs.io advises threads for Pillow, which releases the interpreter's lock.
    """
    if importlib.util.find_spec("grain") is None:
        cannot("grain is not installed")
        return
    library: Any = importlib.import_module("grain")
    consumer = Consumer(options.consumer, BATCH)
    reading = library.ReadOptions(num_threads=options.threads, prefetch_buffer_size=2 * BATCH)
    seeds = itertools.count(17)

    def epoch() -> dict[str, Any]:
        data = library.MapDataset.source(records).seed(next(seeds)).shuffle().map(decode)
        for batch in data.to_iter_dataset(reading).batch(BATCH):
            consumer(batch)
        return consumer.epoch(len(records))

    epoch()
    answer(epoch)


def consuming(options: Any, records: Packed) -> None:
    """The consumer alone, on batches in memory. It has none before its first epoch: the memory of the process
    is then that of members without input."""

    importlib.import_module("commplan.runtime.input")  # its modules count as memory of the process
    consumer = Consumer(options.consumer, BATCH)
    block: list[Batch] = []

    def batches() -> Iterator[Batch]:
        for start in range(0, len(records), BATCH):
            rows = min(BATCH, len(records) - start)
            block[0].reshape(BATCH, -1)[:rows, :4] = np.arange(start, start + rows, dtype=np.uint32)[
                :, None
            ].view(np.uint8)
            yield block[0][:rows]

    def epoch() -> dict[str, Any]:
        if not block:
            nbytes = BATCH * int(np.prod(SHAPE))
            block.append(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8).reshape(BATCH, *SHAPE))
        for batch in batches():
            consumer(batch)
        return consumer.epoch(len(records))

    answer(epoch)


def decoding(options: Any, records: Packed) -> None:
    """One decode after another, into rows of a batch; apart: of this member's records alone."""
    batch = np.zeros((BATCH, *SHAPE), np.uint8)
    share = range(len(records))
    if options.system == "decoding_apart":
        share = range(options.place, len(records), options.members)

    def epoch() -> dict[str, Any]:
        for number in share:
            batch[number % BATCH] = decode(records[number])
        return {"records": len(share), "missing": 0, "again": 0}

    epoch()
    answer(epoch)


SYSTEMS: dict[str, Callable[[Any, Packed], None]] = {
    **dict.fromkeys((*DESIGNS, "one_process"), commplan),
    "plain": plain,
    "grain": grain,
    "consuming": consuming,
    "decoding": decoding,
    "decoding_apart": decoding,
}


def main() -> None:
    parser = member_parser(__doc__, tuple(SYSTEMS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--consumer", default="ids", choices=KINDS)
    options = parser.parse_args()
    SYSTEMS[options.system](options, Packed(options.records))


if __name__ == "__main__":
    main()
