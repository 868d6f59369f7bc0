"""Members with independent clocks: closed forms against a walk through instants, and single orders."""

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


def instants(plan_rates: Rates) -> range:
    """Every time, in records, of two rounds: nothing begins or ends between whole numbers."""
    return range(2 * plan_rates.round)


def given_to(plan_rates: Rates, member: int, now: int) -> int:
    batch = plan_rates.batches[member]
    return (now // batch + 1) * batch


def passed_by(plan_rates: Rates, member: int, now: int, pending: int = 1) -> int:
    batch = plan_rates.batches[member]
    return (now // batch + 1 - pending) * batch


def test_the_plan_of_the_manual() -> None:
    plan_rates = rates([32, 32, 64])
    assert (plan_rates.unit, plan_rates.round, plan_rates.units, plan_rates.round_steps) == (
        32,
        64,
        (1, 1, 2),
        (2, 2, 1),
    )
    assert (plan_rates.lag, plan_rates.bound) == (32, 192)
    assert round_text(plan_rates) == "a round of 64 records (2 steps of batch 32, 1 of 64)"
    text = buffer_text(plan_rates, 12288)
    assert "at most 192 records are kept (2.25 MiB), in units of 32, 2 batches ahead" in text
    assert "are 32 records apart at most, and none gets more than 192 ahead" in buffer_text(plan_rates)


def test_one_batch_for_all_is_a_round_of_one_step() -> None:
    plan_rates = rates([8, 8])
    assert (plan_rates.unit, plan_rates.round, plan_rates.lag, plan_rates.bound) == (8, 8, 0, 24)
    assert round_text(plan_rates) == "a round of 8 records (1 step of batch 8)"


def test_batches_without_a_common_divisor_go_record_by_record() -> None:
    plan_rates = rates([2, 3])
    assert (plan_rates.unit, plan_rates.round, plan_rates.round_steps, plan_rates.lag) == (1, 6, (3, 2), 2)
    assert plan_rates.buffered() == 4


@settings(max_examples=200)
@given(batches=batches, ahead=st.integers(0, 3), pending=st.integers(1, 3))
def test_what_is_kept_is_the_most_of_all_instants(batches: tuple[int, ...], ahead: int, pending: int) -> None:
    plan_rates = rates(batches)
    members = range(len(batches))
    # The first batches hold nothing back yet: instants are looked at once every member has held as many.
    most = max(
        given_to(plan_rates, i, now) + ahead * batches[i] - passed_by(plan_rates, j, now, pending)
        for now in (now + pending * plan_rates.round for now in instants(plan_rates))
        for i in members
        for j in members
    )
    assert plan_rates.buffered(ahead, pending) == most
    assert plan_rates.bound >= max(plan_rates.buffered(plan_rates.prefetch), 2 * max(batches))
    assert plan_rates.bound % plan_rates.unit == 0


@settings(max_examples=200)
@given(batches=batches)
def test_the_lag_is_the_most_of_all_instants(batches: tuple[int, ...]) -> None:
    plan_rates = rates(batches)
    given_now = [[given_to(plan_rates, m, now) for m in range(len(batches))] for now in instants(plan_rates)]
    assert plan_rates.lag == max(max(now) - min(now) for now in given_now)


@settings(max_examples=200)
@given(batches=batches)
def test_after_a_round_and_not_before_all_have_taken_the_same(batches: tuple[int, ...]) -> None:
    plan_rates = rates(batches)
    agree = [now for now in range(1, plan_rates.round + 1) if all(now % batch == 0 for batch in batches)]
    assert agree == [plan_rates.round]
    assert [steps * batch for steps, batch in zip(plan_rates.round_steps, batches, strict=True)] == [
        plan_rates.round
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
    plan_rates = rates(batches)
    stream = Order(length, plan_rates.unit, seed, visit, tail)  # type: ignore[arg-type]
    units = plan_rates.epoch(length, visit, tail)  # type: ignore[arg-type]
    used = 0
    for member in range(len(batches)):
        member_order = plan_rates.order_of(member, length, seed, visit, tail)  # type: ignore[arg-type]
        for step in range(member_order.steps):
            low, high = plan_rates.units_of(member, step)
            visited = [stream.records(3, unit) for unit in range(low, min(high, units))]
            counted = sum(stream.counted(unit) for unit in range(low, min(high, units)))
            assert np.concatenate(visited).tolist() == member_order.records(3, step).tolist()
            assert counted == member_order.counted(step)
            used = max(used, low + len(visited))
    assert used == units


@settings(max_examples=100)
@given(batches=batches, seed=st.integers(0, 2**32), pending=st.integers(0, 1))
def test_nothing_locks_within_the_bound(batches: tuple[int, ...], seed: int, pending: int) -> None:
    """Members step in any order, with or without a view of the last batch during the next call: the last one
    can always go on, and no lead exceeds its bound."""
    plan_rates, rng = rates(batches, prefetch=1), np.random.default_rng(seed)
    given_now = [0] * len(batches)
    for _ in range(200):
        low = min(max(0, now - pending * batch) for now, batch in zip(given_now, batches, strict=True))
        able = [m for m, now in enumerate(given_now) if now + batches[m] <= low + plan_rates.bound]
        behind_all = [now - pending * batch for now, batch in zip(given_now, batches, strict=True)]
        assert behind_all.index(min(behind_all)) in able
        member = int(rng.choice(able))
        given_now[member] += batches[member]
        for fast, slow in itertools.permutations(range(len(batches)), 2):
            if pending and given_now[slow]:
                assert given_now[fast] - given_now[slow] <= plan_rates.bound


@pytest.mark.parametrize(("sizes", "prefetch"), [([], 2), ([0, 4], 2), ([4], 0)])
def test_what_is_no_batch_is_refused(sizes: list[int], prefetch: int) -> None:
    with pytest.raises(ValueError, match="no rates"):
        rates(sizes, prefetch)


def test_a_thousand_members_cost_what_their_sizes_cost() -> None:
    plan_rates = rates([2**k * 3 for k in range(10)] * 100)
    assert plan_rates.lag == 3 * 2**9 - 3
    assert plan_rates.round == 3 * 2**9
    sizes = plan_rates.batches[:10]
    assert plan_rates.buffered(2) == max(3 * i + j - math.gcd(i, j) for i in sizes for j in sizes)
