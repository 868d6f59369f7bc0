"""Gathers and scatters the weights of one layer, with schedules for its leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.collectives.order import with_barriers
from commplan.lowering.jax.layers.vjp import Arrays
from commplan.lowering.jax.phase import Lowered, register_layers
from commplan.lowering.jax.pytree import Tree


@dataclass(frozen=True)
class LeafCollectives:
    """Some leaves of a layer, and the phase that moves them.

    Attributes:
        places: The indices of the leaves in the layer.
        lowered: The phase, which has one input and one output.
    """

    places: tuple[int, ...]
    lowered: Lowered

    def run(self, leaves: Arrays) -> list[Array]:
        """The phase's output for its leaves, in the order of `places`; `leaves` are all of the layer."""
        (name,), (output,) = self.lowered.arguments, self.lowered.outputs
        selected = tuple(leaves[place] for place in self.places)
        operand = Tree(selected, jax.tree_util.tree_structure([0] * len(selected)))
        return list(self.lowered.run({name: operand}, {})[0][output.name].leaves)


@dataclass(frozen=True, eq=False)
class ShardedLayer:
    """The exchange of the weights of a layer, which are sharded over ranks.

    Attributes:
        axes: The axes that the weights are sharded over.
        partial: The axes that the gradient is summed over.
        backend: The backend.
        gathers: The gathers of the weights. A leaf that none of them moves is not sharded.
        scatters: The reduce-scatters of the gradient.
    """

    axes: tuple[str, ...]
    partial: tuple[str, ...]
    backend: Backend
    gathers: tuple[LeafCollectives, ...]
    scatters: tuple[LeafCollectives, ...]

    def __post_init__(self) -> None:
        register_layers(self, (part.lowered.schedule for part in (*self.gathers, *self.scatters)))

    def gather(self, shards: Arrays) -> list[Array]:
        """The whole leaves. Those that are gathered are typed as varying over `partial`."""
        whole = list(shards)
        for part in self.gathers:
            for place, leaf in zip(part.places, part.run(shards), strict=True):
                whole[place] = self.backend.varying(leaf, self.partial)
        return whole

    def scatter(self, gradients: Arrays) -> list[Any]:
        """The shards' gradient, from this rank's terms of the whole gradient. None stays None."""
        terms = [x if x is None else self.backend.varying(x, self.partial) for x in gradients]
        result = list(gradients)
        for part in self.scatters:
            for place, leaf in zip(part.places, part.run(terms), strict=True):
                result[place] = leaf
        return result

    def after(self, shards: Arrays, values: Arrays) -> tuple[list[Any], list[Any]]:
        """Order gathers of `shards` after `values`; return both, unchanged. None stays None.

        Callers must use the returned values instead of the original.
        """
        is_tied = self.backend.platform in ("", "cpu")
        return self._tie(shards, values) if is_tied else with_barriers(shards, values)

    def gradients_after(self, gradients: Arrays, values: Arrays) -> tuple[list[Any], list[Any]]:
        """Order scatters of `gradients` after `values`, as `after` does.

        Devices of a mesh need only a barrier: CPU devices run these collectives in the order of XLA's
        schedule. A data dependency, which ranks of a communicator need, would copy each whole gradient.
        """
        return with_barriers(gradients, values) if self.backend.platform else self._tie(gradients, values)

    def _tie(self, xs: Arrays, values: Arrays) -> tuple[list[Any], list[Any]]:
        """Order by a data dependency (see `order.tie`). Scalars in `xs` are not ordered."""
        numeric = [x for x in values if x is not None and jnp.issubdtype(x.dtype, jnp.number)]
        tied = list(xs)
        for place, x in enumerate(xs):
            if x is not None and x.ndim:
                for previous in numeric:
                    tied[place] = self.backend.tie(tied[place], previous, self.axes)
        return tied, list(values)
