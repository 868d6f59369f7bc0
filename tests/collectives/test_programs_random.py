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
from commplan.collectives.program import IN_BLOCKS, KINDS, REDUCING, ROOTED, ChunkProgram, Kind
from commplan.collectives.registry import algorithms, hierarchical, program, stages
from commplan.collectives.transform import permute_ranks
from commplan.diagnostics import CommplanError

kinds = st.sampled_from(KINDS)


@st.composite
def programs(draw: st.DrawFn) -> ChunkProgram:
    kind = draw(kinds)
    n = draw(st.integers(1, 24))
    root = draw(st.integers(0, n - 1)) if kind in ROOTED else 0
    made = program(
        draw(st.sampled_from(algorithms(kind))), kind, n, root=root, slices=draw(st.integers(1, 4))
    )
    return permute_ranks(made, draw(st.permutations(range(n)))) if draw(st.booleans()) else made


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
    made = hierarchical(levels, kind, root=root, slices=draw(st.integers(1, 3)))
    return permute_ranks(made, draw(st.permutations(range(made.ranks)))) if draw(st.booleans()) else made


def right(made: ChunkProgram, size: int) -> None:
    assert keeps_its_promise(made, size * made.ranks if made.kind in IN_BLOCKS else size)
    contributions(made)
    if made.kind in REDUCING:
        ends = postcondition(made.kind, made.ranks, made.chunks, made.root).ends
        found = expressions(made)
        assert all(len(set(found[ends[:, c], c])) == 1 for c in range(made.chunks))


@settings(max_examples=60)
@given(programs(), st.integers(0, 40))
def test_programs(made: ChunkProgram, size: int):
    right(made, size)


@settings(max_examples=60)
@given(hierarchies(), st.integers(0, 40))
def test_hierarchies(made: ChunkProgram, size: int):
    right(made, size)


@settings(max_examples=60)
@given(programs(), st.data())
def test_places_are_names_alone(made: ChunkProgram, data: st.DataObject):
    """Permuting the ranks of a program and permuting them back gives the same program."""
    places = np.array(data.draw(st.permutations(range(made.ranks))), np.int64)
    back = permute_ranks(permute_ranks(made, places), np.argsort(places))
    assert back.root == made.root
    for one, two in zip(made.rounds, back.rounds, strict=True):
        assert set(transfers(one)) == set(transfers(two))


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
