"""The function of an exchange on flat chunks: compiled once for each size of chunk.

Weights and gradient come as flat arrays. What is kept beside the weights comes as the tree that it is, with a
flat array in the place of every copy of the weights' structure; scalars stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from commplan.diagnostics import Span, fail
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType
from commplan.lowering.jax.pytree import LEAF, Structure
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.protocol.units import StateLayout
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.param_server.elementwise import why_not
from commplan.runtime.param_server.store import Array

# Of what is kept beside the weights: whether it is a scalar, and which.
Role = tuple[bool, int]


class ChunkUpdate:
    """`fn` on chunks.

    fn: FN(w, g) -> w or FN(w, m, g) -> w, m. weights: the layout of w. beside: that of m, its leaves and its
    structure, and the structure of the weights; None where there is no m. gradients: by part, the dtype of g.

    Raises CP0970 where `fn` fails on flat arrays or is not elementwise, CP0971 where it returns something
    else than it is given, CP0972 where m has the weights in it in another structure.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        weights: StateLayout,
        gradients: Sequence[DType],
        scalars: Beside | None,
        span: Span,
        file: str,
    ) -> None:
        self.name, self.fn, self.beside = name, fn, scalars
        self.weights, self.gradients = weights, tuple(gradients)
        self.span, self.file = span, file
        for number in sorted({unit.part for unit in weights.units}):
            self._check(number, max(unit.size for unit in weights.units if unit.part == number))
        self._compiled = jax.jit(self._called)

    def __call__(
        self, w: Array, slots: Sequence[Array], scalars: Sequence[Array], g: Array
    ) -> tuple[Array, list[Array], list[Array]]:
        """New weights, slots and scalars; read-only arrays, none of which shares memory with `g`."""
        updated = self._compiled(w, tuple(slots), tuple(scalars), g)
        arrays = [_own(np.asarray(array), g) for array in (updated[0], *updated[1], *updated[2])]
        count = 1 + len(slots)
        return arrays[0], arrays[1:count], arrays[count:]

    def _called(self, w: Any, slots: Sequence[Any], scalars: Sequence[Any], g: Any) -> tuple[Any, Any, Any]:
        if self.beside is None:
            new = self.fn(w, g)
            return self._array(new, w.shape, w.dtype, "weights"), (), ()
        answer = self.fn(w, self.beside.tree(slots, scalars), g)
        if not isinstance(answer, tuple | list) or len(cast("Sequence[Any]", answer)) != 2:
            kind = type(cast("object", answer)).__name__
            self._wrong(f"returned a {kind}, and should return two values in a tuple")
        new, kept = cast("Sequence[Any]", answer)
        nodes, structure = jax.tree_util.tree_flatten(kept)
        if structure != self.beside.structure:
            self._wrong("returned what is beside the weights in another structure than it came")
        places: tuple[list[Any], list[Any]] = ([None] * len(slots), [None] * len(scalars))
        for (is_scalar, which), node in zip(self.beside.roles, nodes, strict=True):
            like = (scalars if is_scalar else slots)[which]
            places[is_scalar][which] = self._array(node, like.shape, like.dtype, "what is beside the weights")
        return self._array(new, w.shape, w.dtype, "weights"), tuple(places[0]), tuple(places[1])

    def _array(self, value: Any, shape: tuple[int, ...], dtype: Any, subject: str) -> Any:
        if jax.tree_util.tree_structure(value) != LEAF:
            self._wrong(f"returned a {type(value).__name__} for the flat array of {subject}")
        weak = isinstance(value, bool | int | float) or bool(getattr(value, "weak_type", False))
        x = jnp.asarray(value, dtype) if weak else jnp.asarray(value)
        if x.shape != shape or x.dtype != dtype:
            got, wanted = f"{x.dtype}{list(x.shape)}", f"{np.dtype(dtype)}{list(shape)}"
            self._wrong(f"returned {got} for {wanted} of {subject}")
        return x

    def _wrong(self, subject: str) -> NoReturn:
        fail(
            "CP0971",
            f"function `{self.name}` {subject}",
            "owners of chunks give it flat arrays of their elements, and keep what it returns in their place",
            span=self.span,
            file=self.file,
        )

    def _check(self, part: int, size: int) -> None:
        """Trace the function for a chunk of `size` elements, and for a longer one."""
        length = max(size, 4)  # where every array has one element nothing shows
        reason = why_not(self._traced(part, length), self._traced(part, length + 3))
        if reason:
            self._refuse("is not elementwise", reason)

    def _traced(self, part: int, size: int) -> Any:
        def shaped(dtype: DType, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, numpy_dtype(dtype))

        slots = scalars = ()
        if self.beside is not None:
            slots = tuple(shaped(parts[part].dtype, size) for parts in self.beside.layout.slots)
            scalars = tuple(shaped(dtype) for dtype in self.beside.scalars)
        w, g = shaped(self.weights.parts[part].dtype, size), shaped(self.gradients[part], size)
        try:
            return jax.make_jaxpr(self._called)(w, slots, scalars, g)
        except Exception as error:
            if getattr(error, "diagnostics", None):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self._refuse("fails on flat arrays", reason)

    def _refuse(self, subject: str, reason: str) -> NoReturn:
        fail(
            "CP0970",
            f"function `{self.name}` updates chunks on their owners, and {subject}",
            reason,
            "each element of what it returns must depend on the same element of what it is given alone",
            "write it with jax.tree.map over w and g, without names of leaves; an optimiser that needs a view"
            " of the whole tree updates after `reduce` instead",
            span=self.span,
            file=self.file,
        )


class Beside:
    """What is kept beside the weights, as a tree with flat arrays in it. Raises CP0972.

    leaves, structure: of the state. weights: the structure of the weights.
    """

    def __init__(
        self, layout: StateLayout, leaves: Sequence[Leaf], structure: Structure, weights: Structure,
        span: Span, file: str,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.scalars = tuple(leaves[place].dtype for place in layout.scalars)
        slot_of = {p: k for k, parts in enumerate(layout.slots) for flat in parts for p in flat.leaves}
        tree = jax.tree_util.tree_unflatten(structure, range(len(leaves)))

        def copy(node: Any) -> bool:
            return jax.tree_util.tree_structure(node) == weights

        nodes, self.structure = jax.tree_util.tree_flatten(tree, is_leaf=copy)
        self.roles: list[Role] = []
        for node in nodes:
            places: list[int] = jax.tree_util.tree_leaves(node)
            slots = {slot_of[place] for place in places if place in slot_of}
            if len(places) == 1 and places[0] in layout.scalars:
                self.roles.append((True, layout.scalars.index(places[0])))
            elif len(slots) == 1 and jax.tree_util.tree_structure(node) == weights:
                self.roles.append((False, slots.pop()))
            else:
                path = leaves[places[0]].path
                fail(
                    "CP0972",
                    f"what is beside the weights holds `{path}` in another structure than the weights have",
                    "on its owners a copy of the weights is one flat array: it must be the same kind of tree",
                    "give the shapes of both states from pytrees of the same classes",
                    span=span,
                    file=file,
                )

    def tree(self, slots: Sequence[Any], scalars: Sequence[Any]) -> Any:
        """The tree of a chunk."""
        nodes = [(scalars if is_scalar else slots)[which] for is_scalar, which in self.roles]
        return jax.tree_util.tree_unflatten(self.structure, nodes)


def _own(array: Array, g: Array) -> Array:
    """What a function returns as it came is the memory that it came in."""
    return array.copy() if np.may_share_memory(array, g) else array
