"""The visitation contract: correct arithmetic is proved, and violations are refused, with a case."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.byhand import compiled, ensemble_plan

import commplan
from commplan.cli import main
from commplan.input.order import Order
from commplan.input.rates import Rates, rates
from commplan.input.work_partition import Division, HostTransfer, division, failover
from commplan.ir.plan import Cache, Hints
from commplan.ir.remark import Design
from commplan.ir.schedule import Map
from commplan.verify import input_proof as proof
from commplan.verify import verify
from commplan.verify.input.visitation import (
    prove_deal,
    prove_division,
    prove_order,
    prove_parts,
    prove_rates,
    survivors,
)
from commplan.verify.input_proof import input_memory, prove_share, shares, visits

PLANS = Path(__file__).parents[2] / "examples" / "plans"
VISITS = ("exactly_once", "at_least_once", "at_most_once")
TAILS = ("pad", "short", "drop")


def promised(visit: str, times: int) -> bool:
    return {"exactly_once": times == 1, "at_least_once": times >= 1, "at_most_once": times <= 1}[visit]


def holds(order: Order) -> bool:
    """Whether an epoch visits the promised records, by counting."""
    counted: Counter[int] = Counter()
    for step in range(order.steps):
        counted.update(order.records(0, step)[: order.counted(step)].tolist())
    return all(promised(order.visit, counted[record]) for record in range(order.length))


@pytest.mark.parametrize(("visit", "tail"), list(itertools.product(VISITS, TAILS)))
def test_what_is_proved_for_all_lengths_holds_for_each_and_the_other_way_round(visit: Any, tail: Any) -> None:
    counted = all(holds(Order(n, b, 3, visit, tail)) for n in range(1, 40) for b in range(1, 14))
    assert (prove_order(visit, tail, 7) is None) == counted
    assert counted != (tail == "drop" and visit != "at_most_once")


def test_the_counter_example_is_one() -> None:
    wrong = prove_order("at_least_once", "drop", 64)
    assert wrong is not None
    assert wrong.code == "CP0760"
    assert wrong.message == "an epoch of 1 records in batches of 64 visits the record at position 0 never"
    assert not holds(Order(1, 64, 0, "at_least_once", "drop"))


# --- broken orders ---


@dataclass(frozen=True)
class StepSkipped(Order):
    @property
    def steps(self) -> int:
        return self.length // self.batch


@dataclass(frozen=True)
class StepTooMany(Order):
    @property
    def steps(self) -> int:
        return self.length // self.batch + 1


@dataclass(frozen=True)
class Overlapping(Order):
    def span(self, step: int) -> tuple[int, int]:
        low, high = super().span(step)
        return max(0, low - 1), high


@dataclass(frozen=True)
class PaddingCounted(Order):
    def counted(self, step: int) -> int:
        return self.batch


@dataclass(frozen=True)
class LastForgotten(Order):
    def counted(self, step: int) -> int:
        return super().counted(step) - 1


@dataclass(frozen=True)
class ShortWhenEven(Order):
    """Wrong only where batches fill the source exactly."""

    def counted(self, step: int) -> int:
        return super().counted(step) - (0 if self.length % self.batch else 1)


@dataclass(frozen=True)
class WrongFromAThousandOn(Order):
    """Wrong only for sources that are not checked one by one."""

    def span(self, step: int) -> tuple[int, int]:
        low, high = super().span(step)
        return (low, high) if low < 1000 else (low + 1, high + 1)


@pytest.mark.parametrize(
    "kind",
    [
        StepSkipped,
        StepTooMany,
        Overlapping,
        PaddingCounted,
        LastForgotten,
        ShortWhenEven,
        WrongFromAThousandOn,
    ],
)
def test_a_broken_order_is_refused(kind: type[Order]) -> None:
    wrong = prove_order("exactly_once", "pad", 64, kind)
    assert wrong is not None
    assert wrong.code == "CP0760"
    if kind not in (StepTooMany, WrongFromAThousandOn):  # an empty step more, and what nobody counts through
        assert "visits the record at position" in wrong.message
    else:
        assert wrong.message == "exactly_once with tail pad cannot be proved"


def test_a_broken_order_names_position_and_step() -> None:
    skipped = prove_order("exactly_once", "pad", 64, StepSkipped)
    twice = prove_order("at_most_once", "pad", 4, Overlapping)
    assert skipped is not None
    assert twice is not None
    assert skipped.message == "an epoch of 1 records in batches of 64 visits the record at position 0 never"
    assert twice.message == "an epoch of 5 records in batches of 4 visits the record at position 3 twice"
    assert twice.found == "twice: step 1 visits it again"


# --- broken divisions ---


class Narrow(Division):
    """Each part lacks its last row."""

    def part(self, rows: int, number: int) -> tuple[int, int]:
        low, high = super().part(rows, number)
        return low, high - 1


class Wide(Division):
    def part(self, rows: int, number: int) -> tuple[int, int]:
        low, high = super().part(rows, number)
        return low, high + 1


class RoundedDown(Division):
    """The rows that do not divide evenly are forgotten."""

    def part(self, rows: int, number: int) -> tuple[int, int]:
        each = rows // self.parts
        return number * each, (number + 1) * each


def test_rows_are_cut_without_gap_whatever_their_number() -> None:
    assert prove_parts() is None
    for kind, row in ((Narrow, "row 0 is made never"), (Wide, "row"), (RoundedDown, "row 0 is made never")):
        wrong = prove_parts(kind)
        assert wrong is not None
        assert wrong.code == "CP0761"
        assert row in wrong.message


class PartDropped(Division):
    def parts_of(self, process: int) -> tuple[int, ...]:
        return () if process == 1 else super().parts_of(process)


class PartMadeTwice(Division):
    def parts_of(self, process: int) -> tuple[int, ...]:
        return (*super().parts_of(process), *((0,) if process == 1 else ()))


class RootLacksAPart(Division):
    """The last maker broadcasts before it has gathered."""

    def moves(self, alive: Collection[int] | None = None) -> tuple[HostTransfer, ...]:
        return tuple(reversed(super().moves(alive)))


class MoveDropped(Division):
    def moves(self, alive: Collection[int] | None = None) -> tuple[HostTransfer, ...]:
        return super().moves(alive)[:-1]


class MovedTwice(Division):
    def moves(self, alive: Collection[int] | None = None) -> tuple[HostTransfer, ...]:
        transfers = super().moves(alive)
        return (*transfers, *transfers[-1:])


class WaitsForTheDead(Division):
    def moves(self, alive: Collection[int] | None = None) -> tuple[HostTransfer, ...]:
        return super().moves()


def as_kind(kind: type[Division], plain: Division) -> Division:
    return kind(plain.design, plain.readers, plain.hosts)


HOSTS = (0, 1, 2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (PartDropped, "no process makes rows 32 to 63 of 64 (part 1 of 2)"),
        (PartMadeTwice, "processes 0, 1 make rows 0 to 31 of 64 (part 0 of 2)"),
        (
            RootLacksAPart,
            "move 0 (broadcast): host 1 is to send rows 0 to 31 of 64 (part 0 of 2), which it does not have",
        ),
        (MoveDropped, "host 2 receives rows 0 to 31 of 64 (part 0 of 2) never"),
        (MovedTwice, "host 2 receives rows 0 to 31 of 64 (part 0 of 2) twice"),
    ],
)
def test_a_broken_division_is_refused(kind: type[Division], message: str) -> None:
    sound = division("single_broadcast", HOSTS, 2)
    assert prove_division(sound, 64) is None
    wrong = prove_division(as_kind(kind, sound), 64)
    assert wrong is not None
    assert wrong.code == "CP0761"
    assert wrong.message == message


def test_the_dead_are_not_waited_for() -> None:
    broken = as_kind(WaitsForTheDead, division("all_shared", HOSTS))
    wrong = prove_division(
        broken, 64, (0, 1), lambda split, alive: as_kind(WaitsForTheDead, failover(split, alive))
    )
    assert wrong is not None
    assert wrong.message == "move 1 (broadcast): it waits for host 2, with only processes 0, 1 left"


def test_who_adopts_nothing_leaves_rows_out() -> None:
    split = division("all_shared", (0, 0, 0, 0))
    wrong = prove_division(split, 10, (0, 1, 3), lambda each, _: each)
    assert wrong is not None
    message = "no process makes rows 5 to 6 of 10 (part 2 of 4), with only processes 0, 1, 3 left"
    assert wrong.message == message


def test_a_deal_that_favors_a_process_is_refused() -> None:
    assert prove_deal(2, 3) is None
    wrong = prove_deal(2, 3, lambda unit, part, parts, makers: makers[part % len(makers)])
    assert wrong is not None and wrong.code == "CP0761" and wrong.found == "{0: 3, 1: 3}"
    assert wrong.message == "over 3 batches processes of a host make unequal numbers of parts"


def test_duplicated_work_is_all_of_it() -> None:
    assert prove_division(division("duplicate", HOSTS), 64) is None
    wrong = prove_division(as_kind(PartDropped, division("duplicate", HOSTS)), 64)
    assert wrong is not None
    assert "process 1 makes parts [] for itself, of 3" in wrong.message


@pytest.mark.parametrize("many", [1, 2, 3, 4])
def test_the_survivors_that_are_looked_at_stand_for_all(many: int) -> None:
    """A rule that forgets the dead when there are `many` of them fails for some sets of survivors, and for
    one of those that are looked at; the real one fails for none."""

    def forgetful(split: Division, alive: Collection[int]) -> Division:
        after = failover(split, alive)
        dead = [reader for reader in split.readers if reader not in alive]
        return replace(after, readers=after.readers if len(dead) != many else split.readers)

    original = division("all_shared", (0, 0, 1, 1, 1))
    everyone = range(5)
    sets = [s for n in everyone for s in itertools.combinations(everyone, n + 1)]
    assert any(prove_division(original, 64, alive, forgetful) for alive in sets)
    assert any(prove_division(original, 64, alive, forgetful) for alive in survivors(original))
    assert not any(prove_division(original, 64, alive) for alive in sets)


def test_every_design_and_number_of_readers_is_proved() -> None:
    for members in (1, 2, 3, 5, 7, 12, 40):
        assert prove_share("all_shared", None, members, 64) is None
        assert prove_share("duplicate", None, members, 64) is None
        for readers in {1, 2, members // 2, members} - {0}:
            assert prove_share("single_broadcast", min(readers, members), members, 64) is None
            assert prove_share("multi_broadcast", min(readers, members), members, 64) is None


# --- broken clocks ---


class SmallerBound(Rates):
    @property
    def bound(self) -> int:
        return super().bound - self.unit


class UnitOfTheLargest(Rates):
    @property
    def unit(self) -> int:
        return max(self.batches)


class LagOfOne(Rates):
    @property
    def lag(self) -> int:
        return super().lag + 1


class StepSkippedByTheSecond(Rates):
    def units_of(self, member: int, step: int) -> tuple[int, int]:
        low, high = super().units_of(member, step)
        return (low, high) if member != 1 else (low + self.units[1], high + self.units[1])


class EpochCutShort(Rates):
    def epoch(self, length: int, visit: Any = "exactly_once", tail: Any = "pad") -> int:
        return super().epoch(length, visit, tail) - 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SmallerBound, "members that keep pace need 38 buffered records"),
        (UnitOfTheLargest, "step k of member 0 takes units"),
        (LagOfOne, "the largest lag is 9 records"),
        (StepSkippedByTheSecond, "step k of member 1 takes units"),
        (EpochCutShort, "ends before member"),
    ],
)
def test_broken_clocks_are_refused(kind: type[Rates], message: str) -> None:
    batches = (9, 6, 10)
    assert prove_rates(rates(batches)) is None
    wrong = prove_rates(kind(batches))
    assert wrong is not None
    assert wrong.code == "CP0762"
    assert message in wrong.message


# --- whole schedules ---


def test_schedules_are_refused_with_the_line_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = compiled(ensemble_plan(), "")
    assert verify(sound) == ()
    (phase,) = sound.phases
    monkeypatch.setattr(
        "commplan.verify.input_proof.prove_order", lambda *args: prove_order("at_least_once", "drop", args[2])
    )
    (diagnostic,) = verify(sound)
    assert diagnostic.code == "CP0760"
    assert diagnostic.span == phase.ops[0].span
    assert "visits the record at position 0 never" in diagnostic.message
    assert [note.text for note in diagnostic.notes] == [
        "expected at least once", "found never: none of its 0 steps does",
    ]  # fmt: skip


def test_a_division_that_is_wrong_stops_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(design: Design, hosts: Any, readers: int | None = None) -> Division:
        return as_kind(PartDropped, division(design, hosts, readers))

    prove_share.cache_clear()
    monkeypatch.setattr(proof, "division", forgetful)
    try:
        with pytest.raises(commplan.CommplanError) as caught:
            commplan.load(PLANS / "ensemble_shared.plan").compile()
    finally:
        prove_share.cache_clear()
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "CP0718"
    assert (
        "pass `share` broke the schedule: `pixels`: no process makes rows 16 to 31 of 64"
        in diagnostic.message
    )
    assert diagnostic.span is not None
    assert diagnostic.span.line == 14


@pytest.mark.parametrize("members", [2, 4096])
def test_proofs_of_the_input_do_not_grow_with_the_members(members: int) -> None:
    """4,096 members have 2**4096 sets of survivors; the test counts the cases examined, without a time
    limit."""
    prove_share.cache_clear()
    schedule = compiled(ensemble_plan(members=members), "share")
    assert len(shares(schedule)) == 1
    assert verify(schedule) == ()
    assert prove_share.cache_info().currsize == 1


def test_what_is_proved_is_told() -> None:
    schedule = commplan.load(PLANS / "ensemble_rates.plan").compile().schedule
    (load,) = visits(schedule)
    assert (load.op.visit, load.op.batch, load.op.clock) == ("exactly_once", (32, 32, 64), "member")
    assert load.rates == rates((32, 32, 64))
    (memory,) = input_memory(schedule)
    assert memory.shared == 192 * 64 * 64 * 3
    assert memory.private == 2 * 64 * 64 * 64 * 3


def test_memory_of_shared_and_of_own_values() -> None:
    schedule = commplan.load(PLANS / "ensemble_shared.plan").compile().schedule
    (memory,) = input_memory(schedule)
    batch = 64 * 224 * 224 * 3
    assert (memory.batches, memory.records) == (4, 256)
    assert memory.shared == 5 * batch  # two ahead, two that a process may show, one between hosts
    assert memory.private == 4 * batch  # the result of `augment` for each member


def test_verify_lists_the_proofs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(PLANS / "ensemble_readers.plan")]) == 0
    text = capsys.readouterr().out
    assert (
        "line 10: an epoch of `raw` gives everyone every record exactly once, however many there are" in text
    )
    assert (
        "line 13: `pixels` is made once over member (6) (multi_broadcast, 2 readers): every row has" in text
    )
    assert main(["verify", "--format", "json", str(PLANS / "ensemble_rates.plan")]) == 0
    data = json.loads(capsys.readouterr().out)
    (visit,) = data["visits"]
    assert (visit["round"], visit["bound"], visit["lag"], visit["round_steps"]) == (64, 192, 32, [2, 2, 1])
    assert data["shares"] == []
    assert data["input_memory"][0]["records"] == 5 * 64


def test_caches_are_counted_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "plans" / "caches.plan"
    assert main(["verify", str(path)]) == 0
    text = capsys.readouterr().out
    assert "a host keeps records across epochs in at most 64 MiB in its memory" in text
    assert "a host keeps records across epochs in at most 1.5 GiB in files" in text
    assert (
        "functions with a cache return the same for a record each time: `decode`, `narrow`, `embed`" in text
    )
    schedule = commplan.load(path).compile().schedule
    assert [(need.cached, need.in_files) for need in input_memory(schedule)] == [
        ((64 << 20) + 4096, 0), (3 << 29, 3 << 29),
    ]  # fmt: skip
    (step, *later_phases) = schedule.phases
    ops = tuple(
        structs.replace(op, hints=Hints(cache=Cache(4096))) if isinstance(op, Map) and op.random else op
        for op in step.ops
    )
    problems = verify(structs.replace(schedule, phases=(structs.replace(step, ops=ops), *later_phases)))
    assert any("`flip` is random" in diagnostic.message for diagnostic in problems), problems
