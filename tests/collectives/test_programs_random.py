"""Random chunk programs: executed and compared with their postconditions."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rounds import expressions, keeps_its_promise, transfers
from test_programs import contributions

from commplan.collectives.layout import bounds
from commplan.collectives.postcondition import postcondition
from commplan.collectives.program import IN_BLOCKS, KINDS, ChunkProgram, Kind
from commplan.collectives.registry import algorithms, hierarchical, program, stages
from commplan.collectives.transform import permute_ranks
from commplan.diagnostics import CommplanError
from commplan.ir.collective_kinds import REDUCING, ROOTED

kinds = st.sampled_from(KINDS)


@st.composite
def programs(draw: st.DrawFn) -> ChunkProgram:
    kind = draw(kinds)
    n = draw(st.integers(1, 24))
    root = draw(st.integers(0, n - 1)) if kind in ROOTED else 0
    result = program(
        draw(st.sampled_from(algorithms(kind))), kind, n, root=root, slices=draw(st.integers(1, 4))
    )
    return permute_ranks(result, draw(st.permutations(range(n)))) if draw(st.booleans()) else result


@st.composite
def hierarchies(draw: st.DrawFn) -> ChunkProgram:
    kind: Kind = draw(kinds)
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).filter(lambda ns: math.prod(ns) <= 30))
    levels = [(draw(st.sampled_from(algorithms())), n) for n in shape]
    root = draw(st.integers(0, math.prod(shape) - 1)) if kind in ROOTED else 0
    try:
        stages(levels, kind)
    except CommplanError:
        levels = [("bruck" if kind == "swap" else "ring", n) for n in shape]
    result = hierarchical(levels, kind, root=root, slices=draw(st.integers(1, 3)))
    return (
        permute_ranks(result, draw(st.permutations(range(result.ranks)))) if draw(st.booleans()) else result
    )


def right(chunk_program: ChunkProgram, size: int) -> None:
    assert keeps_its_promise(
        chunk_program, size * chunk_program.ranks if chunk_program.kind in IN_BLOCKS else size
    )
    contributions(chunk_program)
    if chunk_program.kind in REDUCING:
        ends = postcondition(
            chunk_program.kind, chunk_program.ranks, chunk_program.chunks, chunk_program.root
        ).ends
        sums = expressions(chunk_program)
        assert all(len(set(sums[ends[:, c], c])) == 1 for c in range(chunk_program.chunks))


@settings(max_examples=60)
@given(programs(), st.integers(0, 40))
def test_programs(chunk_program: ChunkProgram, size: int):
    right(chunk_program, size)


@settings(max_examples=60)
@given(hierarchies(), st.integers(0, 40))
def test_hierarchies(chunk_program: ChunkProgram, size: int):
    right(chunk_program, size)


@settings(max_examples=60)
@given(programs(), st.data())
def test_places_are_names_alone(chunk_program: ChunkProgram, data: st.DataObject):
    """Permuting the ranks of a program and permuting them back gives the same program."""
    places = np.array(data.draw(st.permutations(range(chunk_program.ranks))), np.int64)
    back = permute_ranks(permute_ranks(chunk_program, places), np.argsort(places))
    assert back.root == chunk_program.root
    for before, after in zip(chunk_program.rounds, back.rounds, strict=True):
        assert set(transfers(before)) == set(transfers(after))


@settings(max_examples=100)
@given(kinds, st.integers(1, 9), st.integers(1, 9), st.integers(0, 300))
def test_chunks_are_near_equal_and_in_order(kind: Kind, ranks: int, parts: int, size: int):
    if kind in IN_BLOCKS:
        size *= ranks
    at = bounds(kind, ranks, ranks * parts, size)
    assert at[0] == 0 and at[-1] == size
    assert np.ptp(np.diff(at)) <= 1
    if kind in IN_BLOCKS:
        assert at[::parts].tolist() == [r * (size // ranks) for r in range(ranks + 1)]
