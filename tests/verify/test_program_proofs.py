"""Proofs of chunk programs: all existing ones hold, and every kind of error is distinguished."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest
from support import matching
from support.campaign import parameters
from support.program_replay import correct, replay, rounds_of
from support.projection import Projection, project
from support.rounds import counted

from commplan.collectives.program import KINDS, ChunkProgram, Kind, Rotation, Send
from commplan.collectives.registry import algorithms, program
from commplan.ir.collective_kinds import ROOTED
from commplan.verify.programs.algorithm_proof import prove_task
from commplan.verify.programs.composition import LevelProgram
from commplan.verify.programs.counterexample import Counterexample, ranges_text, terms
from commplan.verify.programs.proof import count, prove
from commplan.verify.programs.symbolic_execution import representatives, rotates

Transfer = tuple[int, int, int, bool]


def made(kind: Kind, ranks: int, chunks: int, *rounds: list[Transfer], root: int = 0) -> ChunkProgram:
    """A program of transfers (from, to, chunk, whether it adds)."""
    families = tuple(
        tuple(
            Send(np.array([src]), np.array([dst]), np.array([chunk]), np.array([1]), reduce)
            for src, dst, chunk, reduce in each
        )
        for each in rounds
    )
    return ChunkProgram("made", kind, ranks, chunks, families, root)


def only(program: ChunkProgram | Projection) -> Counterexample:
    """The one counter-example of `program`, which happens when it runs."""
    if isinstance(program, ChunkProgram):
        ((counterexample,), projection) = prove(program), project(program)
        (other,) = matching.prove(projection)
        assert (counterexample.failure, counterexample.ranks, counterexample.rounds) == (
            other.failure,
            other.ranks,
            other.rounds,
        )
    else:
        ((counterexample,), projection) = matching.prove(program), program
    assert replay(projection, counterexample), counterexample
    assert not correct(projection) or counterexample.failure == "redundant"
    return counterexample


FEW = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64)
OTHERS = tuple(ranks for ranks in range(1, 65) if ranks not in FEW)


@pytest.mark.parametrize(
    ("kind", "numbers"), parameters([(k, FEW) for k in KINDS], [(k, OTHERS) for k in KINDS])
)
def test_every_algorithm_is_proved_for_1_to_64_ranks(kind: Kind, numbers: tuple[int, ...]) -> None:
    for name in algorithms(kind):
        for ranks in numbers:
            for root in {0, ranks // 2, ranks - 1} if kind in ROOTED else {0}:
                assert prove(program(name, kind, ranks, root=root)) == (), (name, ranks, root)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_proved_and_costs_agree_with_the_rounds(kind: Kind) -> None:
    for name in algorithms(kind):
        for ranks in (1, 2, 3, 5, 6, 8, 13):
            sliced = program(name, kind, ranks, slices=3)
            assert prove(sliced) == ()
            assert correct(project(sliced))
            costs, (rounds, busiest) = count(sliced), counted(sliced)
            assert costs.rounds <= rounds
            assert max(costs.sent, costs.received) <= busiest or ranks == 1
            assert costs.staged <= 1
            assert max(costs.sent, costs.received) >= costs.least


ROTATING: list[tuple[str, Kind]] = [
    ("ring", "all_reduce"), ("ring", "reduce_scatter"), ("ring", "all_gather"),
    ("bruck", "reduce_scatter"), ("bruck", "all_gather"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), ROTATING)
def test_large_programs_of_rotations_are_proved_by_one_chunk(
    name: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof examines as many transfers as one rank sends, and computes the transfers of no other rank."""
    for column in ("src", "dst", "chunk", "count"):
        monkeypatch.delattr(Rotation, column)
    most = 2 if kind == "all_reduce" else 1
    for ranks in (2, 100, 4096):
        proved, costs = prove_task.__wrapped__(LevelProgram(name, kind, ranks, 0))
        transfers, few = representatives(program(name, kind, ranks))
        assert (proved, few, len(transfers.src)) == ((), 1, most * (ranks - 1))
        assert costs.sent == Fraction(most * (ranks - 1), ranks)


@pytest.mark.parametrize(("name", "few"), [("ring", 1), ("halving_doubling", 8), ("torus", 8)])
def test_one_chunk_stands_for_all_if_the_program_rotates(name: str, few: int) -> None:
    assert representatives(program(name, "all_reduce", 8))[1] == few
    assert representatives(listed(program(name, "all_reduce", 8)))[1] == few


def listed(program: ChunkProgram) -> ChunkProgram:
    """`program` with an entry for each rank."""
    rounds = (tuple(Send(s.src, s.dst, s.chunk, s.count, s.reduce) for s in each) for each in program.rounds)
    return dataclasses.replace(program, rounds=tuple(rounds))


def test_the_columns_of_a_rotation_are_those_of_rank_0_moved_on() -> None:
    for ranks, step, first, length in itertools.product((2, 5), (1, -1, 3), (-3, 0, 4), (1, 2)):
        rotation = Rotation(ranks, step, first, length)
        runs = zip(rotation.src, rotation.dst, rotation.chunk, rotation.count, strict=True)
        moved = sorted((src, dst, chunk + i) for src, dst, chunk, count in runs for i in range(count))
        assert moved == sorted(
            (r, (r + step) % ranks, (r + first + i) % ranks) for r in range(ranks) for i in range(length)
        )
    for step, length in ((0, 1), (5, 1), (1, 0), (1, 6)):
        with pytest.raises(ValueError, match="no message to another rank"):
            Rotation(5, step, 0, length)


@pytest.mark.parametrize(("name", "kind"), ROTATING)
def test_one_rank_that_does_otherwise_is_found(name: str, kind: Kind) -> None:
    """Each message of each rank takes another chunk, goes to another rank, adds or copies, or is left out."""
    whole = listed(program(name, kind, 5))
    for time, (send,) in enumerate(whole.rounds):
        for place in range(len(send.src)):
            elsewhere = np.arange(len(send.src)) != place
            at_rank = ~elsewhere
            src, dst, chunk, count = send.src, send.dst, send.chunk, send.count
            unchanged, moved = ((src[at], dst[at], chunk[at], count[at]) for at in (elsewhere, at_rank))
            ends = Send(src, (dst + 2 * at_rank) % 5, chunk, count, send.reduce)
            mutants = [
                (Send(src, dst, np.where(at_rank, (chunk + 1) % 5, chunk), 0 * count + 1, send.reduce),),
                (Send(*unchanged, send.reduce), Send(*moved, not send.reduce)),
                (Send(*unchanged, send.reduce),),
                *([(ends,)] if (ends.dst != src).all() else []),
            ]
            for wrong in mutants:
                rounds = (*whole.rounds[:time], wrong, *whole.rounds[time + 1 :])
                broken = dataclasses.replace(whole, rounds=rounds)
                assert representatives(broken)[1] == 5
                if (
                    not correct(project(broken)) or wrong[0] is not ends
                ):  # a first message may take a short cut
                    only(broken)


@pytest.mark.parametrize(("name", "kind"), ROTATING)
def test_rotations_that_are_wrong_are_found_by_one_chunk(name: str, kind: Kind) -> None:
    """The verdict is that of the same program with an entry for each rank."""
    whole = program(name, kind, 6)
    for time, (send,) in enumerate(whole.rounds):
        assert isinstance(send, Rotation)
        changes = [{"step": step} for step in range(1, 6)]
        changes += [{"first": first} for first in range(6)]
        changes += [{"length": length} for length in range(1, 7)]
        mutants = [(dataclasses.replace(send, **change),) for change in changes]
        for wrong in (*mutants, (dataclasses.replace(send, reduce=not send.reduce),), (), (send, send)):
            broken = dataclasses.replace(
                whole, rounds=(*whole.rounds[:time], wrong, *whole.rounds[time + 1 :])
            )
            failures = [
                [counterexample.failure for counterexample in prove(each)]
                for each in (broken, listed(broken))
            ]
            assert rotates(broken)
            assert failures[0] == failures[1]
            assert failures[0] or correct(project(broken))


def test_rotations_of_other_ranks_and_promises_do_not_stand_for_all() -> None:
    ring = program("ring", "all_gather", 6)
    assert rotates(ring)
    mixed = (*ring.rounds[:-1], listed(ring).rounds[-1])
    for other in (
        dataclasses.replace(ring, rounds=((Rotation(3, 1, 0),), *ring.rounds[1:])),
        dataclasses.replace(ring, rounds=mixed),
        dataclasses.replace(ring, chunks=12),
        *(dataclasses.replace(ring, kind=kind) for kind in (*ROOTED, "swap")),
    ):
        assert not rotates(other)


def test_a_swap_that_swaps_nothing() -> None:
    """Its messages rotate, and its promise does not: slot 0 of every rank ends as it should."""
    both = (np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0]), np.array([0, 1, 1, 0]), np.ones(4, np.int64))
    whole = program("pairwise", "swap", 2)
    counterexample = only(dataclasses.replace(whole, rounds=2 * ((Send(*both, reduce=False),),)))
    assert (counterexample.failure, counterexample.ranks, counterexample.chunk) == ("wrong", (0,), 1)


def test_one_end_of_a_message_takes_another_chunk() -> None:
    whole = project(program("ring", "all_gather", 5))
    for place in range(len(whole.receives.chunk)):
        chunk = whole.receives.chunk.copy()
        chunk[place] = (chunk[place] + 1) % 5
        broken = dataclasses.replace(whole, receives=dataclasses.replace(whole.receives, chunk=chunk))
        assert only(broken).failure == "mismatch"


def test_a_program_that_turns_and_is_wrong() -> None:
    whole = program("ring", "reduce_scatter", 6)
    short = dataclasses.replace(whole, rounds=whole.rounds[:-1])
    assert rotates(short)
    counterexample = only(short)
    assert (counterexample.failure, counterexample.chunk) == ("wrong", 0)
    assert "(6 slots in all do not hold the promised value)" in counterexample.message


def test_ranks_have_sequences_of_their_own() -> None:
    (first, second) = rounds_of(project(program("ring", "all_gather", 3)), 1)
    assert (first.round, first.sends[0][:4], first.receives[0][:4]) == (0, (2, 1, 1, 0), (0, 0, 1, 0))
    assert (second.round, second.sends[0].number, second.receives[0].chunk) == (1, 1, 2)


def test_a_hole() -> None:
    counterexample = only(made("all_reduce", 2, 1, [(0, 1, 0, True)]))
    assert (counterexample.code, counterexample.failure, counterexample.ranks, counterexample.chunk) == (
        "CP0740",
        "wrong",
        (0,),
        0,
    )
    assert counterexample.message == (
        "at the end rank 0 has as sums of chunk 0 the contribution of rank 0, not of ranks 0-1"
    )


def test_a_contribution_added_twice() -> None:
    rounds = [[(0, 1, 0, True)], [(0, 1, 0, True)], [(1, 0, 0, False)]]
    counterexample = only(made("all_reduce", 2, 1, *rounds))
    assert (counterexample.code, counterexample.ranks, counterexample.rounds) == ("CP0741", (1, 0), (1,))
    assert counterexample.found == "rank 1, rank 0 twice"
    assert (
        counterexample.message
        == "rank 1 adds chunk 0 from rank 0 in its round 1, and then holds rank 0 twice"
    )


def test_two_messages_into_one_slot() -> None:
    counterexample = only(made("reduce", 3, 1, [(1, 0, 0, True), (2, 0, 0, True)]))
    assert (counterexample.code, counterexample.ranks, counterexample.rounds, counterexample.chunk) == (
        "CP0744",
        (0, 1, 2),
        (0,),
        0,
    )
    assert counterexample.found == "reduce from rank 1, reduce from rank 2"


def test_a_copy_and_a_sum_into_one_slot() -> None:
    counterexample = only(made("reduce", 3, 1, [(1, 0, 0, True), (2, 0, 0, False)]))
    assert (counterexample.code, counterexample.found) == ("CP0744", "reduce from rank 1, copy from rank 2")


def test_what_was_never_set_is_sent() -> None:
    counterexample = only(made("broadcast", 3, 1, [(1, 2, 0, False)], [(0, 1, 0, False)]))
    assert (counterexample.code, counterexample.ranks, counterexample.rounds) == ("CP0745", (1, 2), (0,))
    assert counterexample.message == "rank 1 sends chunk 0 to rank 2 in its round 0, but the slot is empty"


def test_what_was_never_set_is_added_to() -> None:
    counterexample = only(made("broadcast", 2, 1, [(0, 1, 0, True)]))
    assert (counterexample.code, counterexample.message) == (
        "CP0745", "rank 1 adds to chunk 0 from rank 0 in its round 0, but the slot is empty",
    )  # fmt: skip


def test_a_message_that_brings_what_is_there() -> None:
    counterexample = only(made("broadcast", 2, 1, [(0, 1, 0, False)], [(0, 1, 0, False)]))
    assert (counterexample.code, counterexample.rounds, counterexample.found) == (
        "CP0746",
        (1,),
        "it holds that already",
    )


def test_a_message_that_nobody_needs() -> None:
    counterexample = only(made("reduce", 2, 1, [(1, 0, 0, True)], [(0, 1, 0, False)]))
    assert (counterexample.code, counterexample.rounds, counterexample.found) == (
        "CP0746",
        (1,),
        "no result depends on it",
    )


def test_sums_in_different_orders() -> None:
    """Rank 0 has ((0 + 1) + 2) + 3 and rank 1 has (0 + 1) + (2 + 3): complete, and of other bits."""
    rounds = [
        [(1, 0, 0, True), (0, 1, 0, True)],
        [(2, 0, 0, True)],
        [(3, 0, 0, True), (2, 3, 0, True)],
        [(3, 1, 0, True)],
        [(0, 2, 0, False), (1, 3, 0, False)],
    ]
    counterexample = only(made("all_reduce", 4, 1, *rounds))
    assert (counterexample.code, counterexample.ranks, counterexample.chunk) == ("CP0749", (0, 1), 0)
    assert counterexample.diagnostic("made").message.startswith("made: ranks 0 and 1 have added")
    # With one order, sent around, all is well.
    rounds[-2:] = [[(0, 1, 0, False)], [(0, 2, 0, False), (1, 3, 0, False)]]
    rounds[:3] = [[(1, 0, 0, True)], [(2, 0, 0, True)], [(3, 0, 0, True)]]
    assert prove(made("all_reduce", 4, 1, *rounds)) == ()


def test_ends_that_do_not_meet() -> None:
    whole = project(program("ring", "all_reduce", 4))
    keep = np.arange(len(whole.receives.rank)) != 5
    counterexample = only(dataclasses.replace(whole, receives=whole.receives.take(keep)))
    assert (counterexample.code, counterexample.failure) in {("CP0742", "mismatch"), ("CP0742", "hang")}


def test_a_message_that_is_never_received() -> None:
    whole = project(made("broadcast", 2, 1, [(0, 1, 0, False)]))
    alone = dataclasses.replace(whole, receives=whole.receives.take(np.zeros(1, np.bool_)))
    counterexample = only(alone)
    assert (counterexample.failure, counterexample.ranks, counterexample.rounds) == ("hang", (0, 1), (0,))
    assert counterexample.message == (
        "rank 0 waits forever in its round 0 to send chunk 0 to rank 1, which has no receive for it"
    )


def test_a_circle_of_waiting_ranks() -> None:
    """Each sends first and receives then, as blocking calls do: fine while messages are small."""
    whole = project(made("all_gather", 3, 3, [(r, (r + 1) % 3, r, False) for r in range(3)]))
    late = dataclasses.replace(whole.receives, round=whole.receives.round + 1)
    counterexample = only(dataclasses.replace(whole, receives=late))
    assert (counterexample.code, counterexample.ranks, counterexample.rounds) == (
        "CP0743",
        (0, 1, 2),
        (0, 0, 0),
    )
    assert counterexample.message.splitlines() == [
        "ranks 0, 1, 2 wait for each other in a circle:",
        "rank 0 in its round 0 to send chunk 0 to rank 1, which gets there in its round 1",
        "rank 1 in its round 0 to send chunk 1 to rank 2, which gets there in its round 1",
        "rank 2 in its round 0 to send chunk 2 to rank 0, which gets there in its round 1",
    ]


def test_rounds_that_only_one_rank_numbers_otherwise_are_fine() -> None:
    """Round numbers are local to a rank: only their order counts."""
    whole = project(program("ring", "all_reduce", 5))
    sends, receives = whole.sends, whole.receives
    shifted = dataclasses.replace(
        whole,
        sends=dataclasses.replace(sends, round=np.where(sends.rank == 2, 3 * sends.round + 7, sends.round)),
        receives=dataclasses.replace(
            receives, round=np.where(receives.rank == 2, 3 * receives.round + 7, receives.round)
        ),
    )
    assert matching.prove(shifted) == ()
    assert correct(shifted)


@pytest.mark.parametrize(
    "broken",
    [
        made("all_gather", 2, 3),
        made("broadcast", 2, 1, root=2),
        made("broadcast", 2, 0),
        made("broadcast", 2, 1, [(0, 2, 0, False)]),
        made("broadcast", 2, 1, [(0, 0, 0, False)]),
        made("broadcast", 2, 1, [(0, 1, 1, False)]),
    ],
)
def test_ranks_and_chunks_that_do_not_exist(broken: ChunkProgram) -> None:
    (counterexample,) = prove(broken)
    assert counterexample.code == "CP0742"
    assert replay(project(broken), counterexample)


def test_numbers_in_words() -> None:
    assert ranges_text([5, 0, 1, 2]) == "0-2, 5"
    assert ranges_text(range(0, 60, 2)).endswith("and 18 runs more")
    assert terms({}) == "nothing"
    assert terms({0: 1, 1: 1, 3: 2, 4: 3}) == "ranks 0-1, rank 3 twice, rank 4 3 times"
