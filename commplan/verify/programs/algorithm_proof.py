"""Proofs of what a user names after `via`: one algorithm, or a hierarchy of them. Each is made once."""

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
from commplan.verify.programs.composition import Task, compose, task_of
from commplan.verify.programs.counterexample import Counterexample
from commplan.verify.programs.proof import Counted, count, prove

LARGEST = 1 << 22  # slots of all ranks together, of a program that is proved rank by rank
LARGEST_ROTATING = 1 << 24  # the same, if one chunk stands for all: 4,096 ranks in a ring
RANKS = 1 << 17  # of such a program; each has a set of ranks as bits, so memory grows with the square


class Proof(NamedTuple):
    """What is known of one algorithm for one collective.

    tasks: the programs that were proved. believed: levels that are the backend's own, which no proof covers.
    cost: of the whole, levels that are believed left out. wrong: counter-examples with what they are of.
    """

    tasks: tuple[Task, ...]
    believed: tuple[str, ...]
    cost: Counted
    wrong: tuple[tuple[str, Counterexample], ...]


@functools.lru_cache(maxsize=1 << 14)
def prove_task(task: Task) -> tuple[tuple[Counterexample, ...], Counted]:
    """The proof of one program, and what it costs.

    Raises what `registry.program` raises where there is no such program, and CP0748 where it has too many
    slots to be proved.
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
    nothing = Fraction(0)
    return Counted(0, nothing, nothing, nothing, *lower_bounds(kind, ranks))


def prove_algorithm(algorithm: str, kind: Kind, ranks: int, root: int = 0) -> Proof:
    """The proof of `algorithm` over `ranks` ranks. `native` is believed. Raises as `prove_task`."""
    if algorithm == NATIVE:
        return Proof((), (NATIVE,), _no_cost(kind, ranks), ())
    task = Task(algorithm, kind, ranks, root)
    wrong, counted = prove_task(task)
    return Proof((task,), (), counted, tuple((str_of(task), example) for example in wrong))


def prove_sliced(algorithm: str, kind: Kind, ranks: int, root: int, slices: int) -> Proof:
    """As `prove_algorithm`, with every chunk cut into `slices` that follow each other through the rounds.

    Proved for itself, though it follows: slices share no slot, and a message's two ends stay in one round.
    """
    known = prove_algorithm(algorithm, kind, ranks, root)
    if algorithm == NATIVE or known.wrong:
        return known
    chunks = program(algorithm, kind, ranks, root=root).chunks * slices
    if chunks * ranks > LARGEST:  # before they are laid out, which takes seconds
        fail("CP0748", f"{str_of(known.tasks[0])} has {chunks} chunks on each: too many to be proved")
    sliced = program(algorithm, kind, ranks, root=root, slices=slices)
    wrong = tuple((str_of(known.tasks[0]), example) for example in prove(sliced))
    return Proof(known.tasks, (), count(sliced), wrong)


@functools.lru_cache(maxsize=1 << 10)
def prove_levels(levels: tuple[tuple[str, int], ...], kind: Kind, root: int = 0) -> Proof:
    """The proof of a hierarchy, algorithm and ranks of each level, innermost first.

    Raises as `prove_task`, and what `registry.stages` raises where the levels make no hierarchy.
    """
    stages = stages_of(levels, kind, root=root)
    every = dict.fromkeys(task_of(levels, stage) for stage in stages)
    proofs = {task: prove_task(task) for task in every if task.algorithm != NATIVE}
    believed = tuple(f"{task.kind} of {task.ranks}" for task in every if task.algorithm == NATIVE)
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
    return Proof(tuple(proofs), believed, total, tuple(wrong))


def str_of(task: Task) -> str:
    """`ring for all_reduce over 13 ranks`."""
    root = f" from rank {task.root}" if task.root else ""
    return f"{task.algorithm} for {task.kind} over {task.ranks} ranks{root}"
