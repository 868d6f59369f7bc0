"""Which rows of a batch are records, and which only fill it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch_feed import DATA4, batches, by_name, no_thread_is_left_behind
from input_plans import decode, ensemble, images, schedule

from commplan.input.order import Order
from commplan.ir.schedule import Schedule

pytestmark = pytest.mark.usefixtures(no_thread_is_left_behind.__name__)


def masks(program: Schedule, records: int, **more: Any) -> list[Any]:
    with batches(program, images(records), **more) as feed:
        return [batch.mask for batch in feed]


def test_rows_that_fill_the_last_batch_are_no_records() -> None:
    program = ensemble("", 2, axes=DATA4, split="split data")
    results = masks(program, 18)
    assert [int(mask.rows.sum()) for mask in results] == [8, 8, 2]
    assert (
        results[-1].rows.tolist() == [True, True] + [False] * 6
    )  # of the first shard, whose rows come first
    assert results[-1].placement.split == ("data",) and not results[-1].placement.per
    assert results[0] is results[1], "it is computed once"


def test_a_process_has_the_mask_of_its_own_rows() -> None:
    program = ensemble("", 2, axes=DATA4, split="split data")
    (*_, last) = masks(program, 19, local={"data": (1, 2)})
    assert last.rows.tolist() == [True, False, False, False]


@pytest.mark.parametrize("design", ["", "all_shared"])
def test_the_place_of_a_skipped_record_is_none(design: str) -> None:
    source = images(20)
    bad = int(Order(20, 8, 17).records(0, 1)[3])

    def broken(record: bytes) -> Any:
        if record == source[bad]:
            raise ValueError
        return decode(record)

    program = ensemble(design, 2, hints="{ on_error = skip }")
    with batches(program, source, functions={"decode": broken}) as feed:
        for batch in feed:
            assert batch.mask is not None
            assert batch.mask.rows.sum() == by_name(program, batch)["n"] == (8, 7, 4)[batch.step]
            assert (np.sort(batch.mask.rows)[::-1] == batch.mask.rows).all(), "records come first"


def test_members_with_orders_of_their_own_have_masks_of_their_own() -> None:
    program = schedule(
        "raw = load images batch 8 per member visit exactly_once seed 1\n"
        "pixels, labels = map decode(raw)\noutput labels",
        "ensemble member = 3",
    )
    (*_, last) = masks(program, 20)
    assert last.placement.per == ("member",)
    assert last.rows.tolist() == [[True] * 4 + [False] * 4] * 3


@pytest.mark.parametrize(
    ("second", "records", "rows"),
    [
        ("batch 8 visit at_least_once", 20, [8, 8, 4]),  # filled up with records that count: of both, none
        ("batch 4 visit at_most_once", 20, None),
    ],
)
def test_a_row_is_a_record_if_all_its_loads_say_so(second: str, records: int, rows: list[int] | None) -> None:
    program = schedule(
        f"a = load images batch 8 visit exactly_once seed 1\nb = load images {second} seed 2\n"
        "x, i = map decode(a)\ny, j = map decode(b)\noutput i, j"
    )
    results = masks(program, records)
    assert [mask and int(mask.rows.sum()) for mask in results] == (rows or [None] * 3)


@pytest.mark.parametrize("tail", ["short", "drop"])
def test_other_tails_fill_nothing(tail: str) -> None:
    visit = "at_most_once" if tail == "drop" else "exactly_once"
    program = schedule(
        f"raw = load images batch 8 visit {visit} seed 1 tail {tail}\n"
        "pixels, labels = map decode(raw)\noutput labels"
    )
    assert all(mask.rows.all() for mask in masks(program, 20))
