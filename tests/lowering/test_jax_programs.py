"""Every chunk program under JAX equals the oracle bitwise, floats included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.campaign import parameters
from support.embedding import mesh_of
from support.oracle.programs import execute

from commplan.collectives import registry
from commplan.collectives.program import KINDS, ChunkProgram, Kind
from commplan.ir.collective_kinds import REDUCING, ROOTED
from commplan.lowering import permutes
from commplan.lowering.jax import _compat
from commplan.lowering.jax.collectives import programs

Op = Literal["sum", "max", "min"]


class Trial(NamedTuple):
    """A program, and the initial buffers of its ranks, [ranks, elements]."""

    program: ChunkProgram
    op: Op
    held: np.ndarray[Any, Any]


def numbers(program: ChunkProgram, dtype: str, size: int) -> np.ndarray[Any, Any]:
    """Whole numbers of all sizes that wrap around, or floats whose sums are rounded."""
    random = np.random.default_rng([program.ranks, size])
    length = program.ranks * size if program.kind in ("reduce_scatter", "scatter", "swap") else size
    if dtype == "bool":
        return random.integers(0, 2, (program.ranks, length)) > 0
    if dtype == "int32":
        return random.integers(-(2**31), 2**31, (program.ranks, length)).astype(np.int32)
    return random.normal(size=(program.ranks, length)).astype(jnp.dtype(dtype))


def agree(trials: Sequence[Trial], ranks: int) -> None:
    """All `trials` in one compiled program, against the oracle: all that the collectives promise."""

    def everything(*operands: Any) -> tuple[Any, ...]:
        team = programs.all_ranks(("a",), ranks)
        results = [programs.run(t.program, x[0], team, t.op) for t, x in zip(trials, operands, strict=True)]
        return tuple(x[None] for x in results)

    mapped = _compat.shard_map(everything, mesh=mesh_of(a=ranks), in_specs=P("a"), out_specs=P("a"))
    for trial, got in zip(trials, jax.jit(mapped)(*(t.held for t in trials)), strict=True):
        program = trial.program
        valid_ranks = [program.root] if program.kind in ("reduce", "gather") else list(range(ranks))
        right = np.stack(execute(program, list(trial.held), trial.op))[valid_ranks]
        ours = np.asarray(got)[valid_ranks]
        label = (trial.program.name, trial.program.kind, trial.op, ours.dtype, ours.shape)
        assert ours.dtype == right.dtype, label
        if trial.program.kind in REDUCING and ours.dtype.kind in "fV":  # any NaN will do
            lost = np.isnan(right.astype(np.float64))
            assert (np.isnan(ours.astype(np.float64)) == lost).all(), (label, ours, right)
            ours, right = np.where(lost, 0, ours), np.where(lost, 0, right)
        assert ours.tobytes() == right.tobytes(), (label, ours, right)


def all_programs(ranks: int) -> list[ChunkProgram]:
    return [
        registry.program(name, kind, ranks, root=2 * ranks // 3 if kind in ROOTED else 0)
        for kind in KINDS
        for name in registry.algorithms(kind)
    ]


@pytest.mark.parametrize("ranks", parameters([3, 4], [2, 5, 8]))
def test_integers_are_those_of_the_oracle(ranks: int):
    # No number of chunks divides 13, and over many ranks some chunks of 3 elements are empty.
    sizes = {kind: 3 if kind in ("all_gather", "gather") else 13 for kind in KINDS}
    agree([Trial(p, "sum", numbers(p, "int32", sizes[p.kind])) for p in all_programs(ranks)], ranks)


@pytest.mark.parametrize(("ranks", "dtype"), parameters([(3, "float16"), (5, "bfloat16")], [(8, "float32")]))
def test_floats_are_added_in_the_order_of_the_program(ranks: int, dtype: str):
    reducing = [program for program in all_programs(ranks) if program.kind in REDUCING]
    agree([Trial(program, "sum", numbers(program, dtype, 13)) for program in reducing], ranks)


def test_other_types_and_operations():
    all_reduce = registry.program("halving_doubling", "all_reduce", 3)
    reduce_scatter = registry.program("ring", "reduce_scatter", 3)
    gather = registry.program("bruck", "all_gather", 3)
    ops: tuple[Op, ...] = ("sum", "max", "min")
    trials = [Trial(all_reduce, op, numbers(all_reduce, "bool", 7)) for op in ops]
    typed: tuple[tuple[Op, str], ...] = (("max", "float32"), ("min", "bfloat16"), ("sum", "uint8"))
    trials += [
        Trial(p, op, numbers(p, dtype, 7)) for p in (all_reduce, reduce_scatter) for op, dtype in typed
    ]
    for trial in trials:
        if trial.held.dtype.kind not in "bu":
            trial.held[1, 2] = np.nan
    odd = numbers(gather, "bfloat16", 4)
    odd.view(np.uint16)[:] = np.arange(12).reshape(3, 4) * 5461  # NaNs with payloads, infinities, -0.0
    agree([*trials, Trial(gather, "sum", odd), Trial(gather, "sum", numbers(gather, "bool", 4))], 3)


def test_sizes_that_are_hardly_there():
    programs_ = [registry.program(name, "all_reduce", 5) for name in ("ring", "double_tree", "torus")]
    agree([Trial(p, "sum", numbers(p, "int32", size)) for p in programs_ for size in (0, 1)], 5)
    programs_of_one_rank = [
        registry.program(name, kind, 1) for kind in KINDS for name in registry.algorithms(kind)
    ]
    agree([Trial(p, "sum", numbers(p, "int32", 3)) for p in programs_of_one_rank], 1)


def test_slices():
    trials: list[Trial] = []
    sliced: tuple[tuple[str, Kind, int], ...] = (
        ("chain", "broadcast", 4), ("ring", "all_reduce", 2), ("double_tree", "reduce", 3),
        ("ring", "all_gather", 2), ("binomial_tree", "scatter", 2),
    )  # fmt: skip
    for name, kind, slices in sliced:
        if registry.supports(name, kind):
            root = 3 if kind in ROOTED else 0
            program = registry.program(name, kind, 5, root=root, slices=slices)
            trials.append(Trial(program, "sum", numbers(program, "float32", 11)))
    agree(trials, 5)


def test_many_rounds_of_one_form_become_a_loop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(permutes, "UNROLLED", 2)
    trials: list[Trial] = []
    long: tuple[tuple[str, Kind, int], ...] = (
        ("ring", "all_reduce", 1),
        ("ring", "all_gather", 1),
        ("chain", "broadcast", 9),
    )
    for name, kind, slices in long:
        program = registry.program(name, kind, 5, slices=slices)
        trials.append(Trial(program, "sum", numbers(program, "bfloat16", 23)))
    agree(trials, 5)
    # 25 elements are 5 for each of the ring's chunks: 4 rounds that add, 4 that do not, and the ends of each.
    lengths = [len(each) for each in permutes.stretches(permutes.permute_rounds(trials[0].program, 25))]
    assert lengths == [1, 1, 1, 1, 4]


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2)])
def test_hierarchies(sizes: tuple[int, ...]):
    ranks = int(np.prod(sizes))
    trials: list[Trial] = []
    nested: tuple[tuple[Kind, tuple[str, ...]], ...] = (
        ("all_reduce", ("ring", "halving_doubling", "recursive_doubling")),
        ("reduce_scatter", ("ring", "halving_doubling", "ring")),
        ("all_gather", ("bruck", "ring", "bruck")),
        ("broadcast", ("binomial_tree", "chain", "scatter_gather")),
    )
    for kind, names in nested:
        levels = list(zip(names[-len(sizes) :], sizes, strict=True))
        program = registry.hierarchical(levels, kind, root=4 if kind in ROOTED else 0)
        trials.append(Trial(program, "sum", numbers(program, "float32", 13)))
    agree(trials, ranks)


def test_permutes_are_as_few_as_ranks_have_messages():
    """A ppermute has each rank once as source and once as destination."""
    for program in all_programs(7):
        rounds = permutes.permutes_of_rounds(program, 7 * 64)
        for sends, permutes_of_round in zip(program.rounds, rounds, strict=True):
            messages = {(int(s), int(d)) for send in sends for s, d in zip(send.src, send.dst, strict=True)}
            most = max(
                max(sum(pair[end] == rank for pair in messages) for rank in range(7)) for end in (0, 1)
            )
            assert len(permutes_of_round) == most, (program.name, program.kind)
            for permute in permutes_of_round:
                assert len({src for src, _ in permute.pairs}) == len({dst for _, dst in permute.pairs})


def test_what_is_passed_on_is_not_read_again_and_only_written_where_it_is_read():
    def told(name: str, kind: Any, ranks: int, size: int) -> list[tuple[bool, bool]]:
        rounds = permutes.permute_rounds(registry.program(name, kind, ranks), size)
        return [(each.forwards, each.stores) for each in rounds]

    assert told("ring", "reduce_scatter", 4, 8) == [(False, False)] + [(True, False)] * 2
    adds, copies = [(False, False), (True, False), (True, True)], [(True, True)] * 3
    assert told("ring", "all_reduce", 4, 8) == told("ring", "all_reduce", 4, 7) == adds + copies
    assert told("bruck", "all_gather", 4, 8) == [(False, True)] * 2
