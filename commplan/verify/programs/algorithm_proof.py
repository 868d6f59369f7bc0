"""Cached proofs of the algorithms that a user selects with `via`, including hierarchies."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import NamedTuple

from commplan.collectives.hierarchical import NATIVE
from commplan.collectives.postcondition import lower_bounds
from commplan.collectives.program import Kind, Rotation
from commplan.collectives.registry import files, program, supports
from commplan.collectives.registry import stages as stages_of
from commplan.diagnostics import fail
from commplan.verify.programs.composition import LevelProgram, compose, task_of
from commplan.verify.programs.counterexample import Counterexample
from commplan.verify.programs.proof import Counted, count, prove

LARGEST = 1 << 22  # most slots, summed over ranks, of a program that is proved rank by rank
LARGEST_ROTATING = 1 << 24  # most slots if one chunk represents all: a ring of 4,096 ranks
RANKS = 1 << 17  # most ranks; each value is a bit set of ranks, so memory is quadratic


class Proof(NamedTuple):
    """The result of proving an algorithm for one collective.

    Attributes:
        tasks: the programs that were checked, one for each level that is not native; duplicates omitted.
        assumed: the native levels, in words; empty if everything was checked.
        cost: the total cost without native levels.
        wrong: counterexamples, each with a description of the program that it refutes; empty if the algorithm
            is correct.
    """

    tasks: tuple[LevelProgram, ...]
    assumed: tuple[str, ...]
    cost: Counted
    wrong: tuple[tuple[str, Counterexample], ...]


@functools.lru_cache(maxsize=1 << 14)
def prove_task(task: LevelProgram) -> tuple[tuple[Counterexample, ...], Counted]:
    """Prove one program and count its cost.

    Returns:
        The counterexamples, empty if the program is proved, and the cost.

    Raises:
        CommplanError: CP0748 if the program has too many slots to be proved, or as `registry.program` if
            there is no such program.
    """
    algorithm, kind, ranks, root = task
    if ranks > RANKS:
        message = f"{str_of(task)} has too many ranks to be proved"
        fail("CP0748", message, f"at most {RANKS}; hierarchical(..) is proved level by level")
    if supports(algorithm, kind) and ranks > 0:  # before all rounds are made
        body = files()[algorithm].PROGRAMS[kind](ranks)
        first = next(iter(body.rounds), ()) if body.chunks * ranks <= LARGEST_ROTATING else ()
        rotating = any(isinstance(send, Rotation) for send in first)
        if body.chunks * ranks > (LARGEST_ROTATING if rotating else LARGEST):
            message = f"{str_of(task)} has {body.chunks} chunks on each: too many to be proved"
            most = f"at most {LARGEST} in all are, or {LARGEST_ROTATING} of a program of rotations"
            fail("CP0748", message, f"{most}; hierarchical(..) has fewer, and is faster at this size")
    chunked = program(algorithm, kind, ranks, root=root)
    return prove(chunked), count(chunked)


def _no_cost(kind: Kind, ranks: int) -> Counted:
    """A cost of 0, with the lower bounds of the collective."""
    nothing = Fraction(0)
    return Counted(0, nothing, nothing, nothing, *lower_bounds(kind, ranks))


def prove_algorithm(algorithm: str, kind: Kind, ranks: int, root: int = 0) -> Proof:
    """Prove an algorithm; native algorithms are assumed to be correct.

    Args:
        algorithm: name of the algorithm, or `native`.
        kind: the collective.
        ranks: number of ranks.
        root: rank of the root; 0 for collectives without one.

    Raises:
        CommplanError: as `prove_task`.
    """
    if algorithm == NATIVE:
        return Proof((), (NATIVE,), _no_cost(kind, ranks), ())
    task = LevelProgram(algorithm, kind, ranks, root)
    wrong, counted = prove_task(task)
    return Proof((task,), (), counted, tuple((str_of(task), example) for example in wrong))


def prove_sliced(algorithm: str, kind: Kind, ranks: int, root: int, slices: int) -> Proof:
    """Prove an algorithm with every chunk split into `slices` that are pipelined through the rounds.

    The result follows from the proof of the unsliced program, since slices share no slot and both ends of a
    message stay in one round; the sliced program is nevertheless proved directly. If the unsliced program is
    wrong, or native, its proof is returned.

    Args:
        algorithm: as in `prove_algorithm`, like `kind`, `ranks` and `root`.
        kind: the collective.
        ranks: number of ranks.
        root: rank of the root.
        slices: number of slices of each chunk, at least 1.

    Raises:
        CommplanError: as `prove_task`, and CP0748 if the sliced program has too many slots.
    """
    proof = prove_algorithm(algorithm, kind, ranks, root)
    if algorithm == NATIVE or proof.wrong:
        return proof
    chunks = program(algorithm, kind, ranks, root=root).chunks * slices
    if chunks * ranks > LARGEST:  # before they are laid out, which takes seconds
        fail("CP0748", f"{str_of(proof.tasks[0])} has {chunks} chunks on each: too many to be proved")
    sliced = program(algorithm, kind, ranks, root=root, slices=slices)
    wrong = tuple((str_of(proof.tasks[0]), example) for example in prove(sliced))
    return Proof(proof.tasks, (), count(sliced), wrong)


@functools.lru_cache(maxsize=1 << 10)
def prove_levels(levels: tuple[tuple[str, int], ...], kind: Kind, root: int = 0) -> Proof:
    """Prove a hierarchical algorithm.

    Args:
        levels: algorithm and number of ranks of each level, innermost first.
        kind: the collective.
        root: rank of the root, with the innermost level fastest.

    Raises:
        CommplanError: as `prove_task`, or as `registry.stages` if the levels do not form a hierarchy.
    """
    stages = stages_of(levels, kind, root=root)
    tasks = dict.fromkeys(task_of(levels, stage) for stage in stages)
    proofs = {task: prove_task(task) for task in tasks if task.algorithm != NATIVE}
    assumed = tuple(f"{task.kind} of {task.ranks}" for task in tasks if task.algorithm == NATIVE)
    wrong = [(str_of(task), example) for task, (examples, _) in proofs.items() for example in examples]
    whole = compose(levels, kind, stages, root)
    if whole is not None:
        wrong.append(("the levels together", whole))
    total = _no_cost(kind, math.prod(size for _, size in levels))
    for stage in stages:
        if stage.algorithm != NATIVE:
            _, cost = proofs[task_of(levels, stage)]
            total = total._replace(
                rounds=total.rounds + cost.rounds,
                sent=total.sent + cost.sent * stage.share,
                received=total.received + cost.received * stage.share,
                staged=max(total.staged, cost.staged * stage.share),
            )
    return Proof(tuple(proofs), assumed, total, tuple(wrong))


def str_of(task: LevelProgram) -> str:
    """Describe a task, for example `ring for all_reduce over 13 ranks`."""
    root = f" from rank {task.root}" if task.root else ""
    return f"{task.algorithm} for {task.kind} over {task.ranks} ranks{root}"
