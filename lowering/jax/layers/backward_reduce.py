"""Reduces gradients inside the backward pass, for `run.tap`.

It is for layers under `lax.scan`, whose whole gradient is available only after the loop. A reduction after
the loop would overlap with no computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import Array

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.lowering.jax import ops
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.taps import TAP, Step, chains, reduction_groups, scattered_axes


@dataclass(frozen=True)
class Recipe:
    """How a plan reduces one input.

    Attributes:
        axes: The axes over which the input is a partial sum.
        flat: The steps on the flat buffer, by its dtype. Empty if the plan packs no buffers.
        tree: The steps that follow on the tree.
        lowered: The phase that contains the reduction.
    """

    axes: tuple[str, ...]
    flat: Mapping[str, tuple[Step, ...]]
    tree: tuple[Step, ...]
    lowered: Lowered

    @property
    def backend(self) -> Backend:
        """The backend that runs the reduction."""
        return self.lowered.backend

    def reduce(self, leaves: list[Array]) -> list[Array]:
        """Reduce gradients as the plan does: in one buffer per dtype, one buffer after the other.

        If collectives overlap with computation, large gradients are reduced separately.

        Args:
            leaves: This rank's terms of the gradients.

        Returns:
            The reduced gradients, with the shapes and dtypes of `leaves`.
        """
        results = list(leaves)
        previous: Array | None = None
        sizes = [(str(leaf.dtype), leaf.nbytes) for leaf in leaves]
        for dtype, indices in reduction_groups(sizes, self.backend.asynchronous):
            parts = [leaves[i].reshape(-1) for i in indices]
            flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
            if not flat.size:  # nothing to move
                for i in indices:
                    results[i] = self.backend.same(leaves[i], self.axes)
                continue
            if previous is not None and not self.backend.asynchronous:
                flat = self.backend.tie(flat, previous, self.axes)
            chain = self.flat[dtype] if self.flat else ()
            with self.backend.combiner_scope(f"{self.lowered.phase.name}/{indices[0]}"), jax.named_scope(TAP):
                previous = self._run((*chain, *self.tree), flat).astype(dtype)
            offset = 0
            for i in indices:
                size = leaves[i].size
                results[i] = previous[offset : offset + size].reshape(leaves[i].shape)
                offset += size
        return results

    def _run(self, chain: tuple[Step, ...], flat: Array) -> Array:
        """Apply `chain` to a flat array, which is padded so that all nested scatters divide it evenly."""
        size = flat.shape[0]
        flat = ops.pad(flat, self.backend.ways(scattered_axes(chain)))
        for op in chain:
            with self.lowered.scope(op):
                flat = self._step(op, flat)
        return flat[:size]

    def _step(self, op: Step, x: Array) -> Array:
        if isinstance(op, ir.Collective):
            return self.backend.move(self.backend.varying(x, op.axes), op)
        by = op.by if isinstance(op, ir.Scale) else None
        return ops.converted(op, x, self.lowered.schedule.file, by)


def recipe(lowered: Lowered, name: str, like: Sequence[Array]) -> Recipe:
    """The reduction that a phase applies to one of its inputs.

    Args:
        lowered: The phase.
        name: The name of the input.
        like: Leaves with the dtypes of the gradients.

    Raises:
        CommplanError: CP0815 if the plan's reduction is not possible inside the backward pass.
    """
    value = lowered.arguments[name]
    values = {entry.id: entry for entry in lowered.phase.values}
    reduction = chains(value.id, DefUse(lowered.ops), values)
    flat = {dtype.numpy_name: chain for dtype, chain in reduction.flat.items()}
    if not reduction.is_unsharded:
        _cannot(lowered, name, "it is not reduced to one value that is the same on all ranks")
    steps = (*(op for chain in flat.values() for op in chain), *reduction.tree)
    if any(isinstance(op, ir.Scale) and isinstance(op.by, str) for op in steps):
        _cannot(lowered, name, "its mean is weighted by a value, which the backward pass does not have")
    if any(isinstance(op, ir.Encode) for op in steps):
        _cannot(lowered, name, "it is sent in blocks of the plan's buffers, which the backward pass has not")
    if not any(isinstance(op, ir.Collective) for op in steps):
        _cannot(lowered, name, f"phase `{lowered.phase.name}` does not reduce it")
    dtypes = dict.fromkeys(str(leaf.dtype) for leaf in map(jnp.asarray, like) if _has_gradient(leaf))
    unsupported = [dtype for dtype in dtypes if dtype not in flat]
    if flat and unsupported:
        compiled = " and ".join(flat)
        problem = f"a leaf of the parameters is {unsupported[0]}, but `{name}` was compiled for {compiled}"
        _cannot(lowered, name, problem)
    return Recipe(value.placement.partial, flat, reduction.tree, lowered)


def _has_gradient(leaf: Array) -> bool:
    """Whether the leaf is reduced: integers have no gradient, and an empty leaf has no elements."""
    return bool(leaf.size) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _cannot(lowered: Lowered, name: str, reason: str) -> NoReturn:
    """Raise CP0815 for input `name`."""
    message = f"run.tap cannot reduce like `{name}`: {reason}"
    note = "call the phase after the gradient instead"
    fail("CP0815", message, note, span=lowered.phase.span, file=lowered.schedule.file)


def save_anything_except_tapped(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` for a scan body with tapped parameters: it saves everything except these.

    Nothing is computed twice. Without the policy `lax.scan` stores a copy of the tapped parameters, since
    their type differs from that of the original.
    """
    return primitive.name != "pvary"  # the cast to varying


def tap(reduction: Recipe, tree: Any) -> Any:
    """The identity on `tree`, whose gradient is reduced inside the backward pass.

    Args:
        reduction: The reduction of the gradient.
        tree: A pytree of parameters, the same on all ranks.

    Returns:
        The tree, whose leaves are typed as varying over `reduction.axes`.
    """

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return _vary(x)

    def _vary(x: Any) -> Any:
        def vary(leaf: Array) -> Array:
            return reduction.backend.varying(leaf, reduction.axes)

        return jax.tree_util.tree_map(vary, x)

    def forward(x: Any) -> tuple[Any, None]:
        return _vary(x), None

    def backward(_: None, gradient: Any) -> tuple[Any]:
        leaves, structure = jax.tree_util.tree_flatten(gradient)
        with_gradient = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
        reduced = reduction.reduce([leaves[i] for i in with_gradient])
        for i, leaf in zip(with_gradient, reduced, strict=True):
            leaves[i] = leaf
        return (jax.tree_util.tree_unflatten(structure, leaves),)

    identity.defvjp(forward, backward)
    return identity(tree)
