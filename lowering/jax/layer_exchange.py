"""How the weights of one layer travel: gathered and scattered by schedules for its own leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.pytree import Tree
from commplan.lowering.jax.typing_shim import jax, jnp

Array = Any
Arrays = Sequence[Array]


@dataclass(frozen=True)
class LeafCollectives:
    """Some leaves of a layer, and the phase of one input and one output that moves them together."""

    places: tuple[int, ...]
    lowered: Lowered

    def run(self, leaves: Arrays) -> list[Array]:
        """The phase's output, of these leaves of the layer."""
        (name,), (output,) = self.lowered.arguments, self.lowered.outputs
        own = tuple(leaves[place] for place in self.places)
        given = Tree(own, jax.tree_util.tree_structure([0] * len(own)))
        return list(self.lowered.run({name: given}, {}, None)[0][output.name].leaves)


@dataclass(frozen=True)
class ShardedLayer:
    """A layer whose leaves are split over `axes`; `partial`: the axes that its gradient is summed over."""

    axes: tuple[str, ...]
    partial: tuple[str, ...]
    backend: Backend
    gathers: tuple[LeafCollectives, ...]
    scatters: tuple[LeafCollectives, ...]

    def gather(self, shards: Arrays, after: Arrays) -> list[Array]:
        """The whole leaves, each typed as differing over `partial`; not begun before `after` exists."""
        own = [self._after(shard, after) if shard.ndim else shard for shard in shards]
        whole = list(shards)
        for part in self.gathers:
            for place, leaf in zip(part.places, part.run(own), strict=True):
                whole[place] = self.backend.varying(leaf, self.partial)
        return whole

    def scatter(self, gradients: Arrays) -> list[Array]:
        """The shards' gradient of the leaves' own terms; None where there is none."""
        own = [x if x is None else self.backend.varying(x, self.partial) for x in gradients]
        result = list(gradients)
        for part in self.scatters:
            for place, leaf in zip(part.places, part.run(own), strict=True):
                result[place] = leaf
        return result

    def _after(self, shard: Array, after: Arrays) -> Array:
        for previous in after:
            if previous is not None and jnp.issubdtype(previous.dtype, jnp.number) and previous.size:
                shard = self.backend.tie(shard, previous, self.axes)
        return shard
