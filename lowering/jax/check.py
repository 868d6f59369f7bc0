"""Compares arguments with the schedule: structure, shapes, dtypes and varying axes, leaf by leaf.

Codes: CP0805 for structure, shape or dtype; CP0807 for a term that is already reduced; CP0813 for a value
    that should be the same on all ranks but that JAX types as varying.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from commplan.diagnostics import Span, fail, type_of
from commplan.ir.schedule import Leaf, Value
from commplan.ir.types import DType
from commplan.lowering.jax import _compat
from commplan.lowering.jax._lineage import TracedReduction, lineage
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.layout import global_shape, varying
from commplan.lowering.jax.ops import ENABLE_X64
from commplan.lowering.jax.pytree import Tree, flatten

Layout = Literal["local", "global"]  # values of one rank, inside a shard_map; or of all ranks, outside of one
_NUMBERS = (bool, int, float)  # types of Python numbers
# The Python numbers that are accepted for each kind of NumPy dtype.
_KINDS = {"b": bool, "i": int, "u": int, "f": (int, float)}


@dataclass(frozen=True)
class Check:
    """Compares values with the types that the plan was compiled for.

    Attributes:
        layout: Whether values are one rank's (`local`) or those of all ranks (`global`).
        sizes: The sizes of the axes.
        span: The location of the phase in the plan, for errors; None if unknown.
        file: The plan's file, for errors.
    """

    layout: Layout
    sizes: Mapping[str, int]
    span: Span | None
    file: str

    def value(self, role: str, value: Value, tree: Any) -> Tree:
        """Check `tree` against `value` and return it as a `Tree`. Python numbers are accepted as scalars.

        Args:
            role: A description for errors, such as "input `grads`".
            value: The expected value.
            tree: The pytree.

        Raises:
            CommplanError: CP0805 if the structure, a shape or a dtype differs.
        """
        paths, flat = flatten(tree)
        expected = tuple(leaf.path for leaf in value.leaves)
        if paths != expected:
            self._structure(role, expected, paths)
        pairs = zip(value.leaves, flat.leaves, strict=True)
        return flat.like([self._leaf(role, value, leaf, array) for leaf, array in pairs])

    def _structure(self, role: str, expected: Sequence[str], paths: Sequence[str]) -> None:
        """Raise CP0805 for a tree with the leaves `paths` instead of `expected`."""
        missing = [path for path in expected if path not in set(paths)]
        extra = [path for path in paths if path not in set(expected)]
        notes = [f"it lacks {_some(missing)}"] if missing else []
        notes += [f"it has unexpected leaves: {_some(extra)}"] if extra else []
        notes += [] if notes else [f"the order of the leaves differs: {_some(paths)}, not {_some(expected)}"]
        note = "compile the plan with the shapes of the arguments: plan.compile(mesh, shapes={...})"
        self._fail(f"the structure of {role} differs from the compiled one", *notes, note)

    def _leaf(self, role: str, value: Value, leaf: Leaf, array: Any) -> Any:
        """Check the shape and the dtype of one leaf; returns it as an array."""
        role += f" at `{leaf.path}`" if leaf.path else ""
        expected = leaf.shape if self.layout == "local" else global_shape(value, leaf, self.sizes)
        if isinstance(array, _NUMBERS):
            array = number(array, leaf)
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            self._fail(f"{role} is {type_of(array)}, not an array")
        shape = tuple(array.shape)
        if shape != expected:
            message = f"{role} has the shape {list(shape)}, expected {list(expected)}"
            self._fail(message, *self._why(value, leaf, shape))
        dtype = array.dtype
        if type(array).__module__ == "numpy":  # compare the dtype that JAX would convert it to
            dtype = jax.dtypes.canonicalize_dtype(dtype)
            array = array if array.dtype == dtype else np.asarray(array, dtype)
        if str(dtype) != leaf.dtype.numpy_name:
            note = f"cast it with .astype('{leaf.dtype.numpy_name}')"
            if leaf.dtype in (DType.F64, DType.I64):
                note = ENABLE_X64
            self._fail(f"{role} has the dtype {dtype}, expected {leaf.dtype.numpy_name}", note)
        return array

    def _why(self, value: Value, leaf: Leaf, shape: tuple[int, ...]) -> list[str]:
        """Notes on the likely cause of a wrong shape."""
        placement = value.placement
        notes = [f"its placement is `{placement}`"]
        count = len(placement.per)
        whole = global_shape(value, leaf, self.sizes)
        if self.layout == "local" and placement.per and shape == (*(1,) * count, *leaf.shape):
            notes.append(
                "inside a shard_map, pass this rank's part without the leading dimension of each `per` axis:"
                f" x.reshape(x.shape[{count}:]); run.spmd removes it automatically"
            )
        elif self.layout == "local" and shape == whole:
            notes.append(
                "inside a shard_map, pass this rank's part, not the global array: declare the argument of"
                f' run.spmd as "{placement}"; a name refers to the last value of that name, whose placement'
                " may differ"
            )
        if self.layout == "global" and placement.per and shape == leaf.shape:
            lead = ", ".join(f"{axis} = {self.sizes[axis]}" for axis in placement.per)
            notes.append(f"outside run.spmd it has one leading dimension for each `per` axis: {lead}")
        return notes

    def _fail(self, message: str, *notes: str) -> NoReturn:
        fail("CP0805", message, *notes, span=self.span, file=self.file)


def _some(paths: Sequence[str]) -> str:
    """The first four paths as text."""
    shown = ", ".join(f"`{path}`" if path else "a bare array" for path in paths[:4])
    return f"{shown} and {len(paths) - 4} more" if len(paths) > 4 else shown


def number(x: Any, leaf: Leaf) -> Any:
    """`x` as a NumPy scalar array of the leaf's dtype, if it is a Python number that fits; otherwise `x`.

    An int fits a float dtype, but a float fits no integer dtype.
    """
    kind = "f" if leaf.dtype.is_float else np.dtype(leaf.dtype.numpy_name).kind
    if not isinstance(x, _KINDS[kind]):
        return x
    try:
        return np.asarray(x, jnp.dtype(leaf.dtype.numpy_name))
    except OverflowError:
        return x


def has_numbers(leaves: Iterable[Any]) -> bool:
    """Whether a leaf is a Python number."""
    return any(isinstance(x, _NUMBERS) for x in leaves)


def numbers(value: Value, tree: Any) -> Any:
    """`tree` with its Python numbers converted to the dtypes of `value`. jit would convert an int to i32.

    A tree with another number of leaves is returned unchanged, and reported later.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if len(leaves) != len(value.leaves) or not has_numbers(leaves):
        return tree
    pairs = zip(leaves, value.leaves, strict=True)
    return jax.tree_util.tree_unflatten(structure, [number(x, leaf) for x, leaf in pairs])


# Notes of `refuse_reduced`.
_BY_JAX = (
    "the plan expects each rank's own term, but JAX has summed this gradient, as it does for parameters that"
    " do not vary"
)
_TO_VARYING = "differentiate with respect to varying parameters: jax.grad(loss)(run.varying(params), ...)"


def refuse_reduced(
    name: str, axes: Sequence[str], reductions: Sequence[TracedReduction], span: Span | None, file: str
) -> NoReturn:
    """Raise CP0807: a value is the same over some axes, instead of each rank's own term.

    Args:
        name: A description of the value.
        axes: The axes over which it is the same.
        reductions: The collectives that made it the same; empty if no collective did.
        span: The location in the plan; None if unknown.
        file: The plan's file.
    """
    over = ", ".join(axes)
    message = (
        f"{name} is already summed over {over}; reducing it again would multiply it by the number of ranks"
    )
    by_jax = [reduction for reduction in reductions if reduction.is_derivative and not reduction.phase]
    first = next(iter(reductions), None)
    if by_jax:
        notes = (_BY_JAX, _TO_VARYING)
    elif first is not None and first.phase:
        cause = f"phase `{first.phase}` made it the same on all ranks: line {first.line} of the plan"
        notes = (cause, "pass each rank's own term, once; or declare the input `same`, without `partial`")
    elif first is not None:
        notes = (f"the program's own collective has: {first.source}", "pass the operand of that collective")
    else:
        message = f"{name} is the same on all ranks over {over}, but the plan expects each rank's own term"
        notes = (
            "it depends only on arguments that are placed `same`, so their sum would be a multiple of it",
            "if the copy of each rank is its term, write run.varying(x)",
        )
    fail("CP0807", message, *notes, span=span, file=file)


def types(name: str, value: Value, tree: Tree, backend: Backend, span: Span | None) -> Tree:
    """Check over which axes a phase's argument varies, inside a shard_map.

    Args:
        name: The name of the argument.
        value: The expected value.
        tree: The argument.
        backend: The backend. If it does not type values, `tree` is returned unchanged.
        span: The location of the phase in the plan, for errors; None if unknown.

    Returns:
        The argument, whose leaves are typed as varying over all axes over which the plan has them vary.

    Raises:
        CommplanError: CP0807 if a `partial` value does not vary over one of its axes, unless it is a
            constant, which is every rank's term. CP0813 if a value that should be the same varies.
    """
    if not backend.typed:
        return tree
    axes, file = [axis for axis, size in backend.sizes.items() if size > 1], backend.file
    placement = value.placement
    for leaf, array in zip(value.leaves, tree.leaves, strict=True):
        varying_axes = _compat.varying_axes(array)
        position = f" at `{leaf.path}`" if leaf.path else ""
        summed = [axis for axis in placement.partial if axis in axes and axis not in varying_axes]
        if summed and not (origin := lineage(array)).is_constant:
            refuse_reduced(f"`{name}`{position}", summed, origin.reductions, span, file)
        unexpected = [axis for axis in axes if axis in varying_axes and axis not in varying(value, leaf)]
        if unexpected:
            axes_text = ", ".join(unexpected)
            message = f"`{name}`{position} should be the same over {axes_text}, but JAX types it as varying"
            note = "pass the value itself, not run.varying(...) of it; or declare it `per` and broadcast it"
            fail("CP0813", message, f"its placement in the plan is `{placement}`", note, span=span, file=file)
    pairs = zip(tree.leaves, value.leaves, strict=True)
    return tree.like([backend.varying(x, varying(value, leaf)) for x, leaf in pairs])
