"""Calling the functions that users bind: keys for random ones, and a check of what they return."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import name_of
from commplan.lowering.jax.ops import ENABLE_X64
from commplan.lowering.jax.pytree import LEAF, Tree, flatten
from commplan.lowering.jax.typing_shim import jax, jnp

if TYPE_CHECKING:
    from commplan.lowering.jax.phase import Lowered

Array = Any


@dataclass(frozen=True)
class RngContext:
    """What the keys of random functions come from.

    key: a JAX key of the seed and the step. records: for each load whose batch is mapped, by the id of
    its result, the record of each of this rank's rows, i32 or u32 [rows]. members: axes of the plan that
    are fixed (see `Run.member`), with their place; all others are asked of the mesh.
    """

    key: Array
    records: Mapping[str, Array] = field(default_factory=dict[str, Any])
    members: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, seed: Any, *numbers: Any, members: Mapping[str, int] | None = None) -> RngContext:
        """The key of `seed` (an int or an i32 scalar), with `numbers` (u32 scalars) folded in."""
        key = jax.random.key(seed)
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return cls(key, members=members or {})


def short_seed(seed: int) -> np.uint32:
    """Any whole number as the 32 bits that a JAX key is made from; small ones stay as they are."""
    return np.uint32((seed ^ (seed >> 32)) & 0xFFFFFFFF if seed >= 0 else seed & 0xFFFFFFFF)


def apply_function(
    op: ir.Map, lowered: Lowered, env: Mapping[str, Tree], rng: RngContext | None
) -> dict[str, Tree]:
    """Apply the function of `op`; per record under `vmap` where the op says so.

    A random function takes a JAX key before its operands. The key depends on the seed, the step, the
    place of the call in the plan, the member (only over the ensembles of `per`) and, record by record, on
    the record: neither on the number of ranks nor on where one runs.

    Raises `CommplanError` CP0809 where the function cannot take its operands, or its results are not
    what the plan declares.
    """
    function = lowered.functions[op.fn]
    operands = [env[ref].build() for ref in op.operands]
    # Whole values beside records (a scale, a palette) go to every record as they are.
    batched = [op.per_record and lowered.values[ref].kind == "records" for ref in op.operands]
    rows = env[op.operands[batched.index(True)]].leaves[0].shape[0] if op.per_record else None
    lead = [0 if records else None for records in batched]
    if rng is not None and op.random:
        key = _key(op, lowered, rng)
        first = op.operands[batched.index(True)] if op.per_record else ""
        operands = [_record_keys(first, lowered, key, rng, rows) if rows is not None else key, *operands]
        lead = [0, *lead]
    _check_arity(op, lowered, function, len(operands))
    applied: Callable[..., Any] = jax.vmap(function, in_axes=tuple(lead)) if op.per_record else function
    return _results(op, lowered, applied(*operands), rows)


def _key(op: ir.Map, lowered: Lowered, rng: RngContext) -> Array:
    place = op.results[0]  # passes move ops, and keep the names of what they make
    key = jax.random.fold_in(rng.key, zlib.crc32(f"{lowered.phase.name}/{place}/{op.fn}".encode()))
    for axis in op.per:
        fixed = rng.members.get(axis)
        key = jax.random.fold_in(key, lowered.backend.index(axis) if fixed is None else fixed)
    # A cut value is one array in pieces: each piece draws its own numbers.
    split = lowered.values[op.operands[0]].placement.split if op.operands else ()
    if split and not op.per_record:
        key = jax.random.fold_in(key, lowered.backend.index(split))
    return key


def _record_keys(ref: str, lowered: Lowered, key: Array, rng: RngContext, rows: int) -> Array:
    """One key per row of `ref`: folded with the record, or with its place in the global batch if that is
    unknown."""
    records = rng.records.get(loaded_by(lowered.phase, ref))
    if records is None:
        split = lowered.values[ref].placement.split
        records = (lowered.backend.index(split) * rows if split else 0) + jnp.arange(rows)

    def fold(record: Array) -> Array:
        return jax.random.fold_in(key, record)

    return jax.vmap(fold)(records)


def loaded_by(phase: ir.Phase, ref: str) -> str:
    """The id of the load that `ref` comes from, through maps and shares; "" if there is none."""
    uses = DefUse(phase.ops)
    op = uses.maker(ref)
    while isinstance(op, ir.Map | ir.Share):
        op = uses.maker(ir.operands(op)[0])
    return op.result if isinstance(op, ir.Read) else ""


def _refuse(op: ir.Map, lowered: Lowered, problem: str, *notes: str) -> NoReturn:
    fail("CP0809", f"function `{op.fn}` {problem}", *notes, span=op.span, file=lowered.schedule.file)


def _check_arity(op: ir.Map, lowered: Lowered, function: Callable[..., Any], count: int) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in C: it says itself what is wrong
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        takes = f"{count} argument{'s' if count != 1 else ''}{', a key first' if op.random else ''}"
        _refuse(op, lowered, f"is called with {takes}, and is `{op.fn}{signature}`", str(error))


def _results(op: ir.Map, lowered: Lowered, answer: Any, rows: int | None) -> dict[str, Tree]:
    count = len(op.results)
    if count == 1:
        return {op.results[0]: _checked(op, lowered, op.results[0], answer, rows)}
    many = isinstance(answer, tuple | list)
    answers = cast("Sequence[Any]", answer) if many else ()
    if len(answers) != count:
        returned = f"{len(answers)} values" if many else f"a {type(cast('object', answer)).__name__}"
        _refuse(op, lowered, f"should return {count} values in a tuple, and returned {returned}")
    return {
        ref: _checked(op, lowered, ref, result, rows) for ref, result in zip(op.results, answers, strict=True)
    }


def _checked(op: ir.Map, lowered: Lowered, ref: str, answer: Any, rows: int | None) -> Tree:
    """A result, checked; of `rows` records, fewer than compiled for in the last batch of `tail short`."""
    value = lowered.values[ref]
    paths, tree = flatten(answer)
    expected = tuple(leaf.path for leaf in value.leaves)
    name = name_of(ref)
    if paths != expected:
        missing = [path for path in expected if path not in paths]
        extra = [path for path in paths if path not in expected]
        message = f"returned another structure for `{name}` than it was compiled for"
        note = f"missing: {', '.join(missing[:4]) or 'nothing'}"
        _refuse(op, lowered, message, note, f"unexpected: {', '.join(extra[:4]) or 'nothing'}")
    leaves: list[Any] = []
    for leaf, array in zip(value.leaves, tree.leaves, strict=True):
        weak = isinstance(array, bool | int | float) or bool(getattr(array, "weak_type", False))
        x = jnp.asarray(array, leaf.dtype.numpy_name) if weak else jnp.asarray(array)
        at = f" at `{leaf.path}`" if leaf.path else ""
        expected_shape = leaf.shape if rows is None else (rows, *leaf.shape[1:])
        if tuple(x.shape) != expected_shape:
            problem = f"returned the shape {list(x.shape)} for `{name}`{at}"
            _refuse(op, lowered, f"{problem}, expected {list(expected_shape)}")
        if str(x.dtype) != leaf.dtype.numpy_name:
            problem = f"returned the dtype {x.dtype} for `{name}`{at}"
            notes = (ENABLE_X64,) if leaf.dtype.nbytes > 4 else ()
            _refuse(op, lowered, f"{problem}, expected {leaf.dtype.numpy_name}", *notes)
        leaves.append(x)
    return Tree(tuple(leaves), tree.structure if value.kind == "tree" else LEAF)
