"""Iterators over batches that begin the same epoch again: a warning, unless it is intended."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.embedding import bind, mesh_of

PLAN = """plan p
axis data = 1
source rows : i64
fn jitter(i64) -> i64 on host random
each step {{
    x = load rows batch 4 visit exactly_once seed 5 {hints}
    output x
}}
phase evaluate {{
    x = load rows batch 4 visit exactly_once seed 5
    output x
}}
phase augmented {{
    raw = load rows batch 4 visit exactly_once seed 5
    x = map jitter(raw)
    output x
}}
"""


def bound(records: int = 12, hints: str = "") -> Any:
    text = PLAN.format(hints=hints)
    functions = {"jitter": lambda row, rng: row}
    return bind(text, mesh_of(data=1), sources={"rows": np.arange(records)}, functions=functions)


def warned(passes: Iterable[Any], count: int | None = None) -> list[Any]:
    """The numbers of the passes that warned. count: how many batches each takes, all if None."""
    numbers: list[int] = []
    for number, batches in enumerate(passes):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in itertools.islice(batches, count):
                pass
            batches.close()
        for each in caught:
            assert "warning[CP0949]" in str(each.message) and Path(each.filename) == Path(__file__)
            numbers.append(number)
    return numbers


def repeated(run: Any, count: int = 4, phase: str = "step", **options: Any) -> Iterable[Any]:
    return (run.batches(phase, **options) for _ in range(count))


@pytest.mark.parametrize("records", [12, 4])  # an epoch of one batch, too
def test_the_second_epoch_that_is_the_first_again_is_a_warning_once(records: int) -> None:
    assert warned(repeated(bound(records))) == [1]


def test_batches_ahead_of_the_step_are_no_difference() -> None:
    assert warned(repeated(bound(hints="{ device_prefetch = 2 }"))) == [1]


def test_a_pass_that_stops_early_counts_the_third_time() -> None:
    assert warned(repeated(bound()), 2) == [2]


def test_another_training_begins_at_the_same_place() -> None:
    run = bound()
    for _ in range(2):
        run.init()
        assert warned(repeated(run, 1)) == []
    assert warned(repeated(run, 1)) == [0]


def test_a_look_at_the_first_batch_is_no_pass() -> None:
    run = bound()
    assert warned(repeated(run), 1) == []
    assert warned(repeated(run, 1)) == []
    assert warned(repeated(run), 1) == [], "after an epoch as well"


def test_one_iterator_for_all_epochs_is_right() -> None:
    batches = bound().batches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        orders = [tuple(int(x) for item in batches for x in item["x"]) for _ in range(3)]
    assert len(set(orders)) == 3


def test_an_evaluation_may_take_the_same_records_again_and_what_draws_may_not() -> None:
    run = bound()
    assert warned(repeated(run, phase="evaluate")) == []
    assert warned(repeated(run, phase="augmented")) == [1]


def test_a_place_that_is_named_is_meant() -> None:
    run = bound()
    assert warned(repeated(run, state=run.batches().state())) == []


def test_members_by_their_own_clocks_are_told_apart() -> None:
    text = """plan p
ensemble member = 2
source rows : i64
each step {
    x = load rows batch [2, 4] over member visit exactly_once seed 5
    output x
}
"""
    mesh = jax.make_mesh((2,), ("member",), devices=jax.devices()[:2])
    run = bind(text, mesh, sources={"rows": np.arange(8)})
    assert warned(run.batches(member=member) for member in (0, 1, 1, 0, 0)) == [2, 3]
