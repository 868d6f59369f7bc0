"""Calls the device functions of a plan while a phase is traced.

It derives the keys of random functions, applies functions to records under `vmap`, and compares their results
with the plan.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import name_of
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.ops import ENABLE_X64
from commplan.lowering.jax.pytree import LEAF, Tree, flatten


@dataclass(frozen=True)
class RngContext:
    """The source of the keys of random functions.

    Attributes:
        key: A JAX key derived from the seed and the step.
        records: For each load whose batch is mapped, by the id of its result: the record of each row of this
            rank, i32 or u32 [rows].
        members: The index along axes that are fixed (see `Run.member`). The mesh determines the others.
    """

    key: Array
    records: Mapping[str, Array] = field(default_factory=dict[str, Any])
    members: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def from_seed(cls, seed: Any, *numbers: Any, members: Mapping[str, int] | None = None) -> RngContext:
        """Create a context from a seed.

        Args:
            seed: An int or an i32 scalar.
            *numbers: Numbers that are folded into the key, such as the step; u32 scalars.
            members: See `RngContext`; None for none.
        """
        key = jax.random.key(seed)
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return cls(key, members=members or {})


def short_seed(seed: int) -> np.uint32:
    """The 32 bits of an int that a JAX key is created from. Small seeds are unchanged."""
    return np.uint32((seed ^ (seed >> 32)) & 0xFFFFFFFF if seed >= 0 else seed & 0xFFFFFFFF)


def loaded_by(phase: ir.Phase, ref: str) -> str:
    """The id of the load that `ref` comes from, through maps and shares; "" if there is none."""
    uses = DefUse(phase.ops)
    op = uses.maker(ref)
    while isinstance(op, ir.Map | ir.Share):
        op = uses.maker(ir.operands(op)[0])
    return op.result if isinstance(op, ir.Read) else ""


@dataclass(frozen=True)
class DeviceFunctions:
    """The device functions of a phase, and the values that they map.

    Attributes:
        functions: The functions by name; all that the phase calls.
        phase: The phase.
        values: The values of the phase, by id.
        backend: The backend, which provides the indices of this rank for random keys.
        file: The plan's file, for errors.
    """

    functions: Mapping[str, Callable[..., Any]]
    phase: ir.Phase
    values: Mapping[str, ir.Value]
    backend: Backend
    file: str

    def apply(self, op: ir.Map, env: Mapping[str, Tree], rng: RngContext | None) -> dict[str, Tree]:
        """Apply the function of `op`, record by record under `vmap` if the op says so.

        A random function receives a JAX key as its first argument. The key depends on the seed, the step,
        the call's position in the plan, the member (only along the ensembles of `per`) and, for each record,
        on the record. It does not depend on the number of ranks or on the rank.

        Args:
            op: The map.
            env: The values so far, by id.
            rng: The source of keys; None if no function of the phase is random.

        Returns:
            The results of the function, by id.

        Raises:
            CommplanError: CP0809 if the function does not accept its operands, or if its results differ from
                the plan.
        """
        function = self.functions[op.fn]
        operands = [env[ref].build() for ref in op.operands]
        # Operands that are not records, such as a scale or a palette, are passed whole to every call.
        batched = [op.per_record and self.values[ref].kind == "records" for ref in op.operands]
        rows = env[op.operands[batched.index(True)]].leaves[0].shape[0] if op.per_record else None
        lead = [0 if records else None for records in batched]
        if rng is not None and op.random:
            key = self._key(op, rng)
            first = op.operands[batched.index(True)] if op.per_record else ""
            operands = [self._record_keys(first, key, rng, rows) if rows is not None else key, *operands]
            lead = [0, *lead]
        self._check_arity(op, function, len(operands))
        applied: Callable[..., Any] = jax.vmap(function, in_axes=tuple(lead)) if op.per_record else function
        return self._results(op, applied(*operands), rows)

    def _key(self, op: ir.Map, rng: RngContext) -> Array:
        """The key of the call `op`, without that of a record."""
        name = op.results[0]  # passes may move ops, but keep the names of their results
        key = jax.random.fold_in(rng.key, zlib.crc32(f"{self.phase.name}/{name}/{op.fn}".encode()))
        for axis in op.per:
            fixed = rng.members.get(axis)
            key = jax.random.fold_in(key, self.backend.index(axis) if fixed is None else fixed)
        # The shards of a split value are drawn independently.
        split = self.values[op.operands[0]].placement.split if op.operands else ()
        if split and not op.per_record:
            key = jax.random.fold_in(key, self.backend.index(split))
        return key

    def _record_keys(self, ref: str, key: Array, rng: RngContext, rows: int) -> Array:
        """One key per row of `ref`, from its record, or else from its position in the global batch."""
        records = rng.records.get(loaded_by(self.phase, ref))
        if records is None:
            split = self.values[ref].placement.split
            records = (self.backend.index(split) * rows if split else 0) + jnp.arange(rows)

        def fold(record: Array) -> Array:
            return jax.random.fold_in(key, record)

        return jax.vmap(fold)(records)

    def _refuse(self, op: ir.Map, problem: str, *notes: str) -> NoReturn:
        fail("CP0809", f"function `{op.fn}` {problem}", *notes, span=op.span, file=self.file)

    def _check_arity(self, op: ir.Map, function: Callable[..., Any], count: int) -> None:
        """Raise CP0809 if `function` does not accept `count` positional arguments."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a builtin: it raises its own error
            return
        try:
            signature.bind(*range(count))
        except TypeError as error:
            arguments = (
                f"{count} argument{'s' if count != 1 else ''}{', the first a key' if op.random else ''}"
            )
            self._refuse(op, f"is called with {arguments}, but is `{op.fn}{signature}`", str(error))

    def _results(self, op: ir.Map, returned: Any, rows: int | None) -> dict[str, Tree]:
        """The checked results of a function, by id. Raises CP0809 if their number is wrong.

        `rows` is the number of records; None if the function is not applied to records.
        """
        count = len(op.results)
        if count == 1:
            return {op.results[0]: self._check_result(op, op.results[0], returned, rows)}
        is_sequence = isinstance(returned, tuple | list)
        answers = cast("Sequence[Any]", returned) if is_sequence else ()
        if len(answers) != count:
            shown = (
                f"{len(answers)} values"
                if is_sequence
                else f"a value of type `{type(cast('object', returned)).__name__}`"
            )
            self._refuse(op, f"should return a tuple of {count} values, but returned {shown}")
        return {
            ref: self._check_result(op, ref, result, rows)
            for ref, result in zip(op.results, answers, strict=True)
        }

    def _check_result(self, op: ir.Map, ref: str, answer: Any, rows: int | None) -> Tree:
        """Check one result of `rows` records. With `tail short`, the last batch may have fewer than compiled.

        A Python number, or an array of a weak type, takes the dtype of the plan. Others must have it.
        """
        value = self.values[ref]
        paths, tree = flatten(answer)
        expected = tuple(leaf.path for leaf in value.leaves)
        name = name_of(ref)
        if paths != expected:
            missing = [path for path in expected if path not in paths]
            extra = [path for path in paths if path not in expected]
            message = f"returned a value for `{name}` whose structure differs from the compiled one"
            note = f"missing: {', '.join(missing[:4]) or 'nothing'}"
            self._refuse(op, message, note, f"unexpected: {', '.join(extra[:4]) or 'nothing'}")
        leaves: list[Any] = []
        for leaf, array in zip(value.leaves, tree.leaves, strict=True):
            weak = isinstance(array, bool | int | float) or bool(getattr(array, "weak_type", False))
            x = jnp.asarray(array, leaf.dtype.numpy_name) if weak else jnp.asarray(array)
            location = f" at `{leaf.path}`" if leaf.path else ""
            expected_shape = leaf.shape if rows is None else (rows, *leaf.shape[1:])
            if tuple(x.shape) != expected_shape:
                problem = f"returned the shape {list(x.shape)} for `{name}`{location}"
                self._refuse(op, f"{problem}, expected {list(expected_shape)}")
            if str(x.dtype) != leaf.dtype.numpy_name:
                problem = f"returned the dtype {x.dtype} for `{name}`{location}"
                notes = (ENABLE_X64,) if leaf.dtype.nbytes > 4 else ()
                self._refuse(op, f"{problem}, expected {leaf.dtype.numpy_name}", *notes)
            leaves.append(x)
        return Tree(tuple(leaves), tree.structure if value.kind == "tree" else LEAF)
