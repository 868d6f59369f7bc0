"""The order of records: permutations, contracts, and nothing that depends on ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commplan.input.order import Order, folded, generator, permuted

seeds = st.integers(0, 2**63)
TAILS = ("pad", "short", "drop")
VISITS = ("exactly_once", "at_least_once", "at_most_once")


@settings(max_examples=60)
@given(
    length=st.integers(1, 5000),
    seed=seeds,
    epoch=st.integers(0, 10**6),
    member=st.none() | st.integers(0, 50),
)
def test_every_epoch_is_a_permutation(length: int, seed: int, epoch: int, member: int | None) -> None:
    indices = permuted(np.arange(length), length, seed, epoch, member)
    assert np.array_equal(np.sort(indices), np.arange(length))


@settings(max_examples=40)
@given(length=st.integers(1, 10**12), seed=seeds, data=st.data())
def test_any_position_of_a_huge_source_costs_no_memory(length: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    indices = permuted(positions, length, seed, 3)
    assert ((indices >= 0) & (indices < length)).all()
    one_by_one = [int(permuted(np.array([p]), length, seed, 3)[0]) for p in positions]
    assert indices.tolist() == one_by_one
    assert len(set(indices.tolist())) == len(set(positions.tolist()))


def test_small_permutations_are_all_reached_alike() -> None:
    """A chi-square of the 24 orders of 4 records over 4800 seeds: expected 23, standard deviation 6.8."""
    orders = [tuple(permuted(np.arange(4), 4, seed, 0).tolist()) for seed in range(4800)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 23 + 5 * 6.8


def test_records_are_spread_evenly_over_positions() -> None:
    """Mean and lag-one correlation of a permutation of 4096 are those of a random one."""
    order = permuted(np.arange(4096), 4096, 99, 0).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / 64
    assert abs(order[:2048].mean() - 2047.5) < 5 * 4096 / np.sqrt(12 * 4096)


def test_epochs_seeds_and_members_differ() -> None:
    base = permuted(np.arange(100), 100, 1, 0)
    permutations = [permuted(np.arange(100), 100, *args) for args in ((2, 0), (1, 1), (1, 0, 0), (1, 0, 1))]
    assert all(not np.array_equal(base, other) for other in permutations)
    assert not np.array_equal(permutations[2], permutations[3])


def test_the_order_is_what_it_was() -> None:
    """Saved states mean nothing if a release changes the order: these values are part of the contract."""
    assert permuted(np.arange(10), 10, 17, 0).tolist() == PINNED_TEN
    assert permuted(np.array([0, 10**11]), 10**12, 5, 2, 3).tolist() == PINNED_HUGE
    assert generator(17, 1, 2, 3, 4, 5).integers(0, 1000, 4).tolist() == PINNED_RANDOM


PINNED_TEN = [2, 4, 7, 1, 0, 6, 9, 5, 8, 3]
PINNED_HUGE = [780047225718, 317714650422]
PINNED_RANDOM = [862, 682, 544, 415]


@settings(max_examples=80)
@given(
    length=st.integers(1, 300),
    batch=st.integers(1, 64),
    visit=st.sampled_from(VISITS),
    tail=st.sampled_from(TAILS),
    epoch=st.integers(0, 3),
)
def test_the_contract_of_each_visit_and_tail(
    length: int, batch: int, visit: str, tail: str, epoch: int
) -> None:
    order = Order(length, batch, 7, visit, tail)  # pyright: ignore[reportArgumentType]
    slots = [order.records(epoch, step) for step in range(order.steps)]
    counted = [r for step, s in enumerate(slots) for r in s[order.counts(step)].tolist()]
    assert all(len(s) == order.rows(step) for step, s in enumerate(slots))
    if tail != "short" or visit == "at_least_once":
        assert all(len(s) == batch for s in slots)
    if visit != "at_least_once":
        assert len(counted) == len(set(counted)), "no record counts twice"
        assert len(counted) == (length // batch * batch if tail == "drop" else length)
    elif tail != "drop":
        assert set(counted) == set(range(length)), "every record counts"
        assert len(counted) == sum(map(len, slots))
    if tail == "short" and visit != "at_least_once":
        assert sum(map(len, slots)) == length


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shards_are_rows_of_the_global_batch(ranks: int) -> None:
    order = Order(100, 16, 3)
    whole = np.concatenate([order.records(0, step) for step in range(order.steps)])
    cut = [np.split(order.records(0, step), ranks) for step in range(order.steps)]
    assert np.array_equal(np.concatenate([np.concatenate(step) for step in cut]), whole)


def test_windows_do_not_show() -> None:
    """Batches that straddle the internal window hold the same records as the plain permutation."""
    order = Order(5000, 96, 11)
    whole = permuted(np.arange(5000), 5000, 11, 4, 2)
    indices = np.concatenate([order.records(4, step, 2) for step in range(order.steps)])
    assert np.array_equal(indices[:5000], whole)
    assert np.array_equal(indices[5000:], whole[: len(indices) - 5000])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=6, max_size=6), st.integers(0, 5))
def test_random_streams_differ_in_every_argument(numbers: list[int], which: int) -> None:
    other = list(numbers)
    other[which] += 1
    values = generator(*numbers).integers(0, 2**62, 4)
    assert np.array_equal(values, generator(*numbers).integers(0, 2**62, 4))
    assert not np.array_equal(values, generator(*other).integers(0, 2**62, 4))


def test_folding_depends_on_order_and_count() -> None:
    assert len({folded(1, 2), folded(2, 1), folded(1, 2, 0), folded(1), folded(0, 1, 2)}) == 5
