"""Layers inside a step: with sharded weights, or with gradients that the backward pass reduces.

These are the implementations of `run.layers`, `run.scan_layers`, `run.shards` and `run.tap`. The schedules of
a layer come from `layer_schedules`, and its derivative from `lowering.jax.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from commplan.ir.plan import name_of
from commplan.ir.schedule import Leaf, Schedule
from commplan.ir.shard_shapes import cut_all
from commplan.lowering.jax import _compat, ops
from commplan.lowering.jax.jaxprs import trace
from commplan.lowering.jax.layers import backward_reduce
from commplan.lowering.jax.layers.exchange import LeafCollectives, ShardedLayer
from commplan.lowering.jax.layers.sharded import Layer, run_scanned, run_unrolled
from commplan.lowering.jax.layers.vjp import LayerVjp, layer_vjp
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.pytree import Tree, flatten
from commplan.pytree import leaf_of, leaves_of
from commplan.runtime.context import Context
from commplan.runtime.layer_schedules import ShardedStages, sharded_stages

# The function of a layer: maps its whole weights and its input, both pytrees, to its result.
Body = Callable[[Any, Any], Any]
# The leaves of one layer, in the order of its pytree.
Leaves = tuple[Leaf, ...]


class ShardedWeights:
    """Calls layers whose weights are gathered, and whose gradients are scattered, as in a phase of the plan.

    See `run.layers`. Its methods are called where arrays are those of one rank.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        # The collectives of a layer, by the stages that gather and scatter, and by the whole leaves.
        self._exchanges: dict[Any, ShardedLayer] = {}

    def stages(self, phase: str, weights: str | None, grads: str | None) -> ShardedStages:
        """The stages of `phase` that gather `weights` and scatter `grads`; see `sharded_stages`."""
        return sharded_stages(self.context.schedule, phase, weights, grads)

    def layers(
        self, stages: ShardedStages, body: Body | Sequence[Body], shards: Sequence[Any], x: Any,
        shapes: Sequence[Any] | None,
    ) -> Any:  # fmt: skip
        """See `run.layers`. Raises CP0827 unless `body`, `shards` and `shapes` fit together."""
        bodies = [body] * len(shards) if callable(body) else list(body)
        if not shards or len(bodies) != len(shards) or (shapes is not None and len(shapes) != len(shards)):
            counts = f"{len(shards)} layers, {len(bodies)} functions"
            if shapes is not None:
                counts += f", {len(shapes)} shapes"
            self._fail("run.layers", counts, "one each is needed")
        flat_x, structure = jax.tree_util.tree_flatten(jax.tree_util.tree_map(jnp.asarray, x))
        types = _types(flat_x)

        layers: list[Layer] = []
        weights_of_layers: list[tuple[Any, ...]] = []
        vjps: dict[Any, LayerVjp] = {}  # Layers with the same function and types share the derivative.
        for number, (function, tree) in enumerate(zip(bodies, shards, strict=True)):
            flat, exchange = self._exchange(stages, tree, shapes and shapes[number], stacked=False)
            weight_types = _gathered_types(exchange, flat.leaves)
            key = (id(function), weight_types, flat.structure, types, structure)
            if key not in vjps:
                weights = flat.like(weight_types).build()
                vjps[key] = layer_vjp(function, weights, Tree(types, structure).build())
            layers.append(Layer(vjps[key], exchange))
            weights_of_layers.append(flat.leaves)
            types, structure = vjps[key].types, vjps[key].structure

        result = run_unrolled(layers, weights_of_layers, flat_x, stages.prefetch)
        return jax.tree_util.tree_unflatten(structure, result)

    def scan_layers(self, stages: ShardedStages, body: Body, shards: Any, x: Any, shapes: Any) -> Any:
        """See `run.scan_layers`. Raises CP0827 if the results of `body` and `x` differ in shapes or types."""
        flat, exchange = self._exchange(stages, shards, shapes, stacked=True)
        weights = flat.like(_gathered_types(exchange, [leaf[0] for leaf in flat.leaves])).build()
        flat_x, structure = jax.tree_util.tree_flatten(jax.tree_util.tree_map(_with_strong_type, x))
        # The carry of a scan must vary over the axes over which the result varies. A result may vary over
        # more axes once the input does, so this repeats until the types of input and result are equal.
        while True:
            types = _types(flat_x)
            vjp = layer_vjp(_with_types(body, types), weights, Tree(types, structure).build())
            if vjp.types == types and vjp.structure == structure:
                break
            varying = [
                _compat.as_varying(leaf, sorted(_compat.varying_in(kind)))
                for leaf, kind in zip(flat_x, vjp.types, strict=False)
            ]
            has_same_shapes = vjp.structure == structure and _shapes(vjp.types) == _shapes(types)
            if not has_same_shapes or _types(varying) == types:
                results = jax.tree_util.tree_unflatten(vjp.structure, [str(kind) for kind in vjp.types])
                operands = jax.tree_util.tree_unflatten(structure, [str(kind) for kind in types])
                problem = f"the body makes {results} of {operands}"
                self._fail("run.scan_layers", problem, "layers under a scan keep shapes and types")
            flat_x = varying
        return jax.tree_util.tree_unflatten(
            structure, run_scanned(Layer(vjp, exchange), flat.leaves, flat_x, stages.prefetch)
        )

    def shards(self, phase: str, weights: str | None, tree: Any, *, stacked: bool) -> Any:
        """See `run.shards`."""
        axes = self.stages(phase, weights, None).weights.placement.split
        backend = self.context.backend

        def cut(leaf: Any) -> Any:
            for axis in axes:
                leaf = ops.shard(leaf, backend.index((axis,)), backend.ways((axis,)), array=False)
            return leaf

        return jax.tree_util.tree_map(jax.vmap(cut) if stacked else cut, tree)

    def _exchange(
        self, stages: ShardedStages, tree: Any, shapes: Any, *, stacked: bool
    ) -> tuple[Tree, ShardedLayer]:
        """Return the shards of a layer, and the collectives of its weights and gradients.

        Args:
            stages: The stages of the phase.
            tree: The shards, a pytree.
            shapes: See `_whole_leaves`.
            stacked: Whether the leaves have a leading dimension for layers.

        Returns:
            The shards as arrays that JAX types as varying over the split axes, except scalars; and the
            collectives, which are compiled once for equal leaves.

        Raises:
            CommplanError: CP0827 if stacked leaves differ in the number of layers, and as `_whole_leaves`.
        """
        backend = self.context.backend
        split, partial = stages.weights.placement.split, stages.gradients.placement.partial
        paths, flat = flatten(tree)
        flat = flat.like([jnp.asarray(leaf) for leaf in flat.leaves])
        depth = self._depth(paths, flat.leaves) if stacked else 0
        shard_leaves = [
            leaf_of(path, leaf[0] if stacked else leaf) for path, leaf in zip(paths, flat.leaves, strict=True)
        ]
        leaves = self._whole_leaves(stages, shard_leaves, shapes, depth)
        key = (stages.gathers, stages.scatters, leaves)
        if key not in self._exchanges:

            def lowered(schedule: Schedule) -> Lowered:
                return Lowered(schedule, schedule.phases[0], {}, backend)

            gathers = tuple(LeafCollectives(p, lowered(s)) for p, s in stages.gather_schedules(leaves))
            scatters = tuple(LeafCollectives(p, lowered(s)) for p, s in stages.scatter_schedules(leaves))
            self._exchanges[key] = ShardedLayer(split, partial, backend, gathers, scatters)
        shards = [
            backend.varying(x, split) if leaf.shape else x
            for x, leaf in zip(flat.leaves, shard_leaves, strict=True)
        ]
        return flat.like(shards), self._exchanges[key]

    def _depth(self, paths: Sequence[str], leaves: Sequence[Any]) -> int:
        """The number of stacked layers. Raises CP0827 if it is 0 or differs between the leaves."""
        sizes = {leaf.shape[0] if leaf.shape else 0 for leaf in leaves}
        if len(sizes) != 1 or 0 in sizes:
            shapes = [f"{path or 'x'} {list(leaf.shape)}" for path, leaf in zip(paths, leaves, strict=True)]
            problem = f"the shards {', '.join(shapes)}" if shapes else "shards without leaves"
            note = "every leaf has one more leading dimension, of the same size: the number of layers"
            self._fail("run.scan_layers", f"{problem} are not stacked layers", note)
        return sizes.pop()

    def _whole_leaves(
        self, stages: ShardedStages, shard_leaves: Sequence[Leaf], shapes: Any, depth: int
    ) -> Leaves:
        """Find the layer with the shards `shard_leaves`.

        Args:
            stages: The stages of the phase.
            shard_leaves: The leaves of the shards.
            shapes: A pytree with the shapes and dtypes of the layer; None to find it in the plan's weights.
            depth: The number of stacked layers, or 0.

        Returns:
            The whole leaves of the layer, with the paths and dtypes of the shards.

        Raises:
            CommplanError: CP0827 if there is no such layer, or if layers of different shapes match.
        """
        schedule = self.context.schedule
        ways = [schedule.size((axis,)) for axis in stages.weights.placement.split]
        if shapes is not None:
            paths, flat = flatten(shapes)
            whole = leaves_of(zip(paths, flat.leaves, strict=True))
            candidates = {whole} if _are_shards(shard_leaves, whole, ways) else set[Leaves]()
            searched = "`shapes`"
        else:
            value = next(value for value in schedule.entry if value.id == stages.weights.id)
            candidates = set(_layers_with_shards(shard_leaves, value.uncut, ways))
            searched = f"`{name_of(value.id)}`"
            if depth and not candidates:  # The plan may be compiled for the stack.
                unstacked = tuple(
                    Leaf(x.path, x.shape[1:], x.dtype) for x in value.uncut if x.shape[:1] == (depth,)
                )
                candidates = set(_layers_with_shards(shard_leaves, unstacked, ways))
        if len(candidates) != 1:
            text = ", ".join(f"{leaf.path or 'x'} {list(leaf.shape)}" for leaf in shard_leaves)
            problem = "no layer" if not candidates else f"{len(candidates)} layers of different shapes"
            call, example = "run.layers", "shapes=[..]), a pytree of each layer"
            if depth:
                call, example = "run.scan_layers", "shapes=..), a pytree of one layer"
            message = f"there is {problem} in {searched} with the shards {text}"
            self._fail(call, message, f"pass the whole shapes: {call}(.., {example}")
        (whole,) = candidates
        return tuple(Leaf(a.path, b.shape, a.dtype) for a, b in zip(shard_leaves, whole, strict=True))

    def _fail(self, call: str, message: str, *notes: str) -> NoReturn:
        self.context.fail("CP0827", f"{call}: {message}", *notes)


def _are_shards(shard_leaves: Sequence[Leaf], whole: Leaves, ways: Sequence[int]) -> bool:
    """Whether `shard_leaves` have the paths and shapes of the shards of `whole`.

    Args:
        shard_leaves: The leaves of one rank.
        whole: The leaves before the cut.
        ways: The number of parts of each cut, in order.
    """
    cuts = cut_all("tree", whole, ways)
    return [(leaf.path, leaf.shape) for leaf in shard_leaves] == [(leaf.path, leaf.shape) for leaf in cuts]


def _layers_with_shards(shard_leaves: Sequence[Leaf], whole: Leaves, ways: Sequence[int]) -> list[Leaves]:
    """Find the subtrees of `whole` whose shards can be `shard_leaves`; see `_are_shards`."""
    leaves = {leaf.path: leaf for leaf in whole}
    # A layer with the path `root` has its first leaf at `root/PATH`.
    suffix = f"/{shard_leaves[0].path}".rstrip("/") if shard_leaves else ""
    roots = [f"/{path}".removesuffix(suffix) for path in leaves if f"/{path}".endswith(suffix)]
    layers: list[Leaves] = []
    for root in roots:
        paths = ["/".join(filter(None, (root.strip("/"), leaf.path))) for leaf in shard_leaves]
        if not all(path in leaves for path in paths):
            continue
        layer = tuple(
            Leaf(shard.path, leaves[path].shape, shard.dtype)
            for shard, path in zip(shard_leaves, paths, strict=True)
        )
        if _are_shards(shard_leaves, layer, ways):
            layers.append(layer)
    return layers


def _with_strong_type(x: Any) -> Any:
    """`x` as an array whose type is not weak, as that of a Python number is."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(jax.typeof(x), "weak_type", False) else x


def _shapes(types: Sequence[Any]) -> list[Any]:
    return [(each.shape, each.dtype) for each in types]


def _types(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(jax.typeof, arrays))


def _gathered_types(exchange: ShardedLayer, shards: Sequence[Any]) -> tuple[Any, ...]:
    """The JAX types of a layer's whole weights, found by tracing the gather of its shards."""
    return tuple(trace(lambda *leaves: exchange.gather(leaves), *_types(shards)).result_avals)


def _with_types(body: Body, types: Sequence[Any]) -> Body:
    """`body` with results that have strong types and vary at least over the axes of `types`."""

    def retyped(weights: Any, x: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten(body(weights, x))
        if len(leaves) == len(types):
            leaves = [
                _compat.as_varying(_with_strong_type(leaf), sorted(_compat.varying_in(kind)))
                for leaf, kind in zip(leaves, types, strict=True)
            ]
        return jax.tree_util.tree_unflatten(structure, leaves)

    return retyped


def tap_gradients(context: Context, lowered: Lowered, tree: Any, like: str | None) -> Any:
    """Reduce the gradients of `tree` in the backward pass, as the phase `lowered` does; see `run.tap`.

    Args:
        context: The context of the run.
        lowered: A phase of the run.
        tree: Parameters that do not vary over axes of more than one rank.
        like: A partial input of the phase; None if it has only one.

    Raises:
        CommplanError: CP0815 and CP0816, as `run.tap`.
    """
    context.require_inside("run.tap")
    partial = [name for name, value in lowered.arguments.items() if value.placement.partial]
    names = [like] if like is not None else partial
    if len(names) != 1 or names[0] not in partial:
        context.fail(
            "CP0815",
            f"run.tap needs one partial input of phase `{lowered.phase.name}` to reduce like",
            f"its partial inputs: {', '.join(partial) or 'none'}",
            'name one: run.tap(layer, like="grads")',
        )
    paths, flat = flatten(tree)
    recipe = backward_reduce.recipe(lowered, names[0], flat.leaves)
    for path, leaf in zip(paths, flat.leaves, strict=True):
        varying = [axis for axis in recipe.axes if axis in _compat.varying_axes(leaf)]
        if varying and any(context.sizes[axis] > 1 for axis in varying):
            location = f" at `{path}`" if path else ""
            context.fail(
                "CP0815",
                f"run.tap takes parameters{location} that vary over {', '.join(varying)} already",
                "tap the parameters before run.varying: run.tap makes them varying itself",
            )
    return backward_reduce.tap(recipe, tree)
