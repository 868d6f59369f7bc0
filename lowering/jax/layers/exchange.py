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
    """Some leaves of a layer, and the phase with one input and one output that moves them."""

    places: tuple[int, ...]
    lowered: Lowered

    def run(self, leaves: Arrays) -> list[Array]:
        """The phase's output for these leaves of the layer."""
        (name,), (output,) = self.lowered.arguments, self.lowered.outputs
        selected = tuple(leaves[place] for place in self.places)
        operand = Tree(selected, jax.tree_util.tree_structure([0] * len(selected)))
        return list(self.lowered.run({name: operand}, {})[0][output.name].leaves)


@dataclass(frozen=True, eq=False)
class ShardedLayer:
    """A layer whose leaves are split over `axes`.

    Attributes:
        axes: The axes that the weights are sharded over.
        partial: The axes that the gradient is summed over.
        backend: The backend.
        gathers: The gathers of the weights.
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
        """The whole leaves, typed as varying over `partial`."""
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
        """Both, unchanged; gathers of `shards` are ordered after `values`. Callers must use these values."""
        is_tied = self.backend.platform in ("", "cpu")
        return self._tie(shards, values) if is_tied else with_barriers(shards, values)

    def gradients_after(self, gradients: Arrays, values: Arrays) -> tuple[list[Any], list[Any]]:
        """`after` for gradients. CPU devices run collectives in the order of the schedule, so they need a
        barrier only: a data dependency, which ranks of a communicator need, would copy each whole gradient.
        """
        return with_barriers(gradients, values) if self.backend.platform else self._tie(gradients, values)

    def _tie(self, xs: Arrays, values: Arrays) -> tuple[list[Any], list[Any]]:
        """Order by a data dependency (see `order.tie`). Scalars are gathered separately, or not at all."""
        numeric = [x for x in values if x is not None and jnp.issubdtype(x.dtype, jnp.number)]
        tied = list(xs)
        for place, x in enumerate(xs):
            if x is not None and x.ndim:
                for previous in numeric:
                    tied[place] = self.backend.tie(tied[place], previous, self.axes)
        return tied, list(values)
