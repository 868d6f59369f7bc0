"""Batches of one process that go wrong: records, functions and sources that fail, and records skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch_feed import batches, by_name, code, epoch, no_thread_is_left_behind
from input_plans import SIDE, Counting, decode, ensemble, images, schedule

from commplan.diagnostics import CommplanError
from commplan.input.order import Order

pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)


def test_the_error_comes_with_its_batch_and_names_everything() -> None:
    source = images(24)
    bad = int(Order(24, 8, 17).records(0, 1)[3])

    def broken(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
        if record == source[bad]:
            raise ValueError("truncated")
        return decode(record)

    with batches(ensemble("", 2), source, functions={"decode": broken}) as feed:
        assert next(feed).step == 0
        with pytest.raises(CommplanError) as error:
            next(feed)
        assert feed.state()["step"] == 1, "the place is that of the batch that failed"
        with pytest.raises(CommplanError) as after:
            next(feed)
    diagnostic = error.value.diagnostics[0]
    assert diagnostic.code == "CP0906" and diagnostic.span is not None and diagnostic.span.line == 15
    assert diagnostic.message == f"host function `decode` on record {bad} raised ValueError: truncated"
    assert isinstance(error.value.__cause__, ValueError)
    assert code(after) == "CP0916", "after an error it is closed, and never just ends"


def failing(broken: Any, name: str = "decode", **more: Any) -> CommplanError:
    with (
        pytest.raises(CommplanError) as error,
        batches(ensemble("", 1), images(8), functions={name: broken}, **more) as f,
    ):
        next(f)
    return error.value


PIXELS = np.zeros((SIDE, SIDE), np.uint8)


@pytest.mark.parametrize(
    ("result", "expected", "actual"),
    [
        (PIXELS, "2 results", "u8[6, 6], one result"),
        ((PIXELS, 1, 2), "2 results", "3 results"),
        ((PIXELS[:5], 1), "result 1: u8[6, 6]", "u8[5, 6]"),
        ((PIXELS.astype(np.float32), 1), "result 1: u8[6, 6]", "f32[6, 6]"),
        ((PIXELS, 1.5), "result 2: i32", "1.5 of type float"),
        ((PIXELS, True), "result 2: i32", "True of type bool"),
        ((PIXELS, 2**40), "result 2: i32", "1099511627776 of type int"),
        ((PIXELS, np.int64(1)), "result 2: i32", "i64"),
        ((None, 1), "result 1: u8[6, 6]", "None"),
        ((b"abc", 1), "result 1: u8[6, 6]", "a bytes"),
    ],
)
def test_wrong_results_are_named(result: object, expected: str, actual: str) -> None:
    error = failing(lambda record: result)
    diagnostic = error.diagnostics[0]
    assert diagnostic.code == "CP0907"
    first = int(Order(8, 8, 17).records(0, 0)[0])
    assert f"`decode` returned another type than the plan says, for record {first}" in diagnostic.message
    assert [note.text for note in diagnostic.notes] == [f"expected: {expected}", f"found: {actual}"]
    assert diagnostic.span is not None and diagnostic.span.line == 15 and diagnostic.file == "tested.plan"


@pytest.mark.parametrize(
    "result", [(PIXELS, 7), (PIXELS, np.int32(7)), (PIXELS, np.array(7, np.int32)), [PIXELS, 7]]
)
def test_right_results_in_other_clothes(result: object) -> None:
    results = epoch(ensemble("", 1), images(8), functions={"decode": lambda record: result})
    assert results[0]["labels"].tolist() == [7] * 8


class Elsewhere:
    """Like a tensor in a device's memory: it has a shape, but its contents are not accessible."""

    shape, dtype = (SIDE, SIDE), np.dtype(np.uint8)

    def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
        raise TypeError("not on this device")


def test_results_that_cannot_be_had_belong_to_their_record() -> None:
    diagnostic = failing(lambda record: (Elsewhere(), 1)).diagnostics[0]
    assert diagnostic.code == "CP0906" and diagnostic.span is not None
    assert "raised TypeError: not on this device" in diagnostic.message
    program = ensemble("", 1, hints="{ on_error = skip }")
    results = epoch(program, images(8), functions={"decode": lambda record: (Elsewhere(), 1)})
    assert int(results[0]["n"]) == 0


@pytest.mark.parametrize("length", [-3, 2.5, OSError("the disk is gone")])
def test_sources_without_a_length(length: object) -> None:
    class Endless(Counting):
        def __len__(self) -> Any:
            if isinstance(length, Exception):
                raise length
            return length

    with pytest.raises(CommplanError) as error:
        epoch(ensemble("", 1), Endless(images(8)))
    assert code(error) == "CP0902" and "source `images` has no length" in str(error.value)


def test_functions_that_raise() -> None:
    diagnostic = failing(lambda record: record.nothing).diagnostics[0]
    assert diagnostic.code == "CP0906"
    assert "AttributeError" in diagnostic.message
    assert "test_failing_records.py" in diagnostic.notes[0].text


def test_sources_that_raise_or_hold_other_records() -> None:
    class Raises(Counting):
        def __getitem__(self, index: int) -> bytes:
            raise OSError("the disk is gone")

    with pytest.raises(CommplanError) as error:
        epoch(ensemble("", 1), Raises(images(8)))
    assert code(error) == "CP0904" and "the disk is gone" in str(error.value)
    with pytest.raises(CommplanError) as error:
        epoch(ensemble("", 1), [np.zeros(3)] * 8)
    assert code(error) == "CP0905"


def test_what_is_no_exception_reaches_the_caller_as_it_is() -> None:
    def leaves(record: bytes) -> object:
        raise SystemExit(3)

    with pytest.raises(SystemExit), batches(ensemble("", 1), images(8), functions={"decode": leaves}) as feed:
        next(feed)


def test_skipped_records_leave_the_batch_and_the_count() -> None:
    source = images(24)
    order = Order(24, 8, 17)
    bad = {int(order.records(0, 1)[3]), int(order.records(0, 1)[4]), int(order.records(0, 2)[0])}

    def broken(record: bytes) -> tuple[np.ndarray[Any, Any], int]:
        if record[0] in bad:
            raise ValueError("truncated")
        return decode(record)

    program = ensemble("", 2, axes="axis data = 2", split="split data", hints="{ on_error = skip }")
    with batches(program, source, functions={"decode": broken}) as feed:
        results = [(by_name(program, batch), batch.records["raw.0"]) for batch in feed]
        skipped = {line.what: line.skipped for line in feed.summary().lines}
    assert skipped == {"load images": 0, "map decode": 3, "map flip": 0}
    assert [item["n"].tolist() for item, _ in results] == [[4, 4], [3, 3], [3, 4]]
    labels: list[int] = []
    for item, records in results:
        for shard, count in enumerate(item["n"].tolist()):
            labels += item["labels"][shard * 4 : shard * 4 + count].tolist()
        assert np.array_equal(item["labels"], records), "labels are the record numbers here"
        assert np.array_equal(item["pixels"][:, 0, 0], records)
        assert not bad & set(item["labels"].tolist()), "slots of skipped records repeat good ones"
    assert sorted(labels) == sorted(set(range(24)) - bad)


def test_a_batch_of_nothing_but_skipped_records_is_zero() -> None:
    def broken(record: bytes) -> object:
        raise ValueError

    program = ensemble("", 1, hints="{ on_error = skip }")
    results = epoch(program, images(8), functions={"decode": broken})
    assert int(results[0]["n"]) == 0
    assert not results[0]["pixels"].any() and not results[0]["batch"].any()


def test_skip_where_members_differ_is_refused() -> None:
    program = schedule(
        """raw = load images batch 8 visit exactly_once seed 1
        pixels, labels = map decode(raw)
        batch = map flip(pixels) per member { on_error = skip }
        output batch""",
        "ensemble member = 2",
    )
    with pytest.raises(CommplanError) as error:
        batches(program, images(8))
    assert code(error) == "CP0914"
