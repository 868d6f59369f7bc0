"""Every algorithm, every collective: results, redundant and clashing transfers, equal sums, formulas."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.rounds import counted, expressions, keeps_its_promise, transfers

import commplan.collectives
from commplan.collectives.postcondition import lower_bounds, postcondition, sources
from commplan.collectives.program import IN_BLOCKS, KINDS, ChunkProgram, Kind, Send
from commplan.collectives.registry import algorithms, formula, program
from commplan.dsl.check.clauses.via import COLLECTIVES
from commplan.ir.collective_kinds import REDUCING, ROOTED

ALL: list[tuple[str, Kind]] = [(name, kind) for kind in KINDS for name in algorithms(kind)]
every_program = pytest.mark.parametrize(("name", "kind"), ALL, ids=str)


def roots(kind: Kind, n: int) -> set[int]:
    return {0, n // 2, n - 1} if kind in ROOTED else {0}


def sizes(kind: Kind, n: int) -> tuple[int, ...]:
    """Of buffers: some elements per chunk with a rest, fewer elements than chunks, none."""
    return (5 * n, 2 * n, n, 0) if kind in IN_BLOCKS else (7 * n + 3, n + 1, 2, 0)


def test_the_algorithms_are_those_of_the_language():
    kinds: dict[str, Kind] = {
        "broadcast": "broadcast",
        "reduce": "all_reduce",
        "elastic sync": "all_reduce",
        "scatter": "reduce_scatter",
        "gather": "all_gather",
        "swap": "swap",
    }
    for name, stages in COLLECTIVES.items():
        if name not in ("native", "hierarchical"):
            assert set(stages) == {stage for stage, kind in kinds.items() if name in algorithms(kind)}, name
    assert set(algorithms()) == set(COLLECTIVES) - {"native", "hierarchical"}


@every_program
def test_keeps_its_promise(name: str, kind: Kind):
    for n in range(1, 18):
        for root in roots(kind, n):
            for slices, size in zip((1, 2, 3, 5), sizes(kind, n), strict=True):
                chunk_program = program(name, kind, n, root=root, slices=slices)
                assert (chunk_program.name, chunk_program.kind, chunk_program.ranks, chunk_program.root) == (
                    name,
                    kind,
                    n,
                    root,
                )
                assert keeps_its_promise(chunk_program, size, seed=n), (
                    f"{n} ranks, root {root}, {slices} slices"
                )


def contributions(chunk_program: ChunkProgram) -> None:
    """Fail if a transfer is redundant, sends undefined data, races, or affects no result."""
    starts, ends = postcondition(
        chunk_program.kind, chunk_program.ranks, chunk_program.chunks, chunk_program.root
    )
    holds = [
        [{r} if starts[r, c] else set[int]() for c in range(chunk_program.chunks)]
        for r in range(chunk_program.ranks)
    ]
    for each in chunk_program.rounds:
        assert each and all(send.src.size for send in each)
        into = Counter((dst, chunk) for _, dst, chunk, _ in transfers(each))
        assert max(into.values()) == 1, "two into one slot"
        new: dict[tuple[int, int], set[int]] = {}
        for src, dst, chunk, reduce in transfers(each):
            assert src != dst
            came, target = holds[src][chunk], holds[dst][chunk]
            assert came, "what has never been written is sent"
            assert not (reduce and came & target), "a term is counted twice"
            assert reduce or not came <= target, "nothing new"
            new[dst, chunk] = came | target if reduce else came
        for (dst, chunk), content in new.items():
            holds[dst][chunk] = content
    for r, c in np.argwhere(ends):
        whole = (
            {int(sources(chunk_program)[r, c])}
            if chunk_program.kind == "swap"
            else set(np.flatnonzero(starts[:, c]))
        )
        assert holds[r][c] == whole
    needed = ends.copy()
    for each in reversed(chunk_program.rounds):
        remaining = needed.copy()
        for _, dst, chunk, reduce in transfers(each):
            assert needed[dst, chunk], "what arrives matters to nobody"
            remaining[dst, chunk] = reduce
        for src, _, chunk, _ in transfers(each):
            remaining[src, chunk] = True
        needed = remaining


@every_program
def test_no_transfer_is_useless_and_none_clash(name: str, kind: Kind):
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 20):
        for root in roots(kind, n):
            contributions(program(name, kind, n, root=root))
        contributions(program(name, kind, n, slices=3))


@every_program
def test_every_rank_has_the_same_sum(name: str, kind: Kind):
    if kind not in REDUCING:
        return
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 19, 24):
        for slices in (1, 2):
            chunk_program = program(name, kind, n, slices=slices)
            ends = postcondition(kind, n, chunk_program.chunks).ends
            sums = expressions(chunk_program)
            assert all(len(set(sums[ends[:, c], c])) == 1 for c in range(chunk_program.chunks)), n


def test_the_check_of_sums_tells_orders_apart():
    """All ranks of a ring that passes on whole sums have them in another order each."""
    n = 4
    chunk_program = program("ring", "all_gather", n)
    turning = tuple(
        tuple(Send(s.src, s.dst, 0 * s.chunk, s.count, True) for s in each) for each in chunk_program.rounds
    )
    wrong = ChunkProgram("wrong", "all_reduce", n, 1, turning)
    assert len(set(expressions(wrong)[:, 0])) > 1


@every_program
def test_formula(name: str, kind: Kind):
    for n in range(1, 65):
        counts = counted(program(name, kind, n))
        assert counts == formula(name, kind, n), n
        least = lower_bounds(kind, n)
        assert counts[0] >= least[0] and counts[1] >= least[1], n


def test_formula_does_not_depend_on_the_root():
    for name, kind in ALL:
        if kind in ROOTED:
            assert counted(program(name, kind, 13, root=9)) == formula(name, kind, 13)


ROUNDS_OPTIMAL = {
    ("recursive_doubling", "all_reduce"),
    ("recursive_doubling", "all_gather"),
    ("halving_doubling", "reduce_scatter"),
    ("halving_doubling", "all_gather"),
    ("bruck", "reduce_scatter"),
    ("bruck", "all_gather"),
    ("binomial_tree", "broadcast"),
    ("binomial_tree", "reduce"),
    ("binomial_tree", "scatter"),
    ("binomial_tree", "gather"),
    ("double_tree", "broadcast"),
    ("bruck", "swap"),
}
MORE_BYTES = {
    ("recursive_doubling", "all_reduce"),
    ("binomial_tree", "all_reduce"),
    ("binomial_tree", "broadcast"),
    ("binomial_tree", "reduce"),
    ("chain", "all_reduce"),
    ("double_tree", "all_reduce"),
    ("scatter_gather", "broadcast"),
    ("scatter_gather", "reduce"),
    ("torus", "broadcast"),
    ("torus", "reduce"),
    ("bruck", "swap"),
}


@every_program
def test_what_is_optimal(name: str, kind: Kind):
    rounds = [formula(name, kind, n)[0] == lower_bounds(kind, n)[0] for n in range(1, 65)]
    nbytes = [formula(name, kind, n)[1] == lower_bounds(kind, n)[1] for n in range(1, 65)]
    assert all(rounds) == ((name, kind) in ROUNDS_OPTIMAL)
    assert all(nbytes) == ((name, kind) not in MORE_BYTES)


def test_the_usual_numbers():
    assert formula("ring", "all_reduce", 8) == (14, Fraction(7, 4))
    assert formula("recursive_doubling", "all_reduce", 6) == (3, Fraction(3))
    assert formula("recursive_doubling", "all_reduce", 7) == (3, Fraction(4))
    assert formula("halving_doubling", "all_reduce", 8) == (6, Fraction(7, 4))
    assert formula("torus", "all_reduce", 12) == (10, Fraction(11, 6))
    assert formula("double_tree", "broadcast", 16) == (4, Fraction(1))
    assert formula("chain", "broadcast", 5) == (4, Fraction(1))


def test_one_message_out_and_one_in():
    """But for double_tree, and recursive_doubling where halves differ, a rank has one partner to send to in a
    round and one to receive from."""
    for name, kind in ALL:
        for n in (2, 3, 6, 8, 13, 16):
            if name == "double_tree" or (name == "recursive_doubling" and n & (n - 1)):
                continue
            for each in program(name, kind, n).rounds:
                pairs = {(src, dst) for src, dst, _, _ in transfers(each)}
                assert len(pairs) == len({src for src, _ in pairs}) == len({dst for _, dst in pairs})


def test_a_rank_is_an_inner_node_of_one_of_the_trees():
    for n in range(2, 65):
        sends: set[tuple[int, int]] = set()
        for each in program("double_tree", "broadcast", n).rounds:
            sends |= {(src, chunk) for src, _, chunk, _ in transfers(each) if src}
        assert max(Counter(src for src, _ in sends).values(), default=0) <= 1


@pytest.mark.parametrize("slices", [1, 2, 7])
def test_slices_follow_each_other(slices: int):
    chunk_program = program("chain", "broadcast", 5, slices=slices)
    assert chunk_program.chunks == slices
    assert len(chunk_program.rounds) == 4 + slices - 1
    assert counted(chunk_program)[1] == 1
    moves = {(time, *move) for time, each in enumerate(chunk_program.rounds) for move in transfers(each)}
    assert moves == {(r + j, r, r + 1, j, False) for r in range(4) for j in range(slices)}


def test_slices_of_blocks_stay_in_their_block():
    chunk_program = program("ring", "all_gather", 3, slices=2)
    first = [(src, chunk) for src, _, chunk, _ in transfers(chunk_program.rounds[0])]
    assert sorted(first) == [(0, 0), (1, 2), (2, 4)]
    second = [(src, chunk) for src, _, chunk, _ in transfers(chunk_program.rounds[1])]
    assert sorted(second) == [(0, 1), (0, 4), (1, 0), (1, 3), (2, 2), (2, 5)]


def test_programs_are_the_same_each_time():
    for name, kind in ALL:
        first, second = (program(name, kind, 12, slices=2) for _ in range(2))
        assert [list(transfers(each)) for each in first.rounds] == [
            list(transfers(each)) for each in second.rounds
        ]


def test_examples_in_docstrings():
    for info in pkgutil.iter_modules(commplan.collectives.__path__):
        module = importlib.import_module(f"commplan.collectives.{info.name}")
        assert doctest.testmod(module).failed == 0


def test_the_numbers_of_the_manual():
    page = (Path(commplan.collectives.__path__[0]).parents[1] / "docs" / "collectives.md").read_text("utf-8")
    rows = re.findall(r"^\| (all-reduce|broadcast) by `(\w+)` \|(.*)\|$", page, re.M)
    assert len(rows) == 9
    for collective, name, cells in rows:
        kind: Kind = "broadcast" if collective == "broadcast" else "all_reduce"
        for n, cell in zip((6, 8, 64), cells.split("|"), strict=True):
            rounds, share = cell.split(",")
            assert formula(name, kind, n) == (int(rounds), Fraction(share.strip())), (name, n)


def test_the_ring_of_the_manual():
    page = (Path(commplan.collectives.__path__[0]).parents[1] / "docs" / "collectives.md").read_text("utf-8")
    rows = re.findall(r"(\d) sends  ([\d |]+)$", page, re.M)
    assert len(rows) == 4
    for rank, cells in rows:
        sent = [chunk for each in program("ring", "all_reduce", 4).rounds
                for src, _, chunk, _ in transfers(each) if src == int(rank)]  # fmt: skip
        assert sent == [int(cell) for cell in cells.replace("|", " ").split()]
