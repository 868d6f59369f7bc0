"""The processes of `bench.record_cache`: one member that reads decoded records again, epoch by epoch.

python -m bench.record_cache.member SYSTEM --records FILE --rows FILE --members N --place I --run-id ID
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bench.input.consumers import Consumer
from bench.input.records import SHAPE, Packed, decode
from bench.input.team import answer, cannot, member_parser

BATCH = 32
PLAN = """
plan cached
ensemble member = {members}
source images : bytes
fn decode(bytes) -> u8[224, 224, 3] on host
each step {{
    raw    = load images batch 32 visit exactly_once seed 17 {{ cores = 1 }}
    pixels = map decode(raw) {{ cache = {cache} }}
    {share}
    output pixels
}}
"""
Pixels = npt.NDArray[np.uint8]
Epoch = Callable[[], Iterator[Pixels]]


def _orders(count: int) -> Iterator[list[list[int]]]:
    """The batches of each epoch, in another order each time."""
    rng = np.random.default_rng(17)
    while True:
        order = rng.permutation(count).tolist()
        yield [order[start : start + BATCH] for start in range(0, count, BATCH)]


def memcpy(options: Any, count: int) -> Epoch:
    """`memcpy` of each row into one batch: no other work, and no memory that is new."""
    rows, orders = np.load(options.rows, mmap_mode="r"), _orders(count)
    batch, nbytes = np.zeros((BATCH, *SHAPE), np.uint8), int(np.prod(SHAPE))

    def epoch() -> Iterator[Pixels]:
        source, target = rows.ctypes.data, batch.ctypes.data
        for chosen in next(orders):
            for row, number in enumerate(chosen):
                ctypes.memmove(target + row * nbytes, source + number * nbytes, nbytes)
            yield batch[: len(chosen)]

    return epoch


def memmap(options: Any, count: int) -> Epoch:
    """The rows of a NumPy memmap, chosen by an array of numbers."""
    rows, orders = np.load(options.rows, mmap_mode="r"), _orders(count)

    def epoch() -> Iterator[Pixels]:
        for chosen in next(orders):
            yield rows[chosen]

    return epoch


def alone(options: Any, count: int) -> Epoch:
    """A single program: it shares only the cache with the others."""
    return _batches(options, count, None)


def group(options: Any, count: int) -> Epoch:
    """A member of the group that a launcher's processes are in."""
    from commplan.runtime.input import group as group_of  # noqa: PLC0415

    return _batches(options, count, group_of(options.run_id, options.place, options.members, timeout=120.0))


def _batches(options: Any, count: int, members: Any) -> Epoch:
    from commplan import compiler  # noqa: PLC0415  the others do without
    from commplan.dsl import load  # noqa: PLC0415
    from commplan.runtime.input import PhaseBatches  # noqa: PLC0415

    plan, problems = load(_text(options, count, shared=members is not None), "cached.plan")
    if plan is None:
        raise SystemExit("\n".join(map(str, problems)))
    batches = PhaseBatches(
        compiler.compile_plan(plan, {}, passes=""), "step", {"images": Packed(options.records)},
        {"decode": decode}, local={"member": (options.place,)}, group=members,
    )  # fmt: skip

    def epoch() -> Iterator[Pixels]:
        for batch in batches:
            yield next(iter(batch.values.values()))

    return epoch


def joined(options: Any, count: int) -> Epoch:
    """A program that joins the feed of the others."""
    import commplan  # noqa: PLC0415

    feed = commplan.join(
        options.run_id, commplan.loads(_text(options, count, shared=False)),
        sources={"images": Packed(options.records)}, functions={"decode": decode}, member=options.place,
        timeout=120.0,
    )  # fmt: skip
    return lambda: (batch["pixels"] for batch in cast("Any", feed))


def _text(options: Any, count: int, *, shared: bool) -> str:
    share = "pixels = share pixels over member via single_broadcast(readers = 2)" if shared else ""
    size = f"{(count + 1) * int(np.prod(SHAPE)) + (1 << 20)}"
    cache = f'disk("{options.rows.parent / "table"}", {size})' if options.file else size
    return PLAN.format(members=options.members, cache=cache, share=share)


def tf_cache(options: Any, count: int) -> Epoch:
    """tf.data with `cache()` in memory: each member has a copy of all rows."""
    tf: Any = importlib.import_module("tensorflow")
    rows = np.load(options.rows, mmap_mode="r")

    def row(number: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(rows.__getitem__, [number], tf.uint8), SHAPE)

    batches = tf.data.Dataset.range(count).map(row).cache().shuffle(count).batch(BATCH).prefetch(1)
    return lambda: iter(batches.as_numpy_iterator())


SYSTEMS: dict[str, Callable[[Any, int], Epoch]] = {
    "memcpy": memcpy, "memmap": memmap, "alone": alone, "file": alone, "group": group, "feed": joined,
    "tf_cache": tf_cache,
}  # fmt: skip


def main() -> None:
    parser = member_parser(__doc__, tuple(SYSTEMS))
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    options.file = options.system == "file"
    if options.system == "tf_cache" and importlib.util.find_spec("tensorflow") is None:
        cannot("tensorflow is not installed")
        return
    count = len(Packed(options.records))
    begin, consumer = SYSTEMS[options.system](options, count), Consumer("ids", BATCH)

    def epoch() -> dict[str, Any]:
        for batch in begin():
            consumer(batch)
        return consumer.epoch(count)

    answer(epoch)


if __name__ == "__main__":
    main()
