"""Calling the functions that users bind: keys for random ones, and a check of what they return."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.lowering.jax.trees import LEAF, Tree, flatten
from commplan.lowering.jax.untyped import jax, jnp, lax

if TYPE_CHECKING:
    from commplan.lowering.jax.phase import Lowered


def call(op: ir.Map, lowered: Lowered, env: dict[str, Tree], step: Any) -> dict[str, Tree]:
    """Apply the function of `op`; per record under `vmap` where the op says so.

    A random function takes a JAX key before its operands. The key depends on the seed, the call of
    the phase, the function, the member (only over the ensembles of `per`) and, record by record, the
    record's place in the global batch: neither on the number of ranks nor on where a rank runs.

    Raises `CommplanError` CP0809 where the results are not what the plan declares.
    """
    function = lowered.functions[op.fn]
    values = lowered.values
    operands = [env[ref].build() for ref in op.operands]
    if op.random:
        key = _key(op, lowered, step)
        if op.per_record:
            count = values[op.operands[0]].leaves[0].shape[0]
            split = values[op.operands[0]].placement.split
            first = lax.axis_index(split) * count if split else 0
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(first + jnp.arange(count))
            operands = [keys, *operands]
        else:
            operands = [key, *operands]
    applied = jax.vmap(function) if op.per_record else function
    try:
        answer = applied(*operands)
    except TypeError as error:
        _arity(op, lowered, operands, error)
        raise
    return _results(op, lowered, answer)


def _key(op: ir.Map, lowered: Lowered, step: Any) -> Any:
    key = jax.random.key(lowered.seed)
    key = jax.random.fold_in(key, jnp.uint32(0) if step is None else step)
    place = lowered.phase.ops.index(op)
    key = jax.random.fold_in(key, zlib.crc32(f"{lowered.phase.name}/{place}/{op.fn}".encode()))
    for axis in op.per:
        key = jax.random.fold_in(key, lax.axis_index(axis))
    # A cut value is one array in pieces: each piece draws its own numbers.
    split = lowered.values[op.operands[0]].placement.split if op.operands else ()
    if split and not op.per_record:
        key = jax.random.fold_in(key, lax.axis_index(split))
    return key


def _arity(op: ir.Map, lowered: Lowered, operands: Sequence[Any], error: TypeError) -> None:
    if "argument" not in str(error) or "positional" not in str(error):
        return
    what = f"{len(operands)} arguments" + (", a key first" if op.random else "")
    fail(
        "CP0809",
        f"function `{op.fn}` cannot be called with {what}",
        str(error),
        span=op.span,
        file=lowered.schedule.file,
    )


def _results(op: ir.Map, lowered: Lowered, answer: Any) -> dict[str, Tree]:
    count = len(op.results)
    if count > 1 and not (isinstance(answer, tuple | list) and len(answer) == count):
        found = f"{len(answer)} values" if isinstance(answer, tuple | list) else f"a {type(answer).__name__}"
        fail(
            "CP0809",
            f"function `{op.fn}` should return {count} values in a tuple, and returned {found}",
            span=op.span,
            file=lowered.schedule.file,
        )
    answers: Sequence[Any] = answer if count > 1 else (answer,)
    results: dict[str, Tree] = {}
    for ref, one in zip(op.results, answers, strict=True):
        results[ref] = _checked(op, lowered, lowered.values[ref], one)
    return results


def _checked(op: ir.Map, lowered: Lowered, value: ir.Value, answer: Any) -> Tree:
    paths, tree = flatten(answer)
    expected = tuple(leaf.path for leaf in value.leaves)
    name = value.id.rpartition(".")[0]
    where = {"span": op.span, "file": lowered.schedule.file}
    if paths != expected:
        missing = [path for path in expected if path not in paths]
        extra = [path for path in paths if path not in expected]
        fail(
            "CP0809",
            f"function `{op.fn}` returned another structure for `{name}` than it was compiled for",
            f"missing: {missing[:4]}, unexpected: {extra[:4]}",
            **where,
        )
    leaves: list[Any] = []
    for leaf, array in zip(value.leaves, tree.leaves, strict=True):
        weak = isinstance(array, bool | int | float) or bool(getattr(array, "weak_type", False))
        x = jnp.asarray(array, leaf.dtype.numpy_name) if weak else jnp.asarray(array)
        at = f" at `{leaf.path}`" if leaf.path else ""
        if tuple(x.shape) != leaf.shape:
            fail(
                "CP0809",
                f"function `{op.fn}` returned the shape {list(x.shape)} for `{name}`{at},"
                f" expected {list(leaf.shape)}",
                **where,
            )
        if str(x.dtype) != leaf.dtype.numpy_name:
            fail(
                "CP0809",
                f"function `{op.fn}` returned the dtype {x.dtype} for `{name}`{at},"
                f" expected {leaf.dtype.numpy_name}",
                **where,
            )
        leaves.append(x)
    return Tree(tuple(leaves), tree.structure if value.kind == "tree" else LEAF)
