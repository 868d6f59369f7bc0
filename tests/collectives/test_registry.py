"""Programs by name, placement, layout, and errors of users."""

from __future__ import annotations

import numpy as np
import pytest
from support.rounds import keeps_its_promise

from commplan.collectives.layout import bounds
from commplan.collectives.postcondition import postcondition
from commplan.collectives.program import KINDS, Kind, Send
from commplan.collectives.registry import algorithms, files, formula, hierarchical, program, stages, supports
from commplan.collectives.transform import expand_runs, permute_ranks, pruned, runs
from commplan.diagnostics import CommplanError
from commplan.ir.collective_kinds import ROOTED


def test_files_are_found():
    assert algorithms() == (
        "binomial_tree", "bruck", "chain", "double_tree", "halving_doubling", "pairwise",
        "recursive_doubling", "ring", "scatter_gather", "torus",
    )  # fmt: skip
    assert supports("ring", "all_reduce")
    assert not supports("bruck", "broadcast")
    assert not supports("native", "all_reduce")
    assert algorithms("all_gather") == ("bruck", "halving_doubling", "recursive_doubling", "ring", "torus")


@pytest.mark.parametrize(
    ("code", "text", "arguments"),
    [
        ("CP0601", "there is no algorithm `rign`", ("rign", "all_reduce", 2)),
        ("CP0601", "did you mean `ring`?", ("rign", "all_reduce", 2)),
        ("CP0601", "known: binomial_tree", ("xyzzy", "all_reduce", 2)),
        ("CP0736", "there is no collective `allreduce`", ("ring", "allreduce", 2)),
        ("CP0736", "did you mean `all_reduce`?", ("ring", "allreduce", 2)),
        ("CP0603", "`bruck` does not carry out broadcast", ("bruck", "broadcast", 2)),
        ("CP0603", "broadcast takes `binomial_tree`, `chain`", ("bruck", "broadcast", 2)),
        ("CP0737", "at least one rank, not 0", ("ring", "all_reduce", 0)),
        ("CP0737", "at least one rank, not -3", ("ring", "all_reduce", -3)),
    ],
)
def test_mistakes_in_names_and_ranks(code: str, text: str, arguments: tuple[str, Kind, int]):
    with pytest.raises(CommplanError) as caught:
        program(*arguments)
    assert caught.value.diagnostics[0].code == code
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "root", "slices", "text"),
    [
        ("broadcast", 4, 1, "the root of 4 ranks is 0 to 3, not 4"),
        ("broadcast", -1, 1, "the root of 4 ranks is 0 to 3, not -1"),
        ("all_reduce", 1, 1, "all_reduce has no root, found 1"),
        ("all_reduce", 0, 0, "at least one slice, not 0"),
    ],
)
def test_mistakes_in_numbers(kind: Kind, root: int, slices: int, text: str):
    with pytest.raises(CommplanError, match=text) as caught:
        program("ring", kind, 4, root=root, slices=slices)
    assert caught.value.diagnostics[0].code == "CP0737"


@pytest.mark.parametrize(
    ("name", "ranks", "slices"), [("ring", 10**6, 1), ("ring", 256, 1000), ("chain", 10**9, 1)]
)
def test_what_is_too_large_is_refused_at_once(name: str, ranks: int, slices: int):
    with pytest.raises(CommplanError, match="are written out") as caught:
        program(name, "all_reduce", ranks, slices=slices)
    assert caught.value.diagnostics[0].code == "CP0737"


def test_nothing_is_written_out_before_it_is_asked_for():
    for kind in KINDS:
        for name in algorithms(kind):
            assert files()[name].PROGRAMS[kind](10**12).chunks in (1, 2, 10**12)


def test_large_hierarchies_have_stages_alone():
    for kind in KINDS:
        name = "bruck" if kind == "swap" else "ring"
        levels = [(name, 8), (name, 32), (name, 256)]
        assert stages(levels, kind)
        with pytest.raises(CommplanError, match=r"are written out|followed one by one") as caught:
            hierarchical(levels, kind)
        assert caught.value.diagnostics[0].code == "CP0737"


def test_slots_that_are_too_many():
    with pytest.raises(CommplanError, match="20000 ranks with 20000 chunks") as caught:
        program("scatter_gather", "broadcast", 20000)
    assert caught.value.diagnostics[0].code == "CP0737"
    assert program("recursive_doubling", "all_reduce", 65536).chunks == 1


def test_formula_of_an_unknown_algorithm():
    with pytest.raises(CommplanError, match="did you mean `torus`"):
        formula("tours", "all_reduce", 4)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_at_other_places(kind: Kind):
    draw = np.random.default_rng(3)
    for name in algorithms(kind):
        for n in (1, 2, 5, 8, 12):
            places = draw.permutation(n)
            for slices in (1, 2):
                chunk_program = program(name, kind, n, root=n // 2 if kind in ROOTED else 0, slices=slices)
                moved = permute_ranks(chunk_program, places)
                assert places[moved.root] == chunk_program.root
                assert keeps_its_promise(moved, 3 * n)


def test_a_ring_at_other_places_goes_another_way():
    moved = permute_ranks(program("ring", "all_gather", 4), [0, 2, 1, 3])
    send = moved.rounds[0][0]
    assert dict(zip(send.src.tolist(), send.dst.tolist(), strict=True)) == {0: 2, 2: 1, 1: 3, 3: 0}
    assert np.array_equal(send.chunk, send.src)  # each sends its own block first


@pytest.mark.parametrize("places", [[0, 1], [0, 1, 1], [1, 2, 3], [[0, 1, 2]]])
def test_places_are_a_permutation(places: list[int]):
    with pytest.raises(CommplanError, match="each once") as caught:
        permute_ranks(program("ring", "all_reduce", 3), places)
    assert caught.value.diagnostics[0].code == "CP0737"


def test_bounds_of_one_buffer():
    assert bounds("all_reduce", 4, 4, 10).tolist() == [0, 2, 5, 7, 10]
    assert bounds("broadcast", 4, 6, 3).tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert bounds("reduce", 2, 1, 0).tolist() == [0, 0]


def test_bounds_of_blocks():
    assert bounds("all_gather", 3, 3, 12).tolist() == [0, 4, 8, 12]
    assert bounds("reduce_scatter", 2, 6, 8).tolist() == [0, 1, 2, 4, 5, 6, 8]
    assert bounds("scatter", 2, 2, 2**34).tolist() == [0, 2**33, 2**34]


@pytest.mark.parametrize(("chunks", "size"), [(4, 10), (6, 12)])
def test_blocks_are_equal(chunks: int, size: int):
    with pytest.raises(CommplanError, match="multiples of 4") as caught:
        bounds("gather", 4, chunks, size)
    assert caught.value.diagnostics[0].code == "CP0738"


def test_runs_and_singles():
    send = Send(*(np.array(x) for x in ([1, 0, 1], [0, 2, 0], [4, 0, 6], [2, 1, 1])), reduce=True)
    src, dst, chunk = expand_runs(send)
    assert (src.tolist(), dst.tolist(), chunk.tolist()) == ([1, 1, 0, 1], [0, 0, 2, 0], [4, 5, 0, 6])
    back = runs(src, dst, chunk, reduce=True)
    assert [x.tolist() for x in (back.src, back.dst, back.chunk, back.count)] == [
        [0, 1],
        [2, 0],
        [0, 4],
        [1, 3],
    ]
    assert back.reduce


def test_pruned_leaves_out_what_is_there_and_what_nobody_needs():
    def copies(*moves: tuple[int, int, int]) -> tuple[Send, ...]:
        src, dst, chunk = (np.array(x) for x in zip(*moves, strict=True))
        return (Send(src, dst, chunk, np.ones_like(src), reduce=False),)

    promise = postcondition("scatter", 3, 3)
    rounds = pruned(
        [
            copies((0, 1, 1), (0, 1, 2), (0, 2, 1)),  # rank 2 never needs block 1
            copies((0, 2, 2)),
            copies((1, 2, 2)),  # again
            copies((0, 2, 2)),  # and again
        ],
        *promise,
    )
    moves = [[tuple(map(int, m)) for s in each for m in zip(*expand_runs(s), strict=True)] for each in rounds]
    assert moves == [[(0, 1, 1)], [(0, 2, 2)]]
