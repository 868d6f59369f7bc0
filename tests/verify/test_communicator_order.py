"""Communicators: ranks that share a schedule meet; ranks that do not are refused with their plan lines."""

from __future__ import annotations

import msgspec
import pytest
from support.byhand import HERE, Maker, compiled, tree
from support.calls import Call, Mesh, RankCalls, calls_of, check_calls
from support.calls_replay import correct_calls, execute_calls, replay_calls

from commplan.diagnostics import Span
from commplan.ir import plan as graph
from commplan.verify.programs.counterexample import Counterexample

SIZES = {"node": 2, "gpu": 3}


def at(line: int) -> Span:
    return Span(line, 1, line, 9)


def call(axes: tuple[str, ...], line: int, nbytes: int = 64, kind: str = "all_reduce") -> Call:
    return Call("step", axes, kind, "f32", nbytes, "sum", None, "ring", at(line))


A, B, C = call(("gpu",), 3), call(("node",), 5), call(("node", "gpu"), 7)
SAME = RankCalls((("gpu",), ("node",), ("node", "gpu")), (A, B, C))


def with_rank(rank: int, **changes: object) -> list[RankCalls]:
    ranks = [SAME] * 6
    ranks[rank] = msgspec.structs.replace(SAME, **changes)
    return ranks


def refused(ranks: list[RankCalls]) -> Counterexample:
    counterexample = check_calls(SIZES, ranks)
    assert counterexample is not None
    assert counterexample.code == "CP0747"
    assert replay_calls(SIZES, ranks, counterexample), counterexample
    assert not replay_calls(SIZES, [SAME] * 6, counterexample)
    assert not correct_calls(SIZES, ranks)
    return counterexample


def test_ranks_that_share_a_sequence_meet() -> None:
    assert check_calls(SIZES, SAME) is None
    assert check_calls(SIZES, [SAME] * 6) is None
    met, done = execute_calls(SIZES, [SAME] * 6)
    assert (len(met), done) == (2 + 3 + 1, [3] * 6)
    assert correct_calls(SIZES, [SAME] * 6)


def test_members_of_communicators() -> None:
    mesh = Mesh(SIZES)
    assert mesh.members(4, ("gpu",)) == (3, 4, 5)
    assert mesh.members(4, ("node",)) == (1, 4)
    assert mesh.members(4, ("node", "gpu")) == tuple(range(6))


def test_the_sequence_of_a_schedule() -> None:
    maker = Maker(node=2, gpu=3)
    grads = maker.input("grads", partial="node gpu")
    loss = maker.input("loss", partial="gpu")
    maker.value("grads.1")
    maker.value("loss.1")
    op = graph.Reduction("sum")
    first = graph.Reduce("loss.1", loss, ("gpu",), op, at(4))
    second = graph.Reduce("grads.1", grads, ("node", "gpu"), op, at(6))
    maker.phase("step", first, second, outputs=("grads.1", "loss.1"))
    schedule = compiled(maker.plan(), "", grads=tree(w=(4,)), loss=tree(x=(2,)))
    sequence = calls_of(schedule)
    assert sequence.created == (("gpu",), ("node", "gpu"))
    assert [(call.axes, call.nbytes, call.span.line) for call in sequence.calls] == [
        (("gpu",), 8, 4), (("node", "gpu"), 16, 6),
    ]  # fmt: skip
    assert check_calls(schedule.mesh_sizes, sequence) is None
    ranks = [sequence] * 6
    ranks[4] = msgspec.structs.replace(sequence, calls=sequence.calls[::-1])
    wrong = check_calls(schedule.mesh_sizes, ranks)
    assert wrong is not None
    assert {wrong.span, *(note.span for note in wrong.related)} == {at(4), at(6)}
    assert replay_calls(schedule.mesh_sizes, ranks, wrong)
    assert HERE not in (wrong.span,)


def test_communicators_created_in_another_order() -> None:
    counterexample = refused(with_rank(4, created=(("node",), ("gpu",), ("node", "gpu"))))
    assert (counterexample.failure, counterexample.ranks, counterexample.rounds) == (
        "creation",
        (0, 4),
        (0, 0),
    )
    assert (counterexample.expected, counterexample.found) == ("over gpu", "over node")
    assert counterexample.span == at(3)
    assert [note.span for note in counterexample.related] == [at(5)]


def test_a_communicator_that_one_rank_does_not_create() -> None:
    counterexample = refused(with_rank(5, created=SAME.created[:2]))
    assert (counterexample.failure, counterexample.rounds, counterexample.found) == (
        "creation",
        (2, 2),
        "none",
    )


def test_two_calls_swapped_on_one_rank() -> None:
    counterexample = refused(with_rank(2, calls=(A, C, B)))
    assert counterexample.failure == "calls"
    assert "wait for each other in a circle" in counterexample.message
    assert 2 in counterexample.ranks


def test_another_size_on_one_rank() -> None:
    other = call(("gpu",), 3, nbytes=68)
    counterexample = refused(with_rank(1, calls=(other, B, C)))
    assert (
        set(counterexample.ranks) == {1, counterexample.ranks[0], counterexample.ranks[1]}
        and 1 in counterexample.ranks
    )
    assert "68 bytes" in counterexample.message
    assert "64 bytes" in counterexample.message


def test_a_rank_that_has_no_call_left() -> None:
    counterexample = refused(with_rank(3, calls=(A, B)))
    assert counterexample.found == "no further call"
    message = "rank 0 waits forever in all_reduce of 64 bytes (f32) over node, gpu via ring (line 7): rank 3"
    assert counterexample.message.startswith(message)
    assert counterexample.span == at(7)


def test_an_order_that_still_meets_is_no_mistake() -> None:
    """One rank does the two independent calls the other way round, and all of them are met."""
    ranks = with_rank(0, calls=(B, A, C))
    assert check_calls(SIZES, ranks) is None
    assert correct_calls(SIZES, ranks)


@pytest.mark.parametrize("claim", ["calls", "creation"])
def test_a_claim_that_is_not_so_does_not_replay(claim: str) -> None:
    counterexample = Counterexample(claim, (0, 1), (0, 0), None, "over gpu", "no further call", "")  # pyright: ignore[reportArgumentType]
    assert not replay_calls(SIZES, [SAME] * 6, counterexample)
