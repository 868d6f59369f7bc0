"""A lowered phase under JAX means the same as its plan: its jaxpr is interpreted element by element."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from support.campaign import parameters
from support.example_cases import PLANS, smaller
from support.plan_terms import InTerms
from support.random_case import make_case
from support.terms_cases import EXAMPLES, PIPELINES, case_of
from support.under_jax_terms import check_jax

import commplan
from commplan.ir import schedule as ir
from commplan.ir.plan import AxisKind
from commplan.lowering import permutes
from commplan.lowering.jax import ops, phase
from commplan.lowering.jax.collectives import hierarchical, lax_backend, native, programs
from commplan.lowering.jax.primitives import assume_same


@pytest.mark.parametrize(("name", "sizes"), EXAMPLES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_examples(name: str, sizes: Mapping[str, int], pipeline: str | None):
    case = dataclasses.replace(smaller(name, sizes), pipeline=pipeline)
    assert check_jax(InTerms(case, "jax" if pipeline is None else None)) > 0


@pytest.mark.parametrize("block", parameters(range(2), range(2, 4)))
def test_random_plans(block: int):
    for seed in range(2000 + block * 12, 2000 + (block + 1) * 12):
        case = make_case(seed)
        if "integers" in case.text:  # terms have no types
            continue
        try:
            check_jax(InTerms(case, "jax" if seed % 3 else None))
        except Exception as error:
            raise AssertionError(f"seed {seed}, passes {case.pipeline}\n{case.text}") from error


def test_no_example_is_left_out():
    """The others have servers, which other tests run, too many ranks, or nothing that runs on devices."""
    missing = {path.stem for path in PLANS.glob("*.plan")} - {name for name, _ in EXAMPLES}
    for name in sorted(missing):
        plan = commplan.load(PLANS / f"{name}.plan")
        if any(axis.kind is AxisKind.SERVER or (axis.size or 1) > 8 for axis in plan.graph.axes):
            continue
        if any(fn.body is not None for fn in plan.graph.fns):  # compared as numbers
            continue
        sizes = {axis.name: 2 for axis in plan.graph.axes if axis.size is None}
        phases = plan.compile(axes=sizes).schedule.phases
        assert all(binding.source_only for phase in phases for binding in phase.outputs), name
        assert not any(phase.updates for phase in phases), name


def test_a_mean_and_its_roundings_are_told_apart():
    """The expected terms of a wrong lowering: the elements in words."""
    plan = InTerms(case_of("total = reduce grads over a, b by mean { wire = bf16, accumulate = f32 }"))
    assert check_jax(plan) == 11
    leaf = plan.meaning["step"][0]["total"].leaves[0][0, 0, 0]
    words = " + ".join(f"1/6 grads.v[{a}, {b}, 0, 0]" for a in (0, 1) for b in (0, 1, 2))
    assert repr(leaf[0]) == words


# Faults of the lowering, made by hand


def wrong_divisor(patch: pytest.MonkeyPatch) -> None:
    right = ops.scale
    patch.setattr(ops, "scale", lambda x, how, by, over: right(x, how, by + 1, over))


def one_axis_of_two(patch: pytest.MonkeyPatch) -> None:
    right = lax_backend.LaxBackend._native_all_reduce

    def wrong(self: Any, x: Any, op: ir.Collective) -> Any:
        result = right(self, x, replace(op, axes=op.axes[:1]))
        return assume_same(result, op.axes)

    patch.setattr(lax_backend.LaxBackend, "_native_all_reduce", wrong)


def root_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = hierarchical.broadcast
    patch.setattr(hierarchical, "broadcast", lambda x, axes, root, on: right(x, axes, root - 1, on))


def gathered_in_another_order(patch: pytest.MonkeyPatch) -> None:
    right = native.all_gather_same

    def wrong(x: Any, axes: tuple[str, ...]) -> Any:
        result = right(x, axes)
        return result.reshape(3, -1)[::-1].reshape(result.shape)

    patch.setattr(native, "all_gather_same", wrong)


def padding_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "_head", lambda flat, size: flat[-size:])


def cast_left_out(patch: pytest.MonkeyPatch) -> None:
    _instead(patch, ir.Cast, lambda op, x: x)


def narrow_accumulation(patch: pytest.MonkeyPatch) -> None:
    def wrong(op: ir.LocalSum, x: Any) -> Any:
        return x.astype("bfloat16").reshape(op.ways, -1).sum(0, dtype="bfloat16").astype(x.dtype)

    _instead(patch, ir.LocalSum, wrong)


def _instead(patch: pytest.MonkeyPatch, kind: Any, how: Callable[[Any, Any], Any]) -> None:
    right = phase.Lowered.run_op

    def wrong(self: Any, op: Any, env: Any, *arguments: Any) -> None:
        if not isinstance(op, kind):
            right(self, op, env, *arguments)
            return
        tree = env[op.operand]
        env[op.result] = tree.like([how(op, x) for x in tree.leaves])

    patch.setattr(phase.Lowered, "run_op", wrong)


def columns_shifted(patch: pytest.MonkeyPatch) -> None:
    right = ops._columns

    def wrong(table: Any, start: int, size: int) -> Any:
        return right(table, min(start + 1, table.shape[1] - size), size)

    patch.setattr(ops, "_columns", wrong)


def windows_shifted(patch: pytest.MonkeyPatch) -> None:
    right = programs._window
    patch.setattr(programs, "_window", lambda buffer, start, length: right(buffer, start + 1, length))


def the_other_cut(patch: pytest.MonkeyPatch) -> None:
    right = ops.shard
    patch.setattr(ops, "shard", lambda x, place, ways, **how: right(x, ways - 1 - place, ways, **how))


def least_for_most(patch: pytest.MonkeyPatch) -> None:
    right = programs.run
    patch.setattr(programs, "run", lambda program, x, team, op, **how: right(program, x, team, "min", **how))


def not_stored(patch: pytest.MonkeyPatch) -> None:
    """Data that arrives in the middle of a program, and is read later, is not written into its slot."""
    right = permutes.permute_rounds

    def wrong(program: Any, size: int) -> Any:
        result = right(program, size)
        return (result[0]._replace(stores=False), *result[1:])

    patch.setattr(programs, "permute_rounds", wrong)


def one_message_less(patch: pytest.MonkeyPatch) -> None:
    right = native.permute
    patch.setattr(native, "permute", lambda x, axes, pairs: right(x, axes, pairs[1:]))


REDUCE = "total = reduce grads over a, b by mean"
WIRE = f"{REDUCE} {{ wire = bf16, accumulate = f32 }}"
RING = f"{REDUCE} via ring"
GATHER = "part = slice whole over b\n    total = gather part over b"
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (wrong_divisor, REDUCE),
    (one_axis_of_two, REDUCE),
    (root_off_by_one, "total = broadcast params over a, b from 4"),
    (gathered_in_another_order, GATHER),
    (padding_kept, GATHER),
    (cast_left_out, WIRE),
    (narrow_accumulation, WIRE),
    (columns_shifted, REDUCE),
    (windows_shifted, RING),
    (the_other_cut, GATHER),
    (least_for_most, "total = reduce params over a, b by max via ring"),
    (not_stored, "total = reduce grads over a, b by sum via recursive_doubling"),
    (one_message_less, RING),
]


@pytest.mark.parametrize(("fault", "stage"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], stage: str, monkeypatch: pytest.MonkeyPatch
):
    plan = InTerms(case_of(stage))
    check_jax(plan)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"the plan means|the schedule makes|what is the same"):
        check_jax(plan)
