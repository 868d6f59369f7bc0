"""Members by their own clocks: closed forms against a walk through instants, and single orders."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commplan.input.order import Order
from commplan.input.rates import Rates, buffer_text, rates, round_text

batches = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)


def instants(found: Rates) -> range:
    """Every time, in records, of two rounds: nothing begins or ends between whole numbers."""
    return range(2 * found.round)


def given_to(found: Rates, member: int, now: int) -> int:
    batch = found.batches[member]
    return (now // batch + 1) * batch


def passed_by(found: Rates, member: int, now: int, held: int = 1) -> int:
    batch = found.batches[member]
    return (now // batch + 1 - held) * batch


def test_the_plan_of_the_manual() -> None:
    found = rates([32, 32, 64])
    assert (found.unit, found.round, found.units, found.round_steps) == (32, 64, (1, 1, 2), (2, 2, 1))
    assert (found.lag, found.bound) == (32, 192)
    assert round_text(found) == "a round of 64 records (2 steps of batch 32, 1 of 64)"
    kept = buffer_text(found, 12288)
    assert "at most 192 records are kept (2.25 MiB), in units of 32, 2 batches ahead" in kept
    assert "are 32 records apart at most, and none gets more than 192 ahead" in buffer_text(found)


def test_one_batch_for_all_is_a_round_of_one_step() -> None:
    found = rates([8, 8])
    assert (found.unit, found.round, found.lag, found.bound) == (8, 8, 0, 24)
    assert round_text(found) == "a round of 8 records (1 step of batch 8)"


def test_batches_without_a_common_divisor_go_record_by_record() -> None:
    found = rates([2, 3])
    assert (found.unit, found.round, found.round_steps, found.lag) == (1, 6, (3, 2), 2)
    assert found.buffered() == 4


@settings(max_examples=200)
@given(batches=batches, ahead=st.integers(0, 3), held=st.integers(1, 3))
def test_what_is_kept_is_the_most_of_all_instants(batches: tuple[int, ...], ahead: int, held: int) -> None:
    found = rates(batches)
    members = range(len(batches))
    # The first batches hold nothing back yet: instants are looked at once every member has held as many.
    most = max(
        given_to(found, i, now) + ahead * batches[i] - passed_by(found, j, now, held)
        for now in (now + held * found.round for now in instants(found))
        for i in members
        for j in members
    )
    assert found.buffered(ahead, held) == most
    assert found.bound >= max(found.buffered(found.prefetch), 2 * max(batches))
    assert found.bound % found.unit == 0


@settings(max_examples=200)
@given(batches=batches)
def test_the_lag_is_the_most_of_all_instants(batches: tuple[int, ...]) -> None:
    found = rates(batches)
    given_now = [[given_to(found, m, now) for m in range(len(batches))] for now in instants(found)]
    assert found.lag == max(max(now) - min(now) for now in given_now)


@settings(max_examples=200)
@given(batches=batches)
def test_after_a_round_and_not_before_all_have_taken_the_same(batches: tuple[int, ...]) -> None:
    found = rates(batches)
    agree = [now for now in range(1, found.round + 1) if all(now % batch == 0 for batch in batches)]
    assert agree == [found.round]
    assert [steps * batch for steps, batch in zip(found.round_steps, batches, strict=True)] == [
        found.round
    ] * len(batches)


@settings(max_examples=300)
@given(
    batches=batches,
    length=st.integers(1, 70),
    visit=st.sampled_from(["exactly_once", "at_least_once", "at_most_once"]),
    tail=st.sampled_from(["pad", "short", "drop"]),
    seed=st.integers(0, 2**40),
)
def test_units_put_together_are_what_each_member_visits(
    batches: tuple[int, ...], length: int, visit: str, tail: str, seed: int
) -> None:
    """Record by record, in every step of every member, whatever the tail; no epoch has a unit too few."""
    found = rates(batches)
    stream = Order(length, found.unit, seed, visit, tail)  # type: ignore[arg-type]
    units = found.epoch(length, visit, tail)  # type: ignore[arg-type]
    used = 0
    for member in range(len(batches)):
        own = found.order_of(member, length, seed, visit, tail)  # type: ignore[arg-type]
        for step in range(own.steps):
            low, high = found.units_of(member, step)
            taken = [stream.records(3, unit) for unit in range(low, min(high, units))]
            counted = sum(stream.counted(unit) for unit in range(low, min(high, units)))
            assert np.concatenate(taken).tolist() == own.records(3, step).tolist()
            assert counted == own.counted(step)
            used = max(used, low + len(taken))
    assert used == units


@settings(max_examples=100)
@given(batches=batches, seed=st.integers(0, 2**32), held=st.integers(0, 1))
def test_nothing_locks_within_the_bound(batches: tuple[int, ...], seed: int, held: int) -> None:
    """Members step in any order, with or without a view of the last batch during the next call: the last one
    can always go on, and no lead exceeds its bound."""
    found, rng = rates(batches, prefetch=1), np.random.default_rng(seed)
    given_now = [0] * len(batches)
    for _ in range(200):
        low = min(max(0, now - held * batch) for now, batch in zip(given_now, batches, strict=True))
        able = [m for m, now in enumerate(given_now) if now + batches[m] <= low + found.bound]
        behind_all = [now - held * batch for now, batch in zip(given_now, batches, strict=True)]
        assert behind_all.index(min(behind_all)) in able
        member = int(rng.choice(able))
        given_now[member] += batches[member]
        for one, other in itertools.permutations(range(len(batches)), 2):
            if held and given_now[other]:
                assert given_now[one] - given_now[other] <= found.bound


@pytest.mark.parametrize(("sizes", "prefetch"), [([], 2), ([0, 4], 2), ([4], 0)])
def test_what_is_no_batch_is_refused(sizes: list[int], prefetch: int) -> None:
    with pytest.raises(ValueError, match="no rates"):
        rates(sizes, prefetch)


def test_a_thousand_members_cost_what_their_sizes_cost() -> None:
    found = rates([2**k * 3 for k in range(10)] * 100)
    assert found.lag == 3 * 2**9 - 3
    assert found.round == 3 * 2**9
    sizes = found.batches[:10]
    assert found.buffered(2) == max(3 * i + j - math.gcd(i, j) for i in sizes for j in sizes)
