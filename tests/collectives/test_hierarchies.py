"""Hierarchies: any algorithms over any levels, as programs and as stages."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from support.rounds import counted, expressions, keeps_its_promise, transfers
from test_programs import contributions, roots, sizes

from commplan.collectives.hierarchical import REVERSAL
from commplan.collectives.postcondition import postcondition
from commplan.collectives.program import KINDS, Kind
from commplan.collectives.registry import algorithms, formula, hierarchical, program, stages
from commplan.diagnostics import CommplanError
from commplan.dsl.check.clauses.via import COLLECTIVES
from commplan.ir.collective_kinds import BLOCKED, REDUCING, ROOTED

Levels = list[tuple[str, int]]
SPLITS = [
    (2, 2), (2, 3), (3, 2), (4, 4), (5, 3), (1, 4), (4, 1), (1, 1), (7,),
    (2, 2, 2), (2, 3, 2), (3, 1, 2), (3, 2, 3), (2, 2, 2, 2),
]  # fmt: skip


def mixtures(kind: Kind, split: tuple[int, ...], most: int) -> list[Levels]:
    """Levels with algorithms that carry out `kind` together: all pairs, a sample of more."""
    names = itertools.product(algorithms(), repeat=len(split))
    results: list[Levels] = []
    for choice in names:
        levels = list(zip(choice, split, strict=True))
        try:
            stages(levels, kind)
        except CommplanError as error:
            assert error.diagnostics[0].code == "CP0739"
        else:
            results.append(levels)
    return random.Random(0).sample(results, min(most, len(results)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_mixtures(kind: Kind, split: tuple[int, ...]):
    some = mixtures(kind, split, 8)
    assert some
    for levels in some:
        n = math.prod(split)
        for root, slices, size in zip(sorted(roots(kind, n)), (1, 3, 2), sizes(kind, n), strict=False):
            program = hierarchical(levels, kind, root=root, slices=slices)
            assert (program.ranks, program.root) == (n, root)
            assert keeps_its_promise(program, size), (levels, root)
            contributions(program)
            if kind in REDUCING:
                ends = postcondition(kind, n, program.chunks, root).ends
                sums = expressions(program)
                assert all(len(set(sums[ends[:, c], c])) == 1 for c in range(program.chunks)), levels


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("broadcast", "broadcast"),
        ("reduce", "all_reduce"),
        ("scatter", "reduce_scatter"),
        ("gather", "all_gather"),
    ],
)
def test_whatever_the_language_lets_pass_composes(stage: str, kind: Kind):
    names = [name for name, of in COLLECTIVES.items() if stage in of and name != "hierarchical"]
    for inner, outer in itertools.product(names, repeat=2):
        assert stages([(inner, 3), (outer, 2)], kind)
        if "native" not in (inner, outer):
            assert keeps_its_promise(hierarchical([(inner, 3), (outer, 2)], kind), 24)


def test_all_reduce_by_shards():
    parts = stages([("ring", 4), ("halving_doubling", 8), ("recursive_doubling", 2)], "all_reduce")
    assert [(stage.level, stage.algorithm, stage.kind, stage.share) for stage in parts] == [
        (0, "ring", "reduce_scatter", Fraction(1)),
        (1, "halving_doubling", "reduce_scatter", Fraction(1, 4)),
        (2, "recursive_doubling", "all_reduce", Fraction(1, 32)),
        (1, "halving_doubling", "all_gather", Fraction(1, 4)),
        (0, "ring", "all_gather", Fraction(1)),
    ]


def test_all_reduce_by_speakers():
    parts = stages([("binomial_tree", 4), ("ring", 8)], "all_reduce")
    assert [(stage.level, stage.kind, stage.share, stage.fixed) for stage in parts] == [
        (0, "reduce", Fraction(1), ()),
        (1, "all_reduce", Fraction(1), (0,)),
        (0, "broadcast", Fraction(1), ()),
    ]


def test_all_reduce_by_all():
    parts = stages([("recursive_doubling", 4), ("recursive_doubling", 8)], "all_reduce")
    assert [(stage.level, stage.kind, stage.share) for stage in parts] == [
        (0, "all_reduce", Fraction(1)),
        (1, "all_reduce", Fraction(1)),
    ]


def test_broadcast_from_a_root_inside():
    parts = stages([("ring", 4), ("chain", 3)], "broadcast", root=6)
    assert [(stage.level, stage.kind, stage.root, stage.share, stage.fixed) for stage in parts] == [
        (0, "scatter", 2, Fraction(1), (1,)),
        (1, "broadcast", 1, Fraction(1, 4), ()),
        (0, "all_gather", 2, Fraction(1), ()),
    ]


@pytest.mark.parametrize("kind", REVERSAL)
def test_stages_reverse(kind: Kind):
    levels = [("ring", 3), ("torus", 4), ("ring", 2)]
    forward, back = stages(levels, kind, root=5 * (kind in ROOTED)), []
    for stage in reversed(stages(levels, REVERSAL[kind], root=5 * (kind in ROOTED))):
        back.append(stage._replace(kind=REVERSAL[stage.kind]))
    assert forward == tuple(back)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_has_the_rounds_of_its_stages(kind: Kind):
    for levels in mixtures(kind, (4, 3), 30) + mixtures(kind, (2, 3, 2), 10):
        counts = counted(hierarchical(levels, kind))
        parts = [
            (stage, formula(stage.algorithm, stage.kind, levels[stage.level][1]))
            for stage in stages(levels, kind)
        ]
        assert counts[0] <= sum(rounds for _, (rounds, _) in parts)
        assert counts[1] <= sum(share * stage.share for stage, (_, share) in parts)
        if kind not in ("broadcast", "reduce"):  # where transfers are left out
            assert counts[0] == sum(rounds for _, (rounds, _) in parts), levels


def test_what_crosses_is_shared():
    """Of 4 hosts of 8 ranks, with rings, each rank sends 2*3/4 of an eighth to another host."""
    program = hierarchical([("ring", 8), ("ring", 4)], "all_reduce")
    crossing = [0] * 32
    for each in program.rounds:
        for src, dst, _, _ in transfers(each):
            crossing[src] += src // 8 != dst // 8
    assert {Fraction(count, program.chunks) for count in crossing} == {Fraction(2 * 3, 4 * 8)}
    assert counted(program) == (2 * 7 + 2 * 3, Fraction(2 * 31, 32))


@pytest.mark.parametrize("kind", BLOCKED)
def test_blocks_are_in_rank_order_whatever_the_levels(kind: Kind):
    flat = program("ring", kind, 12, root=0)
    chunk_program = hierarchical([("ring", 2), ("ring", 3), ("ring", 2)], kind)
    assert chunk_program.chunks == flat.chunks == 12
    assert (
        postcondition(kind, 12, 12).ends
        == postcondition(chunk_program.kind, chunk_program.ranks, chunk_program.chunks).ends
    ).all()
    assert keeps_its_promise(chunk_program, 36)


def test_65536_ranks_are_five_stages():
    parts = stages([("native", 8), ("ring", 32), ("torus", 256)], "all_reduce")
    assert [stage.share for stage in parts] == [1, Fraction(1, 8), Fraction(1, 256), Fraction(1, 8), 1]


def code(call: object, *args: object, **kwargs: object) -> str:
    assert callable(call)
    with pytest.raises(CommplanError) as caught:
        call(*args, **kwargs)
    return caught.value.diagnostics[0].code


def test_mistakes():
    assert code(hierarchical, [("native", 2), ("ring", 2)], "all_reduce") == "CP0739"
    assert code(hierarchical, [], "all_reduce") == "CP0739"
    assert code(hierarchical, [("binomial_tree", 2), ("ring", 2)], "all_gather") == "CP0739"
    assert code(hierarchical, [("rign", 2)], "all_reduce") == "CP0601"
    assert code(hierarchical, [("ring", 2)], "allreduce") == "CP0736"
    assert code(hierarchical, [("ring", 0)], "all_reduce") == "CP0737"
    assert code(hierarchical, [("ring", 2), ("ring", 2)], "broadcast", root=4) == "CP0737"
    assert code(stages, [("ring", 2)], "all_reduce", root=1) == "CP0737"
    assert code(stages, [("native", 2), ("native", 2)], "gather") == "CP0739"


def test_the_message_says_what_would_do():
    with pytest.raises(CommplanError, match="needs gather, and `bruck` does not carry it out"):
        stages([("bruck", 2), ("ring", 2)], "gather")
    with pytest.raises(CommplanError, match=r"gather takes `binomial_tree`, `chain`, `ring`, `torus`$"):
        stages([("bruck", 2), ("ring", 2)], "gather")
