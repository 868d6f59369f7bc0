"""Instruction lists, executed in any order that respects their waits, give the result of the oracle."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from support.oracle.programs import execute

from commplan.collectives import registry
from commplan.collectives.program import IN_BLOCKS, KINDS, ChunkProgram, Kind
from commplan.ir.collective_kinds import ROOTED
from commplan.lowering.mpi import instructions as lists
from commplan.lowering.mpi.instructions import Instructions, instructions

Floats = Any
ITEM = 4  # bytes of a float32


class Rank:
    """One rank: its buffers and its progress. Receives take messages in any order."""

    def __init__(self, listed: Instructions, operand: Floats, result: int) -> None:
        self.made = listed
        self.buffers = (
            operand,
            np.full(result, np.nan, np.float32),
            np.full(listed.scratch // ITEM, np.nan, np.float32),
        )
        self.done: set[int] = set()
        self.early = np.full(result, np.nan, np.float32)  # each part as it was when said to be ready

    def can(self, i: int, arrived: dict[tuple[int, int, int], Floats], rank: int) -> bool:
        row = self.made.code[i]
        if i in self.done or not self.done.issuperset(self.made.waits[i]):
            return False
        receives = row.kind in (lists.RECEIVE, lists.RECEIVE_REDUCE)
        return not receives or (self.made.peers[row.peer], rank, row.message) in arrived

    def do(self, i: int, arrived: dict[tuple[int, int, int], Floats], rank: int) -> None:
        row = self.made.code[i]
        count = row.nbytes // ITEM
        src = self.buffers[row.src][row.src_offset // ITEM :][:count]
        dst = self.buffers[row.dst][row.dst_offset // ITEM :][:count]
        match row.kind:
            case lists.SEND:
                key = (rank, self.made.peers[row.peer], row.message)
                assert key not in arrived
                arrived[key] = src.copy()
            case lists.RECEIVE:
                dst[:] = arrived.pop((self.made.peers[row.peer], rank, row.message))
            case lists.RECEIVE_REDUCE:
                dst[:] = src + arrived.pop((self.made.peers[row.peer], rank, row.message))
            case lists.COPY:
                dst[:] = src
            case _:
                dst[:] = 0
        self.done.add(i)
        if i in self.made.last:
            assert row.dst == lists.OUTPUT
            self.early[row.dst_offset // ITEM :][:count] = dst


def run(program: ChunkProgram, operands: list[Floats], whole: int, piece: int, seed: int) -> list[Floats]:
    if program.kind == "swap":
        operands = [blocks(x, order) for x, order in zip(operands, program.targets, strict=True)]
    chance = random.Random(seed)
    size = whole // program.ranks if program.kind in ("reduce_scatter", "scatter") else whole
    ranks = [
        Rank(instructions(program, rank, whole, ITEM, piece), operands[rank], size)
        for rank in range(program.ranks)
    ]
    arrived: dict[tuple[int, int, int], Floats] = {}
    pending = [(rank, i) for rank, rank_state in enumerate(ranks) for i in range(len(rank_state.made.code))]
    while pending:
        able = [k for k, (rank, i) in enumerate(pending) if ranks[rank].can(i, arrived, rank)]
        assert able, "every instruction that is left waits for another"
        for k in sorted(chance.sample(able, chance.randint(1, len(able))), reverse=True):
            rank, i = pending[k]
            if ranks[rank].can(i, arrived, rank):
                ranks[rank].do(i, arrived, rank)
                pending.pop(k)
    assert not arrived, "what is sent is received"
    if program.kind not in ("reduce_scatter", "scatter"):
        for rank_state in ranks:
            for offset, nbytes in rank_state.made.late:
                part = slice(offset // ITEM, (offset + nbytes) // ITEM)
                rank_state.early[part] = rank_state.buffers[lists.OUTPUT][part]
            assert rank_state.early.tobytes() == rank_state.buffers[lists.OUTPUT].tobytes()
    results = [rank_state.buffers[lists.OUTPUT] for rank_state in ranks]
    if program.kind == "swap":
        return [blocks(x, order) for x, order in zip(results, program.arrivals, strict=True)]
    return results


def blocks(x: Floats, order: Floats) -> Floats:
    return x.reshape(len(order), -1)[order].reshape(-1)


def cases() -> list[tuple[Kind, str, int]]:
    return [
        (kind, name, n) for kind in KINDS for name in registry.algorithms(kind) for n in (2, 3, 4, 5, 7, 8)
    ]


@pytest.mark.parametrize(("kind", "name", "n"), cases())
def test_any_order_that_the_waits_allow(kind: Kind, name: str, n: int):
    blocked = kind in IN_BLOCKS
    root = n - 1 if kind in ROOTED else 0
    for slices, unit, piece in itertools.product((1, 3), (1, 11), (8, 1 << 16)):
        program = registry.program(name, kind, n, root=root, slices=slices)
        whole = unit * n if blocked else unit
        size = unit if kind in ("all_gather", "gather") else whole
        operands = [np.random.default_rng(rank).standard_normal(size).astype(np.float32) for rank in range(n)]
        results = run(program, operands, whole, piece, seed=unit + piece)
        expected = execute(program, operands)
        for rank in [root] if kind in ("reduce", "gather") else range(n):
            assert results[rank].tobytes() == np.asarray(expected[rank]).tobytes()


@pytest.mark.parametrize("name", registry.algorithms("swap"))
def test_a_swap_ends_where_sends_wait_for_their_receives(name: str):
    """A slot is sent and received in one round: were its receive posted after its send is done, ranks around
    a circle would wait for each other."""
    for n, slices, piece in itertools.product((2, 3, 5, 8, 13), (1, 3), (8, 1 << 16)):
        program = registry.program(name, "swap", n, slices=slices)
        lists_of_ranks = [instructions(program, rank, 6 * n, ITEM, piece) for rank in range(n)]
        done: list[set[int]] = [set() for _ in lists_of_ranks]
        while any(len(of) < len(listed.code) for of, listed in zip(done, lists_of_ranks, strict=True)):
            ready = [
                {i for i, waits in enumerate(listed.waits) if i not in of and of.issuperset(waits)}
                for of, listed in zip(done, lists_of_ranks, strict=True)
            ]
            posted = {
                (
                    listed.peers[listed.code[i].peer],
                    rank,
                    listed.code[i].message,
                    listed.code[i].kind == lists.SEND,
                )
                for rank, listed in enumerate(lists_of_ranks)
                for i in ready[rank]
                if listed.code[i].kind in (lists.SEND, lists.RECEIVE)
            }
            before = sum(map(len, done))
            for rank, listed in enumerate(lists_of_ranks):
                for i in ready[rank]:
                    row = listed.code[i]
                    sends, local = row.kind == lists.SEND, row.kind in (lists.COPY, lists.ZERO)
                    if local or (rank, listed.peers[row.peer], row.message, not sends) in posted:
                        done[rank].add(i)
            assert sum(map(len, done)) > before, f"{n} ranks, {slices} slices: all wait"


def test_what_has_not_changed_is_sent_from_the_operand():
    listed = instructions(registry.program("ring", "all_reduce", 4), 0, 400, ITEM, 1 << 16)
    assert lists.COPY not in {row.kind for row in listed.code}
    assert listed.scratch == 0
    assert next(row.src for row in listed.code if row.kind == lists.SEND) == lists.INPUT


def test_pieces_are_no_longer_than_asked_and_both_ends_number_them_alike():
    program = registry.program("ring", "all_reduce", 3)
    sender, receiver = (instructions(program, rank, 3000, ITEM, 256) for rank in (0, 1))
    sent = sorted((row.message, row.nbytes) for row in sender.code if row.kind == lists.SEND)
    received = sorted(
        (row.message, row.nbytes)
        for row in receiver.code
        if row.kind in (lists.RECEIVE, lists.RECEIVE_REDUCE)
    )
    assert sent == received
    assert max(nbytes for _, nbytes in sent) <= 256


def test_large_buffers_have_larger_pieces_and_no_more_of_them():
    program = registry.program("ring", "all_gather", 2)
    listed = instructions(program, 0, 2**32, ITEM, 65_536)
    assert len(listed.code) <= 2 * lists.MOST_PIECES
    assert sum(row.nbytes for row in listed.code if row.kind == lists.SEND) == 2**31 * ITEM
    assert (
        max(row.dst_offset + row.nbytes for row in listed.code if row.kind == lists.RECEIVE) == 2**32 * ITEM
    )
