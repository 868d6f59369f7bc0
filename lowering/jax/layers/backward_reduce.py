"""A reduction inside the backward pass: for layers under `lax.scan`, where waiting for the whole gradient
would overlap nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from commplan.diagnostics import fail
from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.lowering.jax import ops
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.lowering.taps import TAP, Step, chains, joined

Array = Any


@dataclass(frozen=True)
class Recipe:
    """How a plan reduces one input: what happens to a buffer of each dtype, then to the tree.

    axes: those that the reduction removes. flat: by dtype, for every one that comes; empty where the plan
    packs no buffers, and `tree` alone says what to do. lowered: the phase that reduces it.
    """

    axes: tuple[str, ...]
    flat: Mapping[str, tuple[Step, ...]]
    tree: tuple[Step, ...]
    lowered: Lowered

    @property
    def backend(self) -> Backend:
        return self.lowered.backend

    def reduce(self, leaves: list[Array]) -> list[Array]:
        """Reduce gradients as the plan does: packed by dtype, one after another; large ones each by itself as
        soon as it is there, where that runs beside what is still computed."""
        results = list(leaves)
        previous: Array = None
        sizes = [(str(leaf.dtype), leaf.nbytes) for leaf in leaves]
        for dtype, places in joined(sizes, self.backend.asynchronous):
            parts = [leaves[i].reshape(-1) for i in places]
            flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
            if not flat.size:  # nothing to move
                for i in places:
                    results[i] = self.backend.same(leaves[i], self.axes)
                continue
            if previous is not None and not self.backend.asynchronous:
                flat = self.backend.tie(flat, previous, self.axes)
            chain = self.flat[dtype] if self.flat else ()
            with self.backend.apart(f"{self.lowered.phase.name}/{places[0]}"), jax.named_scope(TAP):
                previous = self._run((*chain, *self.tree), flat).astype(dtype)
            at = 0
            for i in places:
                size = leaves[i].size
                results[i] = previous[at : at + size].reshape(leaves[i].shape)
                at += size
        return results

    def _run(self, chain: tuple[Step, ...], flat: Array) -> Array:
        size = flat.shape[0]
        scattered = [op for op in chain if isinstance(op, ir.Collective) and op.kind != "all_reduce"]
        for op in scattered[:1]:
            flat = ops.pad(flat, self.backend.ways(op.axes))
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
    """How `lowered` reduces its partial input `name`, for gradients of the dtypes of `like`.

    Raises CP0815 where a tap cannot do the same.
    """
    value = lowered.arguments[name]
    own = chains(value.id, DefUse(lowered.ops), {each.id: each for each in lowered.phase.values})
    flat = {dtype.numpy_name: chain for dtype, chain in own.flat.items()}
    if not own.whole:
        _cannot(lowered, name, "it is not reduced to one value that is the same on all ranks")
    steps = (*(op for chain in flat.values() for op in chain), *own.tree)
    if any(isinstance(op, ir.Scale) and isinstance(op.by, str) for op in steps):
        _cannot(lowered, name, "its mean is weighted by a value, which the backward pass does not have")
    if not any(isinstance(op, ir.Collective) for op in steps):
        _cannot(lowered, name, f"phase `{lowered.phase.name}` does not reduce it")
    dtypes = dict.fromkeys(str(leaf.dtype) for leaf in map(jnp.asarray, like) if _has_gradient(leaf))
    other = [dtype for dtype in dtypes if dtype not in flat]
    if flat and other:
        why = f"the parameters have a leaf of {other[0]}, and `{name}` was compiled for {' and '.join(flat)}"
        _cannot(lowered, name, why)
    return Recipe(value.placement.partial, flat, own.tree, lowered)


def _has_gradient(leaf: Array) -> bool:
    """Whether there is anything to reduce: integers have no gradient, and an empty leaf no elements."""
    return bool(leaf.size) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _cannot(lowered: Lowered, name: str, why: str) -> NoReturn:
    message = f"run.tap cannot reduce like `{name}`: {why}"
    note = "call the phase after the gradient instead"
    fail("CP0815", message, note, span=lowered.phase.span, file=lowered.schedule.file)


def save_anything_except_tapped(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` for the body of a scan in which parameters are tapped: nothing is computed
    twice, and the backward pass reads the parameters where they are.

    Without it `lax.scan` keeps a copy of what a tap gives, since that has another type than what it is given.
    """
    return primitive.name != "pvary"  # the cast to varying


def tap(how: Recipe, tree: Any) -> Any:
    """`tree` itself; its gradient is reduced inside the backward pass, and is the same over `how.axes`."""

    @jax.custom_vjp
    def through(x: Any) -> Any:
        return _vary(x)

    def _vary(x: Any) -> Any:
        def vary(leaf: Array) -> Array:
            return how.backend.varying(leaf, how.axes)

        return jax.tree_util.tree_map(vary, x)

    def forward(x: Any) -> tuple[Any, None]:
        return _vary(x), None

    def backward(_: None, gradient: Any) -> tuple[Any]:
        leaves, structure = jax.tree_util.tree_flatten(gradient)
        real = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
        done = how.reduce([leaves[i] for i in real])
        for i, leaf in zip(real, done, strict=True):
            leaves[i] = leaf
        return (jax.tree_util.tree_unflatten(structure, leaves),)

    through.defvjp(forward, backward)
    return through(tree)
