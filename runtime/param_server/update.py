"""Apply the function of an exchange to flat chunks. It is compiled once per chunk size.

Weights and gradients are flat arrays. An auxiliary state, such as momentum, is a pytree in which every copy
of the weights' structure is replaced by one flat array. Scalars are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np

from commplan.diagnostics import Span, fail, type_of
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType
from commplan.lowering.jax.pytree import LEAF, Structure
from commplan.protocol.units import StateLayout
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.param_server.elementwise import non_elementwise_reason
from commplan.runtime.param_server.store import Array

# A node of the auxiliary state: whether it is a scalar, and its index among the scalars or the slots.
Role = tuple[bool, int]
_MOST_CHARACTERS = 300  # The most characters of the user's error in a message.
_LEAST_LENGTH = 4  # The fewest elements of a traced chunk: arrays of one element would hide violations.
_LONGER = 3  # The elements that the second traced chunk has more.


class ChunkUpdate:
    """A function on chunks, FN(w, g) -> w or FN(w, m, g) -> w, m.

    Args:
        name: The name of the function.
        fn: The function.
        weights: The layout of w.
        gradients: The dtype of g, by part.
        auxiliary: The auxiliary state m; None for a function without one.
        span: The span of the exchange.
        file: The plan's file.

    Raises:
        CommplanError: CP0970 if `fn` fails on flat arrays or is not elementwise; CP0971 if its results differ
            from its operands in structure, shape or dtype.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        weights: StateLayout,
        gradients: Sequence[DType],
        auxiliary: AuxiliaryState | None,
        span: Span,
        file: str,
    ) -> None:
        self.name, self.fn, self.auxiliary = name, fn, auxiliary
        self.weights, self.gradients = weights, tuple(gradients)
        self.span, self.file = span, file
        for number in sorted({unit.part for unit in weights.units}):
            self._check(number, max(unit.size for unit in weights.units if unit.part == number))
        self._compiled = jax.jit(self._call)

    def __call__(
        self, w: Array, slots: Sequence[Array], scalars: Sequence[Array], g: Array
    ) -> tuple[Array, list[Array], list[Array]]:
        """Update one unit.

        Args:
            w: The weights of the unit, a flat array.
            slots: The slots of m, flat arrays of the same length; empty without m.
            scalars: The scalars of m, arrays without dimensions; empty without m.
            g: The gradient, a flat array of the same length.

        Returns:
            The new weights, slots and scalars: read-only arrays, or copies of those that would share memory
            with `g`.
        """
        updated = self._compiled(w, tuple(slots), tuple(scalars), g)
        arrays = [_without_aliasing(np.asarray(array), g) for array in (updated[0], *updated[1], *updated[2])]
        count = 1 + len(slots)
        return arrays[0], arrays[1:count], arrays[count:]

    def _call(self, w: Any, slots: Sequence[Any], scalars: Sequence[Any], g: Any) -> tuple[Any, Any, Any]:
        """Call the function on one chunk, and check its results. Raises CP0971."""
        if self.auxiliary is None:
            new = self.fn(w, g)
            return self._check_result(new, w.shape, w.dtype, "weights"), (), ()
        returned = self.fn(w, self.auxiliary.tree(slots, scalars), g)
        if not isinstance(returned, tuple | list) or len(cast("Sequence[Any]", returned)) != 2:
            kind = type_of(cast("object", returned))
            self._fail_results(f"returned {kind}, expected a tuple of two values")
        new, state = cast("Sequence[Any]", returned)
        nodes, structure = jax.tree_util.tree_flatten(state)
        if structure != self.auxiliary.structure:
            self._fail_results("returned the auxiliary state in another structure than that of its argument")
        new_slots: list[Any] = [None] * len(slots)
        new_scalars: list[Any] = [None] * len(scalars)
        for (is_scalar, index), node in zip(self.auxiliary.roles, nodes, strict=True):
            arguments, results = (scalars, new_scalars) if is_scalar else (slots, new_slots)
            shape, dtype = arguments[index].shape, arguments[index].dtype
            results[index] = self._check_result(node, shape, dtype, "the auxiliary state")
        new_weights = self._check_result(new, w.shape, w.dtype, "weights")
        return new_weights, tuple(new_slots), tuple(new_scalars)

    def _check_result(self, value: Any, shape: tuple[int, ...], dtype: Any, subject: str) -> Any:
        """`value` as an array of `shape` and `dtype`. Raises CP0971 for any other."""
        if jax.tree_util.tree_structure(value) != LEAF:
            self._fail_results(f"returned {type_of(value)} for the flat array of {subject}")
        is_weak = isinstance(value, bool | int | float) or bool(getattr(value, "weak_type", False))
        x = jnp.asarray(value, dtype) if is_weak else jnp.asarray(value)
        if x.shape != shape or x.dtype != dtype:
            actual = f"{x.dtype}{list(x.shape)}"
            expected = f"{np.dtype(dtype)}{list(shape)}"
            self._fail_results(f"returned {actual} for {subject}, expected {expected}")
        return x

    def _fail_results(self, problem: str) -> NoReturn:
        """Raise CP0971; `problem` continues after the function's name."""
        fail(
            "CP0971",
            f"function `{self.name}` {problem}",
            "servers call it with flat arrays of their elements, and store its results in their place",
            span=self.span,
            file=self.file,
        )

    def _check(self, part: int, size: int) -> None:
        """Trace the function for a chunk of about `size` elements, and for a longer one. Raises CP0970."""
        length = max(size, _LEAST_LENGTH)
        reason = non_elementwise_reason(self._trace(part, length), self._trace(part, length + _LONGER))
        if reason:
            self._fail_function("is not elementwise", reason)

    def _trace(self, part: int, size: int) -> Any:
        """The jaxpr of the function for a chunk of `size` elements of a part. Raises CP0970 or CP0971."""

        def spec(dtype: DType, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, numpy_dtype(dtype))

        slots = scalars = ()
        if self.auxiliary is not None:
            slots = tuple(spec(parts[part].dtype, size) for parts in self.auxiliary.layout.slots)
            scalars = tuple(spec(dtype) for dtype in self.auxiliary.scalars)
        w = spec(self.weights.parts[part].dtype, size)
        g = spec(self.gradients[part], size)
        try:
            return jax.make_jaxpr(self._call)(w, slots, scalars, g)
        except Exception as error:
            if getattr(error, "diagnostics", None):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:_MOST_CHARACTERS]
            self._fail_function("fails on flat arrays", reason)

    def _fail_function(self, problem: str, reason: str) -> NoReturn:
        """Raise CP0970; `problem` continues after "but"."""
        fail(
            "CP0970",
            f"function `{self.name}` updates chunks on servers, but {problem}",
            reason,
            "each element of a result must depend only on the same element of the arguments",
            "write it with jax.tree.map over w and g, without names of leaves; an optimizer that needs the"
            " whole tree must update after `reduce` instead",
            span=self.span,
            file=self.file,
        )


class AuxiliaryState:
    """An auxiliary state, as a tree that contains flat arrays.

    Args:
        layout: The layout of the state.
        leaves: The leaves of the state.
        structure: The pytree structure of the state.
        weights: The pytree structure of the weights.
        span: The span of the exchange.
        file: The plan's file.

    Attributes:
        layout: The layout of the state.
        scalars: The dtypes of its scalars.
        structure: The pytree structure, with copies of the weights as leaves.
        roles: The role of each leaf of `structure`, in order.

    Raises:
        CommplanError: CP0972 if the state contains the weights in another structure.
    """

    def __init__(
        self, layout: StateLayout, leaves: Sequence[Leaf], structure: Structure, weights: Structure,
        span: Span, file: str,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.scalars = tuple(leaves[index].dtype for index in layout.scalars)
        slot_of_leaf = {
            leaf: slot for slot, parts in enumerate(layout.slots) for flat in parts for leaf in flat.leaves
        }
        tree = jax.tree_util.tree_unflatten(structure, range(len(leaves)))

        def is_copy(node: Any) -> bool:
            return jax.tree_util.tree_structure(node) == weights

        nodes, self.structure = jax.tree_util.tree_flatten(tree, is_leaf=is_copy)
        self.roles: list[Role] = []
        for node in nodes:
            indices: list[int] = jax.tree_util.tree_leaves(node)
            slots = {slot_of_leaf[index] for index in indices if index in slot_of_leaf}
            if len(indices) == 1 and indices[0] in layout.scalars:  # Also if the weights are one leaf.
                self.roles.append((True, layout.scalars.index(indices[0])))
            elif len(slots) == 1 and is_copy(node):
                self.roles.append((False, slots.pop()))
            else:
                path = leaves[indices[0]].path
                fail(
                    "CP0972",
                    f"the auxiliary state contains `{path}` in another structure than the weights",
                    "on servers a copy of the weights is one flat array: it must be the same kind of tree",
                    "pass the shapes of both states as pytrees of the same classes",
                    span=span,
                    file=file,
                )

    def tree(self, slots: Sequence[Any], scalars: Sequence[Any]) -> Any:
        """The tree of a chunk, from its slots, which are flat arrays, and the scalars."""
        nodes = [(scalars if is_scalar else slots)[index] for is_scalar, index in self.roles]
        return jax.tree_util.tree_unflatten(self.structure, nodes)


def _without_aliasing(array: Array, g: Array) -> Array:
    """`array`, copied if it shares memory with `g`, as it does if a function returns an argument."""
    return array.copy() if np.may_share_memory(array, g) else array
