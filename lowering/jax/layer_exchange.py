"""How the weights of one layer travel: gathered and scattered by schedules for its own leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.pytree import Tree
from commplan.lowering.jax.typing_shim import jax, jnp, lax

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
    """A layer whose leaves are split over `axes`; `partial`: the axes that its gradient is summed over.
    on_devices: of a mesh, not on ranks of a communicator."""

    axes: tuple[str, ...]
    partial: tuple[str, ...]
    backend: Backend
    gathers: tuple[LeafCollectives, ...]
    scatters: tuple[LeafCollectives, ...]
    on_devices: bool

    def gather(self, shards: Arrays, after: Arrays) -> list[Array]:
        """The whole leaves, each typed as differing over `partial`; not begun before `after` exists."""
        own, whole = [self._after(shard, after) for shard in shards], list(shards)
        for part in self.gathers:
            for place, leaf in zip(part.places, part.run(own), strict=True):
                whole[place] = self.backend.varying(leaf, self.partial)
        return whole

    def scatter(self, gradients: Arrays, after: Arrays) -> list[Array]:
        """The shards' gradient of the leaves' own terms, None where there is none; not begun before `after`
        exists."""
        own = [x if x is None else self.backend.varying(x, self.partial) for x in gradients]
        result = list(gradients)
        if self.on_devices:
            own = self._barred(own, [x for x in after if x is not None])
        else:
            own = [x if x is None else self._after(x, after) for x in own]
        for part in self.scatters:
            for place, leaf in zip(part.places, part.run(own), strict=True):
                result[place] = leaf
        return result

    def _barred(self, xs: Arrays, after: Arrays) -> list[Array]:
        """`xs`, not before `after`, where XLA keeps a barrier: as CPU devices run collectives in the order of
        their schedule, a dependency of data would only cost them a copy."""
        places = [place for place, x in enumerate(xs) if x is not None]
        if not after or not places:
            return list(xs)
        tied, _ = lax.optimization_barrier(([xs[place] for place in places], list(after)))
        result = list(xs)
        for place, x in zip(places, tied, strict=True):
            result[place] = x
        return result

    def _after(self, x: Array, after: Arrays) -> Array:
        """`x`, not before `after`; what has no dimensions does not travel, or alone."""
        for previous in after if x.ndim else ():
            if previous is not None and jnp.issubdtype(previous.dtype, jnp.number) and previous.size:
                x = self.backend.tie(x, previous, self.axes)
        return x
