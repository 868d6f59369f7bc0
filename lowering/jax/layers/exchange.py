"""How the weights of one layer travel: gathered and scattered by schedules for its own leaves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commplan.ir.schedule import Schedule
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.primitives import optimization_barrier
from commplan.lowering.jax.pytree import Tree
from commplan.lowering.jax.typing_shim import jax, jnp

Array = Any
Arrays = Sequence[Array]


_known: weakref.WeakSet[ShardedLayer] = weakref.WeakSet()


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


@dataclass(frozen=True, eq=False)
class ShardedLayer:
    """A layer whose leaves are split over `axes`; `partial`: the axes that its gradient is summed over.

    platform: of the devices of a mesh; empty on ranks of a communicator, which need dependencies of data.
    """

    axes: tuple[str, ...]
    partial: tuple[str, ...]
    backend: Backend
    gathers: tuple[LeafCollectives, ...]
    scatters: tuple[LeafCollectives, ...]
    platform: str

    def __post_init__(self) -> None:
        _known.add(self)

    def gather(self, shards: Arrays) -> list[Array]:
        """The whole leaves, each typed as differing over `partial`."""
        whole = list(shards)
        for part in self.gathers:
            for place, leaf in zip(part.places, part.run(shards), strict=True):
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

    def after(self, shards: Arrays, values: Arrays) -> tuple[list[Array], list[Array]]:
        """Both; a gather of the first is not begun before each of the second exists, which are used on."""
        return self._tied(shards, values) if self.platform in ("", "cpu") else barred(shards, values)

    def gradients_after(self, gradients: Arrays, values: Arrays) -> tuple[list[Array], list[Array]]:
        """The same of gradients. CPU devices run collectives in the order of their schedule, and a dependency
        of data would cost a copy of each whole gradient."""
        return barred(gradients, values) if self.platform else self._tied(gradients, values)

    def _tied(self, xs: Arrays, values: Arrays) -> tuple[list[Array], list[Array]]:
        """By a dependency of data, see `order.tie`. What has no dimensions does not travel, or alone."""
        known = [x for x in values if x is not None and jnp.issubdtype(x.dtype, jnp.number)]
        tied = list(xs)
        for place, x in enumerate(xs):
            if x is not None and x.ndim:
                for previous in known:
                    tied[place] = self.backend.tie(tied[place], previous, self.axes)
        return tied, list(values)


def schedules_in_use() -> tuple[Schedule, ...]:
    """Those by which layers of this process are gathered and scattered, while their runs exist."""
    parts = [part for layer in list(_known) for part in (*layer.gathers, *layer.scatters)]
    return tuple(part.lowered.schedule for part in parts)


def barred(xs: Arrays, values: Arrays) -> tuple[list[Array], list[Array]]:
    """By a barrier; where none of what it gives for `values` is used, XLA may take them out of it."""
    if all(x is None for x in xs) or all(x is None for x in values):
        return list(xs), list(values)
    return optimization_barrier((list(xs), list(values)))
