"""Which ranks block the others: on states by hand, and on those of simulated jobs with one fault."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.recorder.blame import blame as of_records
from commplan.recorder.file import BEGIN, END, Details, Event, Record, machine
from commplan.recorder.rank_state import Comparison, Joint, Need, RankState, Wait
from commplan.recorder.verdict import Patience, Verdict, blame, described

ALL = (0, 1, 2)
PATIENCE = Patience(bound=2.0, late=10.0)
STEP = "line 7 of x.plan, in `train`"
FINISHED = f"{STEP}, 5 times so far"


def state(rank: int, names: str, *, waits: bool = False, idle: float = 20.0, late: bool = False) -> RankState:
    """names: of the calls that it has begun, a letter each; the last has not ended if it `waits`."""
    needs = (Need.begin(ALL, "all", len(names)),)
    waiting = (Wait(f"`{names[-1]}`", idle, needs, f"reached `{names[-1]}`", 5),) if waits else ()
    return RankState(
        rank, waits=waiting, begun={"all": len(names)}, recent={"all": (1, tuple(names))}, idle_s=idle,
        is_excused=late, process=f"process 4{rank} on node", last=STEP, runs=5,
        stack="" if waits else "data.py:41 in decode",
    )  # fmt: skip


def verdict(*states: RankState, waiter: int | None = 0) -> Verdict:
    return blame({each.rank: each for each in states}, waiter, PATIENCE)


def text(*states: RankState) -> str:
    return described(verdict(*states), {each.rank: each for each in states}, "process", 0)


def test_a_rank_that_has_not_begun_the_step_is_late():
    states = state(0, "aba", waits=True), state(1, "aba", waits=True), state(2, "ab")
    assert verdict(*states).kind == "late" and verdict(*states).reasons == {2: "it has not reached `a`"}
    assert text(*states).splitlines() == [
        "process 2 has not arrived within 20.0 s",
        f"note: process 2 (process 42 on node) is alive, in no step for 20.0 s; it last finished {FINISHED}",
        "note: its Python: data.py:41 in decode",
    ]


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (state(2, "ab", idle=1.0), "busy"),  # it has moved a second ago
        (state(2, "ab", late=True), "busy"),  # it said so
        (state(2, "ab", waits=True, idle=1.0), "stalled"),  # it is about to come
    ],
)
def test_a_rank_that_moves_or_said_so_is_not_late(other: RankState, kind: str):
    states = state(0, "aba", waits=True), state(1, "aba", waits=True), other
    assert verdict(*states).kind in (kind, "behind")


def test_a_rank_that_waits_is_patient_with_the_living():
    assert verdict(state(0, "aba", waits=True, idle=9.0), state(1, "ab"), state(2, "ab")).kind == "busy"


def test_a_step_that_all_are_in_may_compute():
    assert verdict(*(state(rank, "ab", waits=True) for rank in ALL)).kind == "stalled"


def test_the_fewest_call_in_another_order():
    states = [state(rank, "abba" if rank == 1 else "abab", waits=True) for rank in ALL]
    assert verdict(*states).kind == "order" and list(verdict(*states).reasons) == [1]
    message = text(*states)
    assert message.startswith("the processes call their steps in another order: process 1 b as call 3,")
    assert "processes 0, 2 a" in message and "note: process 1 waits in `a`" in message


def test_two_ranks_in_different_orders_are_both_shown_and_neither_is_blamed():
    states = state(0, "ab", waits=True), state(1, "aa", waits=True)
    assert verdict(*states).kind == "order" and verdict(*states).reasons == {}
    assert "process 1 a as call 2, process 0 b" in text(*states)


def test_calls_that_are_forgotten_are_not_compared():
    forgets = RankState(1, begun={"all": 5}, recent={"all": (3, ("a", "b", "a"))}, idle_s=20.0)
    assert verdict(state(0, "abab", waits=True), forgets).kind != "order"


def test_an_aborted_rank_is_named_without_patience_unless_orders_differ():
    states = [state(rank, "ab", waits=True, idle=0.5) for rank in ALL]
    states[1] = states[1]._replace(condition="aborted", how="was aborted")
    assert verdict(*states).kind == "down" and text(*states).startswith("process 1 was aborted")
    states[1] = states[1]._replace(recent={"all": (1, ("a", "c"))})
    assert verdict(*states).kind == "order" and list(verdict(*states).reasons) == [1]


def test_ranks_that_wait_in_different_groups_wait_for_one_another():
    begun = {0: {"pair": 1}, 1: {"all": 1}, 2: {"all": 1}}
    pair = Wait("`member`", 20.0, (Need.begin([1], "pair", 1),))
    whole = Wait("`whole`", 20.0, (Need.begin(ALL, "all", 1),))
    waits = {0: pair, 1: whole, 2: whole}
    states = [RankState(rank, waits=(waits[rank],), begun=begun[rank], idle_s=20.0) for rank in ALL]
    assert verdict(*states).kind == "circle"
    assert text(*states).startswith(
        "the processes have waited for each other for 20.0 s, in different orders"
    )
    assert "note: process 0 waits in `member`" in text(*states)


def test_a_rank_does_not_wait_for_itself():
    """The server of a feed, which waits for its own answer, is behind if others wait for it too."""
    mine = Wait("batch 7", 20.0, (Need.begin([0], "answer", 1),))
    other = mine._replace(where="batch 8")
    served = RankState(0, waits=(mine,), idle_s=20.0), RankState(1, waits=(other,), idle_s=20.0)
    assert (verdict(*served, waiter=1).kind, [*verdict(*served, waiter=1).reasons]) == ("behind", [0])
    alone = served[0], RankState(1, waits=(other._replace(needs=()),), idle_s=20.0)
    assert verdict(*alone, waiter=None).kind == "stalled"


@pytest.mark.parametrize("seconds", [(20.0, 30.0), (30.0, 20.0)])
def test_a_late_rank_is_named_for_the_longest_of_equal_waits(seconds: tuple[float, float]):
    needs = (Need.begin([2], "answer", 1),)
    waits = [Wait(f"request {age:.0f}", age, needs, f"answered request {age:.0f}") for age in seconds]
    states = [RankState(rank, waits=(wait,), idle_s=20.0) for rank, wait in enumerate(waits)]
    assert verdict(*states, RankState(2, idle_s=20.0), waiter=None).reasons == {
        2: "it has not answered request 30"
    }


def test_ranks_that_are_down_are_named_with_their_condition():
    dead = RankState(2, "dead", "has died", ("process 2 is PID 7 on b",))
    stopped = RankState(1, "stopped", "is stopped", ("process 1 is PID 6 on a",))
    assert text(state(0, "ab", waits=True), dead, stopped).splitlines() == [
        "process 1 is stopped", "note: process 2 has died", "note: process 1 is PID 6 on a",
        "note: process 2 is PID 7 on b", "note: process 0 waits",
    ]  # fmt: skip


STUCK = state(1, "ab", waits=True)._replace(condition="stuck in the kernel", how="is stuck")


@pytest.mark.parametrize(
    ("other", "kind", "named"),
    [
        (state(2, "ab", waits=True), "down", [1]),
        (state(2, "a"), "late", [2]),
        (state(2, "a", late=True), "busy", [2]),
        (state(2, "a")._replace(condition="dead", how="has died"), "down", [2]),
        (state(2, "ab", waits=True, idle=1.0), "stalled", []),  # it still moves data
        (RankState(3), "stalled", []),  # the state of rank 2 is unknown
    ],
)
def test_a_rank_that_waits_for_a_disk_in_a_step_is_named_if_no_other_rank_is(
    other: RankState, kind: str, named: list[int]
):
    """The step may run in another thread."""
    result = verdict(state(0, "ab", waits=True), STUCK, other)
    assert (result.kind, [*result.reasons]) == (kind, named)


@pytest.mark.parametrize(
    ("waited_s", "late", "kind"), [(9.0, False, "busy"), (11.0, False, "down"), (99.0, True, "busy")]
)
def test_a_rank_that_waits_for_a_disk_outside_of_steps_is_named_after_the_limit_of_late_ranks(
    waited_s: float, late: bool, kind: str
):
    stuck = state(1, "a", idle=1000.0, late=late)._replace(condition="stuck in the kernel", how="is stuck")
    assert verdict(state(0, "ab", waits=True, idle=waited_s), stuck, state(2, "ab", waits=True)).kind == kind


def test_ranks_that_are_down_for_the_same_reason_share_a_line():
    """A host of 64 ranks, and then 20 hosts: a verdict has room for 4 kB."""
    wait = Wait("`b`", 20.0, (Need.begin(range(168), "all", 2),))
    waiting = [state(rank, "ab")._replace(waits=(wait,)) for rank in range(2)]
    host = [RankState(rank, "silent", "does not answer: host b") for rank in (*range(8, 72), 90, 91)]
    ended = [RankState(rank, "ended") for rank in range(2, 5)]
    assert text(*waiting, *ended, *host).splitlines() == [
        "the program has ended on processes 2-4",
        "note: each of processes 8-71, 90, 91 does not answer: host b", "note: processes 0, 1 wait",
    ]  # fmt: skip
    hosts = [RankState(rank, "silent", f"does not answer: host {rank // 8}") for rank in range(8, 168)]
    lines = text(*waiting, *hosts).splitlines()
    assert len(lines) == 10 and lines[8] == "note: processes 72-167 cannot go on"


def test_a_failed_operation_is_explained_by_a_dead_rank_and_not_by_one_that_ended_well():
    ended = RankState(1, "ended")
    assert verdict(state(0, "ab"), ended).kind in ("none", "stalled")
    assert list(verdict(state(0, "ab"), ended, RankState(2, "dead", "has died")).reasons) == [2]


def test_a_rank_that_has_ended_is_named_with_its_reason():
    ended = RankState(2, "ended", "ArithmeticError: loss")
    assert text(state(0, "ab", waits=True), ended).startswith(
        "the program has ended on process 2: Arithmetic"
    )


def test_a_comparison_that_others_do_not_join_is_described_without_an_operation():
    """The waits of comparisons are taken out of the states when a collective is judged."""
    compared = Joint(8, waits_s=5.0, comparison=Comparison("rank 0", "train", place="train.py:9"))
    running = Joint(8, is_running=True, comparison=Comparison("rank 1", "evaluate"))
    states = RankState(0, joint={"all": compared}), RankState(1, joint={"all": running}, stack="train.py:4")
    assert verdict(*states).kind == "apart"
    assert "rank 0 calls `train` while process 1 runs `evaluate`" in text(*states)


class Step(NamedTuple):
    """A collective over all ranks (axes of the plan), or over a row or a column of the grid."""

    line: int
    axes: tuple[str, ...]


@dataclasses.dataclass
class Job:
    """Ranks on a grid that run the same program until none can continue.

    Faults of the culprit at call `at`: `late` or `dead`: it stops before the call. `inside`: it dies in the
    call. `order`: it exchanges the call with the next one. `skip`: it leaves the call out.
    """

    rows: int
    columns: int
    program: list[Step]
    fault: str
    culprit: int
    at: int

    def group(self, rank: int, step: Step) -> frozenset[int]:
        row, column = divmod(rank, self.columns)
        return frozenset(
            other
            for other in range(self.rows * self.columns)
            if ("row" in step.axes or other // self.columns == row)
            and ("column" in step.axes or other % self.columns == column)
        )

    def calls(self, rank: int) -> list[Step]:
        calls = list(self.program)
        if rank == self.culprit and self.fault == "order":
            calls[self.at : self.at + 2] = reversed(calls[self.at : self.at + 2])
        if rank == self.culprit and self.fault == "skip":
            del calls[self.at]
        return calls[: self.at + (self.fault == "inside")] if self.is_halted(rank) else calls

    def is_halted(self, rank: int) -> bool:
        return rank == self.culprit and self.fault in ("late", "dead", "inside")

    def run(self) -> dict[int, tuple[list[Step], bool]]:
        """By rank the calls that it has begun, and whether the last one has not ended."""
        calls = {rank: self.calls(rank) for rank in range(self.rows * self.columns)}
        at = dict.fromkeys(calls, 0)
        moves = True
        while moves:
            moves = False
            for rank in calls:
                head = calls[rank][at[rank] : at[rank] + 1]
                group = self.group(rank, head[0]) if head else frozenset[int]()
                dies = self.fault == "inside" and self.culprit in group and at[self.culprit] == self.at
                heads = [calls[other][at[other] : at[other] + 1] for other in group]
                runs = {other: calls[other][: at[other]].count(head[0]) for other in group}
                if head and not dies and all(each == head for each in heads) and len(set(runs.values())) == 1:
                    at |= {other: at[other] + 1 for other in group}
                    moves = True
        return {
            rank: (sequence[: at[rank] + 1], at[rank] < len(sequence)) for rank, sequence in calls.items()
        }

    def records(self) -> list[Record]:
        axes, records = {"row": self.rows, "column": self.columns}, list[Record]()
        for rank, (begun, waits) in self.run().items():
            events, counts = list[Event](), dict[int, int]()
            for number, step in enumerate(begun, 1):
                counts[step.line] = counts.get(step.line, 0) + 1
                collective = Details("all_reduce", "ring", 64, "f32", 0, "", step.axes)
                event = Event(number, BEGIN, f"line {step.line}", number, counts[step.line], 64, collective)
                events.append(event)
                if number < len(begun) or not waits:
                    events.append(event._replace(seconds=number + 0.5, kind=END))
            is_gone = rank == self.culprit and self.fault in ("dead", "inside")
            record = Record(
                f"job.{rank}.rec", "p", rank, len(self.run()), "node", machine(), -1 if is_gone else 1, 1.0,
                failed=False, lost=0, events=tuple(events), axes=axes,
            )  # fmt: skip
            records.append(record)
        return records


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    axes = st.sampled_from([("row", "column"), ("row", "column"), ("column",), ("row",)])
    lines = draw(st.lists(axes, min_size=1, max_size=3))
    program = [Step(line, each) for line, each in enumerate(lines, 6)] * draw(st.integers(1, 3))
    fault = draw(st.sampled_from(["late", "dead", "inside", "order", "skip"]))
    last = len(program) - (2 if fault == "order" else 1)
    at = draw(st.integers(0, max(last, 0)))
    return Job(rows, columns, program, fault, draw(st.integers(0, rows * columns - 1)), at)


@given(jobs())
def test_an_innocent_rank_is_never_named(job: Job):
    holders = of_records(job.records()).holders
    assert set(holders) <= {job.culprit}
    waits = any(waits for rank, (_, waits) in job.run().items() if rank != job.culprit)
    if waits and job.is_halted(job.culprit):
        assert set(holders) == {job.culprit}


CALLS = st.lists(st.sampled_from("ab"), min_size=1, max_size=6)


@given(CALLS, CALLS, st.integers(3, 5), st.data())
def test_the_rank_with_other_calls_than_all_others_is_named(
    usual: list[str], other: list[str], ranks: int, data: st.DataObject
):
    """As far as all of them got: some of the others may have begun fewer calls."""
    culprit = data.draw(st.integers(0, ranks - 1))
    states: dict[int, RankState] = {}
    for rank in range(ranks):
        begun = other if rank == culprit else usual[: data.draw(st.integers(1, len(usual)))]
        states[rank] = RankState(rank, begun={"": len(begun)}, recent={"": (1, tuple(begun))})
    judgement = blame(states)
    if judgement.kind == "order":
        assert set(judgement.reasons) <= {culprit}
