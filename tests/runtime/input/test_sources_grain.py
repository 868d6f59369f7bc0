"""Pipelines of Grain as sources: lazily, by the plan's order, and which of them cannot be any."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batch_feed import no_thread_is_left_behind
from feed_members import joined
from input_plans import schedule

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir.hints import Cache
from commplan.runtime.input.cache import record_cache
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.sources import pipelines
from commplan.runtime.input.sources.content_keys import source_digest

pytestmark = [
    pytest.mark.usefixtures(no_thread_is_left_behind.__name__),
    pytest.mark.filterwarnings("ignore"),  # Grain's own
    pytest.mark.skipif(importlib.util.find_spec("grain") is None, reason="Grain is not installed"),
]
BODY = "x = load numbers batch 8 visit exactly_once seed 1 { cores = 2 }\noutput x"
CALLS: list[int] = []


def maps() -> Any:
    return importlib.import_module("grain").MapDataset


def squared(number: int) -> Any:
    CALLS.append(number)
    return np.int64(number * number)


def cubed(number: int) -> Any:
    return np.int64(number**3)


def times(factor: int) -> Any:
    """A transform that has internal state."""
    base: Any = importlib.import_module("grain").transforms.Map

    class Times(base):
        def __init__(self) -> None:
            self.factor = factor

        def map(self, element: int) -> Any:
            return np.int64(element * self.factor)

    return Times()


def jittered(number: Any, rng: np.random.Generator) -> Any:
    return np.int64(number) + rng.integers(0, 1000)


def epochs(source: object, count: int = 1) -> list[list[int]]:
    """The records of each epoch, as the plan orders them."""
    program = schedule(BODY, declarations="source numbers : i64")
    with PhaseBatches(program, "step", {"numbers": source}, {}) as batches:
        return [
            [int(number) for batch in batches for number in batch.values["x.0"].tolist()]
            for _ in range(count)
        ]


def pipeline(step: Callable[..., Any] = squared, seed: int = 3, end: int = 40) -> Any:
    return maps().range(end).seed(seed).shuffle().map(step)


def test_a_pipeline_is_read_by_the_plan_s_order_and_when_it_is_asked_for() -> None:
    CALLS.clear()
    source = pipeline()
    assert CALLS == []
    orders = epochs(source, 2)
    assert [sorted(numbers) for numbers in orders] == [[n * n for n in range(40)]] * 2
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (lambda: maps().range(100).slice(slice(8, 24)), range(8, 24)),
        (lambda: maps().range(8).repeat(2), sorted([*range(8)] * 2)),
        (lambda: maps().source(np.arange(16, dtype=np.int64)), range(16)),
        (lambda: maps().range(8).map(lambda n: {"numbers": np.int64(n), "other": "x"}), range(8)),
        (lambda: commplan.column(maps().range(8).map(lambda n: (n, "x")), 0), range(8)),
    ],
)
def test_what_pipelines_are_made_of(source: Callable[[], object], expected: Any) -> None:
    assert sorted(epochs(source())[0]) == list(expected)


def test_what_is_random_in_a_pipeline_is_the_same_in_every_epoch() -> None:
    first, second = epochs(maps().range(40).seed(1).random_map(jittered), 2)
    assert sorted(first) == sorted(second) and first != second


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (lambda: pipeline().to_iter_dataset(), "CP0902", "before `.to_iter_dataset()`"),
        (lambda: pipeline().to_iter_dataset().batch(4), "CP0902", "without `.batch(..)`"),
        (lambda: pipeline().repeat(), "CP0902", "remove its `.repeat()`"),
        (lambda: maps().range(40).filter(lambda n: n % 2 == 0), "CP0905", "takes a record out"),
        (lambda: pipeline().batch(4), "CP0905", "i64"),
    ],
)
def test_pipelines_that_cannot_be_sources(source: Callable[[], object], code: str, words: str) -> None:
    with pytest.raises(CommplanError) as error:
        epochs(source())
    assert error.value.diagnostics[0].code == code and words in str(error.value)


def test_pipelines_that_do_the_same_have_equal_content() -> None:
    contents = [
        pipelines.content(each, source_digest)
        for each in (
            pipeline(), pipeline(), pipeline(cubed), pipeline(seed=4), pipeline(end=41),
            pipeline().slice(slice(0, 40, 2)), maps().range(40).map(squared),
        )
    ]  # fmt: skip
    contents += [pipelines.content(maps().range(40).map(times(factor)), source_digest) for factor in (2, 3)]
    assert contents[0] == contents[1] and contents[0] is not None
    assert all(contents.count(each) == 1 for each in contents[2:])
    assert pipelines.content(list(range(3)), source_digest) is None


def test_a_cache_tells_the_records_and_weights_of_pipelines_apart() -> None:
    def key(records: list[int], weights: list[float]) -> str:
        mixed = maps().mix([maps().source(records), maps().source([7, 8, 9])], weights).map(squared)
        return record_cache._source_key(Any, Any, mixed, Cache(1 << 20, "rows"))  # type: ignore[arg-type]

    keys = [key([1, 2, 3], [0.5, 0.5]), key([1, 2, 4], [0.5, 0.5]), key([1, 2, 3], [0.25, 0.75])]
    assert len(set(keys)) == 3
    assert keys[0] == key([1, 2, 3], [0.5, 0.5])


def test_members_of_a_feed_bring_the_same_pipeline(feed_name: str) -> None:
    with joined(feed_name, source=pipeline(cubed)) as feed:
        joined(feed_name, source=pipeline(cubed)).close()
        with pytest.raises(CommplanError) as error:
            joined(feed_name, source=pipeline(cubed, seed=4))
        assert error.value.diagnostics[0].code == "CP0922"
        assert "source `numbers`: 40 records, key" in str(error.value)
        assert sorted(int(label) for batch in feed for label in batch["labels"]) == [n**3 for n in range(40)]
