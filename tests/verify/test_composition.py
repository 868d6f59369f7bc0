"""Hierarchies proved by their levels: agreement with the direct proof, and invalid compositions."""

from __future__ import annotations

import itertools
import random

import pytest

from commplan.collectives.hierarchical import LevelStage
from commplan.collectives.program import KINDS, Kind
from commplan.collectives.registry import algorithms, hierarchical, stages
from commplan.diagnostics import CommplanError
from commplan.ir.collective_kinds import ROOTED
from commplan.verify.programs import algorithm_proof
from commplan.verify.programs.composition import compose
from commplan.verify.programs.counterexample import Counterexample
from commplan.verify.programs.proof import prove

SIZES = [(2, 2), (3, 2), (2, 5), (4, 4), (1, 3), (2, 2, 2), (3, 1, 2), (2, 3, 2), (4, 4, 4)]


def _some(rng: random.Random, kind: Kind, levels: int) -> list[tuple[str, ...]]:
    names = algorithms(kind) if kind == "swap" else algorithms()
    choices = list(itertools.product(names, repeat=levels))
    return rng.sample(choices, min(20, len(choices)))


@pytest.mark.parametrize("kind", KINDS)
def test_composed_and_direct_proofs_agree(kind: Kind) -> None:
    rng, proved = random.Random(kind), 0
    for sizes in SIZES:
        for names in _some(rng, kind, len(sizes)):
            levels = list(zip(names, sizes, strict=True))
            ranks = 1
            for size in sizes:
                ranks *= size
            root = rng.randrange(ranks) if kind in ROOTED else 0
            try:
                whole = hierarchical(levels, kind, root=root)
            except CommplanError:
                continue
            proved += 1
            assert compose(levels, kind, stages(levels, kind, root=root), root) is None
            assert algorithm_proof.prove_levels(tuple(levels), kind, root).wrong == ()
            assert prove(whole) == (), (levels, root)
    assert proved > 15


def test_65536_ranks_take_three_levels() -> None:
    levels = [("ring", 8), ("ring", 32), ("halving_doubling", 256)]
    proof = algorithm_proof.prove_levels(tuple(levels), "all_reduce")
    assert proof.wrong == ()
    assert {(task.kind, task.ranks) for task in proof.tasks} == {
        ("reduce_scatter", 8), ("all_gather", 8), ("reduce_scatter", 32), ("all_gather", 32),
        ("all_reduce", 256),
    }  # fmt: skip
    assert proof.cost.least_rounds == 16
    assert proof.cost.sent >= proof.cost.least


LEVELS = [("ring", 4), ("ring", 3)]


def changed(index: int, **fields: object) -> list[LevelStage]:
    parts = list(stages(LEVELS, "all_reduce"))
    parts[index] = parts[index]._replace(**fields)  # pyright: ignore[reportArgumentType]
    return parts


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (changed(0)[:-1], "at the end all_reduce over level 0 needs all places, summed"),
        (changed(0)[1:], "1/4"),
        (changed(0)[::-1], "needs the owner of the part, and has all places"),
        (changed(1, level=0), "needs all places, and has the owner of the part"),
        (changed(0, kind="all_reduce"), "stage 1, all_reduce at level 1, needs 1 of the buffer, and has 1/4"),
        (changed(1, fixed=(0,)), "needs groups at the root's place of levels [], and has levels [0]"),
        ([*changed(0), *changed(0)[:1]], "every contribution once, and has the sums of level 0 once more"),
    ],
)
def test_stages_that_do_not_add_up(wrong: list[LevelStage], message: str) -> None:
    counterexample = compose(LEVELS, "all_reduce", wrong)
    assert counterexample is not None
    assert (counterexample.code, message in counterexample.message) == ("CP0740", True), (
        counterexample.message
    )


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_roots_of_stages_are_the_place_of_the_root(kind: Kind) -> None:
    levels = [("binomial_tree", 4), ("binomial_tree", 3)]
    right = stages(levels, kind, root=7)
    assert compose(levels, kind, right, 7) is None
    wrong = [stage._replace(root=0) if stage.level == 0 else stage for stage in right]
    counterexample = compose(levels, kind, wrong, 7)
    assert counterexample is not None
    assert "needs root 3, and has root 0" in counterexample.message


def test_a_broken_level_breaks_the_hierarchy(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Counterexample("wrong", (1,), (), 0, "ranks 0-3", "rank 1", "rank 1 lacks a term")
    real = algorithm_proof.prove_task

    def prove_task(task: algorithm_proof.LevelProgram) -> object:
        wrong, costs = real(task)
        return ((broken,), costs) if task.ranks == 5 else (wrong, costs)

    monkeypatch.setattr(algorithm_proof, "prove_task", prove_task)
    proof = algorithm_proof.prove_levels((("ring", 2), ("chain", 5)), "broadcast", root=1)
    assert [(subject, wrong) for subject, wrong in proof.wrong] == [
        ("chain for broadcast over 5 ranks", broken)
    ]


def test_tasks_are_listed_once_and_native_is_believed() -> None:
    proof = algorithm_proof.prove_levels((("ring", 2), ("native", 3)), "all_reduce")
    assert [task.kind for task in proof.tasks] == ["reduce_scatter", "all_gather"]
    assert (proof.wrong, proof.assumed) == ((), ("all_reduce of 3",))
    assert algorithm_proof.prove_algorithm("native", "all_reduce", 9).tasks == ()


def test_what_is_too_large_to_be_proved_is_said() -> None:
    with pytest.raises(CommplanError) as caught:
        algorithm_proof.prove_algorithm("ring", "all_reduce", 65536)
    assert caught.value.diagnostics[0].code == "CP0748"
    with pytest.raises(CommplanError) as caught:
        algorithm_proof.prove_sliced("ring", "all_reduce", 64, 0, 2000)
    assert caught.value.diagnostics[0].code == "CP0748"
    with pytest.raises(CommplanError, match="too many ranks"):
        algorithm_proof.prove_algorithm("recursive_doubling", "all_reduce", 2**20)
    assert algorithm_proof.prove_algorithm("recursive_doubling", "all_reduce", 3000).wrong == ()
    assert algorithm_proof.prove_sliced("ring", "all_reduce", 6, 0, 4).wrong == ()
