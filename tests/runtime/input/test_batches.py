"""Batches of one process: layout, epochs, state, sharing between members, refusals."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import numpy as np
import pytest
from batch_feed import DATA4, batches, by_name, code, epoch, no_thread_is_left_behind
from hypothesis import given, settings
from hypothesis import strategies as st
from input_plans import FUNCTIONS, SIDE, Counting, decode, ensemble, flip, images, schedule
from msgspec.structs import replace

from commplan.diagnostics import CommplanError
from commplan.input.order import Order, generator
from commplan.ir.schedule import Map, Schedule
from commplan.ir.serialization.canonical_json import schedule_digest
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.shm.slot_status import BatchPosition, write_status

pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)


def test_values_are_what_plain_python_makes() -> None:
    program = ensemble("", 3)
    source = images(20)
    order = Order(20, 8, 17)
    results = epoch(program, source)
    assert len(results) == 3
    stage = _stage_of_flip()
    for step, item in enumerate(results):
        records = order.records(0, step)
        pixels = [decode(source[r])[0] for r in records]
        assert np.array_equal(item["pixels"], np.stack(pixels))
        assert item["labels"].tolist() == [source[r][0] for r in records]
        assert item["labels"].dtype == np.int32 and item["pixels"].dtype == np.uint8
        for member in range(3):
            rows = [
                flip(p, generator(17, stage, 0, step, int(r), member))
                for p, r in zip(pixels, records, strict=True)
            ]
            assert np.array_equal(item["batch"][member], np.stack(rows))
    assert [item["n"].tolist() for item in results] == [8, 8, 4]


def _stage_of_flip() -> int:
    import zlib  # noqa: PLC0415

    return zlib.crc32(b"flip") * 65536 + 1


def test_members_differ_only_where_the_plan_says_so() -> None:
    same = schedule(
        """raw = load images batch 4 visit exactly_once seed 1
        pixels, labels = map decode(raw)
        batch = map flip(pixels)
        output batch""",
        "ensemble member = 3",
    )
    assert epoch(same, images(4))[0]["batch"].shape == (4, SIDE, SIDE)
    augmented = epoch(ensemble("", 3), images(8))[0]["batch"]
    assert augmented.shape == (3, 8, SIDE, SIDE)
    assert not np.array_equal(augmented[0], augmented[1])


def test_random_numbers_do_not_depend_on_where_the_plan_writes_a_call() -> None:
    program = schedule(
        """raw = load images batch 4 visit exactly_once seed 1
        pixels, labels = map decode(raw)
        one = map flip(pixels)
        two = map flip(one)
        output two"""
    )
    (phase,) = program.phases
    first, second = (op for op in phase.ops if isinstance(op, Map) and op.fn == "flip")
    places = {first.results: second.span, second.results: first.span}
    ops = [replace(op, span=places[op.results]) if op in (first, second) else op for op in phase.ops]
    moved = replace(program, phases=(replace(phase, ops=tuple(ops)),))
    assert schedule_digest(moved) == schedule_digest(program)
    for before, after in zip(epoch(program, images(8)), epoch(moved, images(8)), strict=True):
        assert np.array_equal(before["two"], after["two"])


def test_members_with_their_own_order_each_see_every_record() -> None:
    program = schedule(
        """raw, n = load images batch 8 per member visit exactly_once seed 1
        pixels, labels = map decode(raw)
        output labels, n""",
        "ensemble member = 3",
    )
    results = epoch(program, images(20))
    assert [item["labels"].shape for item in results] == [(3, 8)] * 3
    assert [item["n"].tolist() for item in results] == [[8] * 3, [8] * 3, [4] * 3]
    orders = np.concatenate([item["labels"] for item in results], axis=1)[:, :20]
    assert all(sorted(order.tolist()) == list(range(20)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])


def test_counts_are_per_shard() -> None:
    program = ensemble("", 2, axes=DATA4, split="split data")
    with batches(program, images(18)) as feed:
        counts = [by_name(program, batch)["n"].tolist() for batch in feed]
    assert counts == [[2, 2, 2, 2], [2, 2, 2, 2], [2, 0, 0, 0]]


@settings(max_examples=15)
@given(
    ranks=st.sampled_from([1, 2, 4, 8]),
    holders=st.integers(1, 3),
    members=st.integers(1, 3),
    records=st.integers(3, 40),
)
def test_processes_together_hold_what_one_process_holds(
    ranks: int, holders: int, members: int, records: int
) -> None:
    """Any number of ranks, any division of them over processes: the same records at the same rows."""
    whole = epoch(ensemble("", members), images(records))
    program = ensemble("", members, axes=f"axis data = {ranks}", split="split data")
    parts = [list(part) for part in np.array_split(np.arange(ranks), min(holders, ranks))]
    pieces = [
        epoch(program, images(records), local={"data": tuple(map(int, part)), "member": (members - 1,)})
        for part in parts
    ]
    for step, item in enumerate(whole):
        for name, axis in (("labels", 0), ("pixels", 0)):
            array = np.concatenate([piece[step][name] for piece in pieces], axis=axis)
            assert np.array_equal(array, item[name])
        array = np.concatenate([piece[step]["batch"] for piece in pieces], axis=1)
        assert np.array_equal(array, item["batch"][members - 1 :])
        assert sum(int(piece[step]["n"].sum()) for piece in pieces) == int(item["n"])


@settings(max_examples=12)
@given(
    stop=st.integers(0, 11),
    ranks=st.sampled_from([1, 2, 4]),
    design=st.sampled_from(["", "duplicate", "all_shared"]),
)
def test_a_restored_state_goes_on_with_exactly_the_next_batch(stop: int, ranks: int, design: str) -> None:
    """Stopped anywhere in three epochs, restored under another rank count and another design."""
    first = ensemble("", 2)
    source = images(28)
    with batches(first, source) as feed:
        whole = [by_name(first, batch) for _ in range(3) for batch in feed]
    with batches(first, source) as feed:
        for _ in itertools.islice(itertools.chain.from_iterable(iter(feed) for _ in range(3)), stop):
            pass
        state = json.loads(json.dumps(feed.state()))
    second = ensemble(design, 2, axes=f"axis data = {ranks}", split="split data")
    with batches(second, source, state=state) as feed:
        continued = [by_name(second, batch) for _ in range(3) for batch in feed]
        end = feed.state()
    whole = whole[stop:]
    assert len(continued) >= len(whole) > 0
    for expected, actual in zip(whole, continued, strict=False):
        assert all(np.array_equal(expected[name], actual[name]) for name in ("batch", "labels", "pixels"))
    assert end["epoch"] in (2, 3, 4, 5) and end["step"] == 0


def test_each_for_runs_one_epoch_and_the_end_stays_the_end() -> None:
    program = ensemble("", 1)
    with batches(program, images(20)) as feed:
        assert feed.steps == 3
        first = [batch.records["raw.0"].tolist() for batch in feed]
        with pytest.raises(StopIteration):
            next(feed)
        with pytest.raises(StopIteration):
            next(feed)
        assert feed.state()["epoch"] == 1 and feed.state()["step"] == 0
        second = [(batch.epoch, batch.step, batch.records["raw.0"].tolist()) for batch in feed]
    assert [place[:2] for place in second] == [(1, 0), (1, 1), (1, 2)]
    assert first != [place[2] for place in second]


def test_no_work_is_done_beyond_the_epoch() -> None:
    source = Counting(images(16))
    program = ensemble("", 2)
    with batches(program, source) as feed:
        for _ in feed:
            pass
        time.sleep(0.05)
        assert sorted(source.read) == list(range(16))


@pytest.mark.parametrize(("design", "reads"), [("", 1), ("all_shared", 1), ("duplicate", 3)])
def test_what_members_share_is_made_once_unless_pinned(design: str, reads: int) -> None:
    source = Counting(images(16))
    epoch(ensemble(design, 3), source)
    assert sorted(source.read) == sorted(list(range(16)) * reads)


@pytest.mark.parametrize("split", [False, True])
def test_designs_give_the_same_bits(split: bool) -> None:
    more = {"axes": DATA4, "split": "split data"} if split else {}
    results = [epoch(ensemble(design, 3, **more), images(21)) for design in ("", "all_shared", "duplicate")]
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert first.keys() == second.keys()
            assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("tail", "rows"), [("pad", [8, 8, 8]), ("short", [8, 8, 4]), ("drop", [8, 8])])
def test_tails(tail: str, rows: list[int]) -> None:
    visit = "at_most_once" if tail == "drop" else "exactly_once"
    program = schedule(
        f"""raw, n = load images batch 8 visit {visit} seed 1 tail {tail}
        pixels, labels = map decode(raw)
        output labels, n"""
    )
    results = epoch(program, images(20))
    assert [len(item["labels"]) for item in results] == rows
    assert [int(item["n"]) for item in results] == [8, 8, 4][: len(rows)]
    counted = [label for item in results for label in item["labels"][: int(item["n"])].tolist()]
    assert len(set(counted)) == len(counted)


def test_at_least_once_goes_round_and_counts_every_slot() -> None:
    program = schedule(
        """raw, n = load images batch 8 visit at_least_once seed 1
        pixels, labels = map decode(raw)
        output labels, n"""
    )
    results = epoch(program, images(20))
    assert [int(item["n"]) for item in results] == [8, 8, 8]
    assert {label for item in results for label in item["labels"].tolist()} == set(range(20))


TWO_SOURCES = """
source images : bytes
source more   : i32
fn decode (bytes) -> u8[6, 6], i32 on host
fn add (i32, i32) -> i32 on host
"""


def two(visit: str, seed: int = 1) -> Schedule:
    return schedule(
        f"""raw, n = load images batch 8 visit exactly_once seed 1
        other, m = load more batch 8 visit {visit} seed {seed}
        pixels, labels = map decode(raw)
        sums = map add(labels, other)
        output sums, labels, n, m""",
        declarations=TWO_SOURCES,
    )


def run_two(program: Schedule, length: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    sources = {"images": images(20), "more": np.arange(length, dtype=np.int32)}
    with PhaseBatches(
        program, "step", sources, {"decode": decode, "add": lambda a, b: int(a) + int(b)}
    ) as feed:
        return [by_name(program, batch) for batch in feed]


def test_two_sources_of_one_length_and_seed_stay_paired() -> None:
    for item in run_two(two("exactly_once"), 20):
        assert np.array_equal(item["sums"], 2 * item["labels"])


def test_a_short_source_may_go_round_beside_a_long_one() -> None:
    results = run_two(two("at_least_once", 5), 7)
    assert len(results) == 3
    assert [int(item["m"]) for item in results] == [8, 8, 8]


def test_loads_that_do_not_end_together_are_refused() -> None:
    with pytest.raises(CommplanError) as error:
        run_two(two("exactly_once"), 40)
    assert code(error) == "CP0909"
    assert any("40 records" in note.text for note in error.value.diagnostics[0].notes)


def test_operands_of_device_maps_are_handed_over_with_their_records() -> None:
    program = schedule(
        """raw = load images batch 4 visit exactly_once seed 9
        pixels, labels = map decode(raw)
        halves = map half(pixels)
        batch = map jitter(halves) per member
        output batch""",
        "ensemble member = 2",
    )
    with batches(program, images(4)) as feed:
        item = next(feed)
    assert set(item.values) == {"halves.0"}
    assert item.values["halves.0"].shape == (4, SIDE, SIDE) and item.values["halves.0"].dtype == np.float32
    assert item.records["raw.0"].tolist() == Order(4, 4, 9).records(0, 0).tolist()
    assert item.seeds == {"raw.0": 9}


def test_arrays_are_aligned_and_their_own() -> None:
    program = ensemble("", 2)
    with batches(program, images(16)) as feed:
        first, second = list(feed)
    for batch in (first, second):
        assert all(array.ctypes.data % 64 == 0 for array in batch.values.values())
    assert all(not np.shares_memory(first.values[ref], second.values[ref]) for ref in first.values)


def test_a_batch_that_is_interrupted_on_its_way_comes_again() -> None:
    def interrupted(batch: HostBatch) -> HostBatch:
        raise KeyboardInterrupt

    program = ensemble("", 2)
    with batches(program, images(16)) as feed:
        before = feed.state()
        with pytest.raises(KeyboardInterrupt):
            feed.take(interrupted)
        assert feed.state() == before
        assert [batch.step for batch in feed] == [0, 1]


def test_a_function_cannot_spoil_what_members_share() -> None:
    def in_place(pixels: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
        pixels += rng.integers(2, dtype=np.uint8)
        return pixels

    with (
        pytest.raises(CommplanError) as error,
        batches(ensemble("", 2), images(8), functions={"flip": in_place}) as f,
    ):
        next(f)
    assert code(error) == "CP0906"
    assert any("read-only" in note.text for note in error.value.diagnostics[0].notes)


@pytest.mark.parametrize("design", ["single_broadcast(readers = 1)", "multi_broadcast(readers = 2)"])
def test_every_design_makes_the_same_batches(design: str) -> None:
    results, alone = epoch(ensemble(design, 3), images(20)), epoch(ensemble("duplicate", 3), images(20))
    assert len(results) == len(alone) == 3
    for shared_batch, own_batch in zip(results, alone, strict=True):
        assert all(np.array_equal(shared_batch[name], own_batch[name]) for name in own_batch)


def test_clocks_are_refused() -> None:
    program = schedule(
        """raw = load images batch [4, 8] over member visit exactly_once seed 1
        pixels, labels = map decode(raw)
        output pixels""",
        "ensemble member = 2",
    )
    with pytest.raises(CommplanError) as error:
        batches(program, images(8))
    assert code(error) == "CP0912"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 0}, "not a state"),
        ({"epoch": -1, "step": 0, "order": 0}, "not a state"),
        ({"epoch": 0, "step": True, "order": 0}, "not a state"),
        ({"epoch": 0, "step": 0, "order": 1}, "another order"),
    ],
)
def test_states_that_do_not_fit_are_refused(state: dict[str, int], message: str) -> None:
    with pytest.raises(CommplanError) as error:
        batches(ensemble("", 1), images(8), state=state)
    assert code(error) == "CP0910" and message in str(error.value)


def test_a_state_of_a_longer_source_is_refused() -> None:
    with batches(ensemble("", 1), images(24)) as feed:
        next(feed)
        state = feed.state()
    with pytest.raises(CommplanError) as error:
        batches(ensemble("", 1), images(23), state=state)
    assert code(error) == "CP0910" and "23 records" in str(error.value)


@pytest.mark.parametrize(
    "local",
    [
        {"data": (4,)}, {"data": ()}, {"data": (1, 1)}, {"nodes": (0,)}, {"data": (-1,)},
        {"data": 0}, {"data": "01"}, {"data": (0.5,)},
    ],
)  # fmt: skip
def test_indices_that_no_process_can_hold(local: dict[str, Any]) -> None:
    with pytest.raises(CommplanError) as error:
        batches(ensemble("", 1, axes=DATA4, split="split data"), images(8), local=local)
    assert code(error) == "CP0915"


def test_a_phase_without_sources_has_no_batches() -> None:
    program = schedule(
        "grads = reduce grads over data by sum\noutput grads", "axis data = 2\ninput grads : f32 partial data"
    )
    with pytest.raises(CommplanError) as error:
        PhaseBatches(program, "step", {}, {})
    assert code(error) == "CP0917"


@pytest.mark.parametrize("design", ["", "shared"])
def test_functions_may_return_the_same_memory_each_time(design: str) -> None:
    scratch = np.zeros((SIDE, SIDE), np.uint8)

    def decode_in_place(record: bytes) -> tuple[Any, int]:
        scratch[...] = decode(record)[0]
        return scratch, record[0]

    program = schedule(
        f"""raw = load images batch 8 visit exactly_once seed 1 {{ cores = 1 }}
        pixels, labels = map decode(raw)
        {"pixels = share pixels over member via all_shared" if design else ""}
        batch = map half(pixels)
        output pixels, batch, labels""",
        "ensemble member = 2",
    )
    with batches(program, images(8), functions={**FUNCTIONS, "decode": decode_in_place}) as ready:
        item = by_name(program, next(ready))
    expected = np.stack([decode(images(8)[label])[0] for label in item["labels"]])
    assert np.array_equal(item["pixels"], expected)
    assert np.array_equal(item["batch"], expected.astype(np.float32) / 2)


class _OneBuffer:
    """A source that gives out one buffer again and again."""

    def __init__(self) -> None:
        self._buffer = bytearray(3)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> bytearray:
        self._buffer[:] = bytes([index]) * 3
        return self._buffer


def test_a_source_may_return_the_same_memory_each_time() -> None:
    program = schedule(
        "raw = load images batch 8 visit exactly_once seed 1 { cores = 1 }\n"
        "_, labels = map decode(raw)\noutput labels"
    )
    with batches(program, _OneBuffer()) as ready:
        assert sorted(by_name(program, next(ready))["labels"].tolist()) == list(range(8))


class _SilentError(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no message")


@pytest.mark.parametrize("raised", [GeneratorExit(), _SilentError()])
def test_whatever_a_function_raises_belongs_to_its_record(raised: BaseException) -> None:
    def decode_never(record: bytes) -> tuple[Any, int]:
        raise raised

    program = ensemble("", 1)
    with (
        batches(program, images(8), functions={**FUNCTIONS, "decode": decode_never}) as ready,
        pytest.raises(CommplanError) as caught,
    ):
        next(ready)
    assert code(caught) == "CP0906"
    assert type(raised).__name__ in str(caught.value)


def test_a_part_of_another_batch_names_the_process_that_made_it() -> None:
    """The number of a part is no number of a process: one process makes both parts."""
    with batches(ensemble("", 1, hints="{ cores = 2 }"), images(20)) as feed:
        exchange = feed._window.exchange
        assert exchange is not None and exchange.units.layout.parts == 2
        exchange.arm(1)
        exchange.readable(0)
        write_status(exchange.slots.memory(0), 1, BatchPosition(3, 2, 0), None)
        exchange.ring.memory.slots[0].set(spoiled=1)
        expected = "CP0922.*process 0 of 1 is at epoch 3, step 2, this one at epoch 0, step 0"
        with pytest.raises(CommplanError, match=expected):
            next(feed)


def test_a_state_is_a_mapping() -> None:
    with pytest.raises(CommplanError) as caught:
        batches(ensemble("", 1), images(8), state=3)
    assert code(caught) == "CP0910"


def test_a_phase_that_the_plan_lacks() -> None:
    with pytest.raises(CommplanError, match=r"(?s)CP0817.*no phase `nope`.*it has: `step`"):
        PhaseBatches(ensemble("", 1), "nope", {"images": images(8)}, FUNCTIONS)
