"""The cost model of sharing: against a row-by-row count, in its limits, and its choices."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.input.costs import (
    TIME_TOLERANCE,
    Predicted,
    RecordWork,
    Setting,
    SharingCut,
    best,
    candidates,
    costs_per_design,
    limit,
    predict,
)
from commplan.input.measured_costs import ConsumerCost, FnCost, InputCosts, SourceCost, merged
from commplan.input.work_partition import HostTransfer, division
from commplan.ir.remark import Design

DECODE = RecordWork(1.75e-3, 0.1e-3, 0.0, 2)
AUGMENT = RecordWork(2e-4, 2e-4, 0.0, 1)
PIXELS = SharingCut("after `decode`", DECODE, RecordWork(), 150_528)
OWN = SharingCut("after `decode`", DECODE, AUGMENT, 150_528)
times = st.floats(0.0, 1e-2)
works = st.tuples(times, st.floats(0, 1), times).map(lambda of: RecordWork(of[0], of[0] * of[1], of[2], 1))
cuts = st.builds(SharingCut, st.just("somewhere"), works, works, st.integers(1, 10**6))
host_lists = st.lists(st.integers(0, 3), min_size=1, max_size=7).map(tuple)
designs = st.sampled_from(get_args(Design))


def on_hosts(hosts: tuple[int, ...], rows: int = 64, **more: float) -> Setting:
    return Setting(rows, (hosts,), 2, **more)  # pyright: ignore[reportArgumentType]


def one(setting: Setting, cut: SharingCut, design: Design, readers: int | None = None) -> Predicted:
    return predict(setting, cut, design, readers, None, limit(setting, [cut]))


@given(host_lists, cuts, designs, st.integers(1, 7), st.integers(1, 70), times)
def test_cpu_and_bytes_are_those_of_a_count_row_by_row(
    hosts: tuple[int, ...], cut: SharingCut, design: Design, readers: int, rows: int, crossing: float
) -> None:
    setting = on_hosts(hosts, rows, crossing=crossing, record=1e-6, batch=1e-4)
    prediction = one(setting, cut, design, min(readers, len(hosts)))
    counts = Counter[int]()
    arrived = 0
    shared = division(design, hosts, min(readers, len(hosts)))
    for row in range(rows):
        if design == "duplicate":
            counts.update(range(len(hosts)))
            continue
        part = next(p for p in range(shared.parts) if row in range(*shared.part(rows, p)))
        counts[shared.readers[part]] += 1
        arrived += cut.nbytes * (len(set(hosts)) - 1)  # every other host gets it once
    cpu = sum(counts.values()) * (cut.shared.cpu + cut.shared.steps * 1e-6)
    cpu += len(hosts) * (rows * (cut.per_member.cpu + cut.per_member.steps * 1e-6) + 1e-4)
    cpu += 2 * crossing * arrived
    assert prediction.cpu == pytest.approx(cpu / rows / len(hosts))
    assert prediction.nbytes == arrived


@given(cuts, st.lists(st.integers(1, 12), min_size=2, max_size=6))
def test_more_members_on_a_host_never_cost_each_more(cut: SharingCut, counts: list[int]) -> None:
    costs = [one(on_hosts((0,) * n, 64, batch=1e-4), cut, "all_shared").cpu for n in sorted(counts)]
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(costs))


@given(cuts, st.integers(1, 12))
def test_without_sharing_members_do_not_matter(cut: SharingCut, members: int) -> None:
    alone, many = (one(on_hosts((0,) * n), cut, "duplicate").cpu for n in (1, members))
    assert many == pytest.approx(alone)


@given(cuts, st.integers(2, 8), st.floats(0, 1e-8))
def test_more_hosts_never_cost_less(cut: SharingCut, members: int, crossing: float) -> None:
    spread = [tuple(place * hosts // members for place in range(members)) for hosts in range(1, members + 1)]
    costs = [one(on_hosts(where, crossing=crossing), cut, "all_shared").cpu for where in spread]
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(costs))


@given(host_lists, st.lists(cuts, min_size=1, max_size=3), st.floats(0, 1e-8), times)
def test_nothing_is_below_the_limit(
    hosts: tuple[int, ...], listed: list[SharingCut], crossing: float, batch: float
) -> None:
    setting = on_hosts(hosts, crossing=crossing, batch=batch)
    for candidate in candidates(setting, listed):
        assert candidate.cpu >= candidate.limit * (1 - 1e-9)
        assert candidate.distance >= 1 - 1e-9 or not candidate.limit


def test_the_ratio_is_the_one_of_the_formula() -> None:
    members, hosts, crossing = 12, 4, 2e-10
    setting = on_hosts(tuple(place // 3 for place in range(members)), 48, crossing=crossing)
    ratio = one(setting, OWN, "duplicate").cpu / one(setting, OWN, "all_shared").cpu
    p, c = DECODE.cpu, AUGMENT.cpu
    t = 2 * crossing * OWN.nbytes * (hosts - 1) / members
    assert ratio == pytest.approx((p + c) / (p / members + t + c))


def test_all_shared_on_one_host_is_at_the_limit() -> None:
    assert one(on_hosts((0,) * 12), PIXELS, "all_shared").distance == pytest.approx(1)
    assert one(on_hosts((0,) * 12), PIXELS, "duplicate").distance == pytest.approx(12)


def test_one_member_shares_with_nobody() -> None:
    predictions = candidates(on_hosts((0,)), [PIXELS])
    assert [each.design for each in predictions] == ["duplicate"]
    assert best(predictions).design == "duplicate"


@given(host_lists, st.lists(cuts, min_size=1, max_size=3), st.floats(0, 0.5), st.floats(0, 0.5))
def test_what_is_taken_follows_the_rule(
    hosts: tuple[int, ...], listed: list[SharingCut], step: float, step_cpu: float
) -> None:
    setting = on_hosts(hosts, step=step, step_cpu=step_cpu, crossing=1e-10)
    predictions = candidates(setting, listed)
    for prefer in ("time", "cpu"):
        chosen = best(predictions, prefer)
        shortest = min(each.wall for each in predictions)
        assert chosen.wall <= shortest * (1 + TIME_TOLERANCE)
        alone = next(each for each in predictions if each.design == "duplicate")
        if prefer == "time" and alone.wall <= shortest * (1 + TIME_TOLERANCE):
            assert chosen is alone
            continue
        near = [each for each in predictions if each.wall <= shortest * (1 + TIME_TOLERANCE)]
        assert chosen.cpu <= min(each.cpu for each in near) * 1.0101


def test_a_step_that_computes_long_enough_is_left_alone() -> None:
    setting = on_hosts(
        (0,) * 4, 64, threads=2, step=1.0
    )  # four times 64 records of 1.75 ms on two cores: 0.22 s
    predictions = candidates(setting, [PIXELS])
    assert best(predictions).design == "duplicate"
    assert best(predictions).waits_for == "the consumer"
    assert best(predictions, "cpu").design == "all_shared"
    assert best(candidates(on_hosts((0,) * 4, threads=2, step=0.1), [PIXELS])).design == "all_shared"


def test_consumers_take_cpu_from_the_readers() -> None:
    free, busy = (on_hosts((0,) * 4, threads=2, step=0.2, step_cpu=cpu) for cpu in (0.0, 0.09))
    assert one(free, PIXELS, "duplicate").wall == pytest.approx(4 * 64 * 1.75e-3 / 2)
    prediction = one(busy, PIXELS, "duplicate")
    assert prediction.wall == pytest.approx((4 * 64 * 1.75e-3 + 4 * 0.09) / 2)
    assert prediction.waits_for == "the CPUs of a host"


def test_the_lock_of_the_interpreter_is_serial() -> None:
    bound = SharingCut("after `decode`", RecordWork(1e-3, 1e-3), RecordWork(), 100)
    free = SharingCut("after `decode`", RecordWork(1e-3, 0.0), RecordWork(), 100)
    setting = Setting(64, ((0, 0),), 8, threads=8)
    assert one(setting, bound, "single_broadcast", 1).wall == pytest.approx(0.064)
    assert one(setting, bound, "single_broadcast", 1).waits_for == "one process"
    assert one(setting, bound, "all_shared").wall == pytest.approx(0.032)
    assert one(setting, free, "single_broadcast", 1).wall == pytest.approx(0.008)
    apart = dataclasses.replace(setting, processes=True)
    assert one(apart, bound, "single_broadcast", 1).wall == pytest.approx(0.008)


def test_a_slow_disk_counts_in_time_and_not_in_cpu() -> None:
    slow = SharingCut("after reading", RecordWork(0.0, 0.0, 1e-3), RecordWork(), 100)
    prediction = one(Setting(64, ((0, 0),), 2, threads=2), slow, "duplicate")
    assert prediction.cpu == 0
    assert prediction.wall == pytest.approx(0.032)


def test_moves_of_jax_are_a_part_of_the_step() -> None:
    def links(leaders: Sequence[int], move: HostTransfer, nbytes: float) -> float:
        return nbytes / 1e8

    for by_caller, expected in ((False, 0.2), (True, 0.2 + 32 * 2 * PIXELS.nbytes / 1e8)):
        setting = Setting(64, ((0, 1),), 64, threads=64, step=0.2, by_caller=by_caller)
        prediction = predict(setting, PIXELS, "all_shared", None, links, 0.0)
        assert prediction.wall == pytest.approx(expected)


@pytest.mark.parametrize(
    ("design", "readers", "whole"),
    [
        ("all_shared", None, 1.0),
        ("single_broadcast", 1, 1.0),
        ("single_broadcast", 2, 2.0),
        ("multi_broadcast", 2, 1.0),
    ],
)
def test_every_move_is_asked_for(design: Design, readers: int | None, whole: float) -> None:
    queries: list[tuple[tuple[int, ...], str, float]] = []

    def links(leaders: Sequence[int], move: HostTransfer, nbytes: float) -> float:
        queries.append((tuple(leaders), move.kind, nbytes))
        return 0.0

    setting = Setting(64, ((0, 1, 2, 3),), 2)
    predict(setting, PIXELS, design, readers, links, 0.0)
    assert sum(nbytes for _, _, nbytes in queries) == pytest.approx(whole * 64 * PIXELS.nbytes)
    if design == "multi_broadcast":
        assert [leaders for leaders, _, _ in queries] == [(0, 1, 2, 3), (1, 2, 3, 0)]


def test_slots_are_one_set_for_a_host_or_one_for_each_member() -> None:
    setting = on_hosts((0, 0, 0, 1))
    assert one(setting, PIXELS, "all_shared").memory == 3 * 64 * PIXELS.nbytes
    assert one(setting, PIXELS, "duplicate").memory == 3 * 3 * 64 * PIXELS.nbytes


def test_groups_on_one_host_share_its_cores() -> None:
    single, double = (Setting(64, ((0, 0),) * groups, 2, threads=2) for groups in (1, 2))
    assert one(double, PIXELS, "all_shared").wall == pytest.approx(2 * one(single, PIXELS, "all_shared").wall)
    assert one(double, PIXELS, "all_shared").cpu == pytest.approx(one(single, PIXELS, "all_shared").cpu)


def test_the_table_has_every_design_and_the_cuts_of_the_one_taken() -> None:
    early = SharingCut("after `read`", RecordWork(1e-5), RecordWork(1.74e-3), 1000)
    predictions = candidates(on_hosts((0,) * 4), [PIXELS, early])
    chosen = best(predictions)
    shown = costs_per_design(predictions, chosen)
    assert chosen in shown
    assert {each.design for each in shown} == set(get_args(Design))
    assert [each.cut for each in shown if each.design == chosen.design] == [PIXELS, early]


def test_large_ensembles_try_fewer_numbers_of_readers() -> None:
    predictions = candidates(on_hosts(tuple(place // 4 for place in range(256))), [PIXELS])
    readers = {each.readers for each in predictions if each.design == "multi_broadcast"}
    assert {1, 64, 256} <= readers
    assert len(readers) < 12


COSTS = InputCosts("2026-11-21", 2, 1e-10, host="n0", source=(SourceCost("images", 1e-5),))


def test_new_measurements_replace_old_ones_of_the_same_name() -> None:
    old = InputCosts(
        "2026-01-01", 2, 2e-10, wire=1e-9, host="n0",
        source=(SourceCost("images", 5.0), SourceCost("text", 3.0)),
        fn=(FnCost("decode", 1.0),), consumer=(ConsumerCost("a", "step", 1.0),),
    )  # fmt: skip
    costs = merged(old, COSTS)
    assert [(source.name, source.cpu) for source in costs.source] == [("images", 1e-5), ("text", 3.0)]
    assert (costs.fn, costs.consumer, costs.wire, costs.copy) == (old.fn, old.consumer, 1e-9, 1e-10)
    assert merged(None, COSTS) == COSTS


def test_measurements_of_another_host_are_not_mixed_in() -> None:
    other = InputCosts("2026-01-01", 64, 2e-10, host="n1", source=(SourceCost("text", 3.0),))
    assert merged(other, COSTS) == COSTS


def test_a_byte_on_a_link_costs_copies_where_it_was_not_measured() -> None:
    assert COSTS.crossing == pytest.approx(3e-10)
    assert InputCosts("2026-11-21", 2, 1e-10, wire=7e-10).crossing == 7e-10
