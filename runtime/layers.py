"""`run.layers`: a sequence of layers whose weights are sharded over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from commplan.ir.plan import name_of
from commplan.ir.schedule import Leaf, Schedule
from commplan.ir.shard_shapes import cut_all
from commplan.lowering.jax import _compat, ops
from commplan.lowering.jax.jaxprs import traced
from commplan.lowering.jax.layers.exchange import LeafCollectives, ShardedLayer
from commplan.lowering.jax.layers.sharded import Layer, scanned, unrolled
from commplan.lowering.jax.layers.vjp import LayerVjp, layer_vjp
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.pytree import Tree, flatten
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.pytree import leaf_of, leaves_of
from commplan.runtime.context import Context
from commplan.runtime.layer_schedules import ShardedStages, sharded_stages

Body = Callable[[Any, Any], Any]
Leaves = tuple[Leaf, ...]


class ShardedWeights:
    """The part of a run for weights that are sharded over ranks."""

    context: Context

    def _inside(self, caller: str) -> None:
        raise NotImplementedError

    def _phase(self, name: str) -> Any:
        raise NotImplementedError

    def layer(
        self, body: Callable[..., Any], shards: Any, *args: Any, shapes: Any = None, **options: Any
    ) -> Any:
        """Call `body(weights, *args)` with the weights gathered from `shards`; see `layers`."""
        whole = None if shapes is None else [shapes]
        return self.layers(
            lambda weights, inputs: body(weights, *inputs), [shards], args, shapes=whole, **options
        )

    def layers(
        self, body: Body | Sequence[Body], shards: Sequence[Any], x: Any, *,
        shapes: Sequence[Any] | None = None, phase: str = "step",
        weights: str | None = None, grads: str | None = None,
    ) -> Any:  # fmt: skip
        """Apply layers one after another: layer i returns `body(weights, x)` for the result of layer i - 1.

        A layer's weights are gathered from `shards` as phase `phase` gathers its split input. This runs while
        earlier layers compute: as many as the plan's `gather` has in `{ prefetch = .. }`, one by default. The
        weights are dropped after use.

        The backward pass gathers the weights again in reverse order. It scatters the gradient as the phase
        scatters its partial input. The gradient of `shards` is therefore sharded already: do not pass it to
        the phase again. The backward pass keeps all other residuals unless `body` is `jax.checkpoint(body)`.

        Only first-order, reverse-mode derivatives are supported.

        Args:
            body: One function, or one per layer.
            shards: For each layer a pytree of this rank's shards, as `slice` and `run.shards` make them, of
                any float dtype.
            x: The input of the first layer, a pytree.
            shapes: For each layer a pytree of its whole leaves, if the plan's weights do not determine them.
            phase: The phase that gathers and scatters.
            weights: The split input of the phase, if it has several.
            grads: The partial input of the phase, if it has several.

        Returns:
            The result of the last layer.

        Raises:
            CommplanError: CP0816 outside a shard_map; CP0826 if the phase does not gather the weights and
                scatter their gradient; CP0827 for shards that do not fit.
        """
        self._inside("run.layers")
        stages = self._stages(phase, weights, grads)
        bodies = [body] * len(shards) if callable(body) else list(body)
        if not shards or len(bodies) != len(shards) or (shapes is not None and len(shapes) != len(shards)):
            counts = f"{len(shards)} layers, {len(bodies)} functions"
            self._misfit(
                f"{counts}, {len(shapes)} shapes" if shapes is not None else counts, "one each is needed"
            )
        flat_x, structure = jax.tree_util.tree_flatten(jax.tree_util.tree_map(jnp.asarray, x))
        types, layers, weights_of_layers = _types(flat_x), list[Layer](), list[tuple[Any, ...]]()
        vjps: dict[Any, LayerVjp] = {}
        for number, (function, tree) in enumerate(zip(bodies, shards, strict=True)):
            flat, exchange = self._exchange(stages, tree, shapes and shapes[number], stacked=False)
            whole = tuple(_gathered(exchange, flat.leaves))
            key = (id(function), whole, flat.structure, types, structure)
            if key not in vjps:
                vjps[key] = layer_vjp(function, flat.like(whole).build(), Tree(types, structure).build())
            layers.append(Layer(vjps[key], exchange))
            weights_of_layers.append(flat.leaves)
            types, structure = vjps[key].types, vjps[key].structure
        result = unrolled(layers, weights_of_layers, flat_x, stages.prefetch)
        return jax.tree_util.tree_unflatten(structure, result)

    def scan_layers(
        self, body: Body, shards: Any, x: Any, *, shapes: Any = None, phase: str = "step",
        weights: str | None = None, grads: str | None = None,
    ) -> Any:  # fmt: skip
        """Apply equal layers under `lax.scan`; see `layers`.

        Args:
            body: A function whose result has the structure, shapes and dtypes of `x`.
            shards: A pytree of this rank's shards of all layers, stacked along a leading dimension as
                `run.shards(.., stacked=True)` makes them.
            x: The input of the first layer, a pytree.
            shapes: A pytree of the whole leaves of one layer.
            phase: See `layers`.
            weights: See `layers`.
            grads: See `layers`.

        Returns:
            The result of the last layer.

        Raises:
            CommplanError: see `layers`.
        """
        self._inside("run.scan_layers")
        stages = self._stages(phase, weights, grads)
        flat, exchange = self._exchange(stages, shards, shapes, stacked=True)
        whole = tuple(_gathered(exchange, [leaf[0] for leaf in flat.leaves]))
        flat_x, structure = jax.tree_util.tree_flatten(jax.tree_util.tree_map(_with_strong_type, x))
        while True:
            types = _types(flat_x)
            vjp = layer_vjp(
                _with_types(body, types), flat.like(whole).build(), Tree(types, structure).build()
            )
            if vjp.types == types and vjp.structure == structure:
                break
            varying = [
                _compat.as_varying(leaf, sorted(_compat.varying_in(kind)))
                for leaf, kind in zip(flat_x, vjp.types, strict=False)
            ]
            fits = vjp.structure == structure and _shapes(vjp.types) == _shapes(types)
            if not fits or _types(varying) == types:
                results = jax.tree_util.tree_unflatten(vjp.structure, [str(kind) for kind in vjp.types])
                operands = jax.tree_util.tree_unflatten(structure, [str(kind) for kind in types])
                self._misfit(
                    f"the body makes {results} of {operands}", "layers under a scan keep shapes and types"
                )
            flat_x = varying
        return jax.tree_util.tree_unflatten(
            structure, scanned(Layer(vjp, exchange), flat.leaves, flat_x, stages.prefetch)
        )

    def shards(
        self, tree: Any, *, stacked: bool = False, phase: str = "step", weights: str | None = None
    ) -> Any:
        """This rank's shards of whole weights, with the placement of the split input of phase `phase`.

        A leaf is flattened, padded with zeros and cut; a scalar is not cut.

        Args:
            tree: A pytree of whole weights.
            stacked: Whether the leading dimension of each leaf counts layers, each of which is cut.
            phase: The phase that gathers the weights.
            weights: Its split input, if it has several.

        Raises:
            CommplanError: CP0816 outside a shard_map; CP0826 if the phase does not gather the weights.
        """
        self._inside("run.shards")
        axes = self._stages(phase, weights, None).weights.placement.split
        backend = self.context.backend

        def cut(leaf: Any) -> Any:
            for axis in axes:
                leaf = ops.shard(leaf, backend.index((axis,)), backend.ways((axis,)), array=False)
            return leaf

        return jax.tree_util.tree_map(jax.vmap(cut) if stacked else cut, tree)

    def _stages(self, phase: str, weights: str | None, grads: str | None) -> ShardedStages:
        self._phase(phase)
        return sharded_stages(self.context.schedule, phase, weights, grads)

    @functools.cached_property
    def _exchanges(self) -> dict[Any, ShardedLayer]:
        """The compiled exchanges by their stages and leaves."""
        return {}

    def _exchange(
        self, stages: ShardedStages, tree: Any, shapes: Any, *, stacked: bool
    ) -> tuple[Tree, ShardedLayer]:
        """The shards of a layer with their types, and the exchange of its weights."""
        backend = self.context.backend
        split, partial = stages.weights.placement.split, stages.gradients.placement.partial
        paths, flat = flatten(tree)
        flat = flat.like([jnp.asarray(leaf) for leaf in flat.leaves])
        shard_leaves = [
            leaf_of(path, leaf[0] if stacked else leaf) for path, leaf in zip(paths, flat.leaves, strict=True)
        ]
        leaves = self._whole(
            stages, shard_leaves, shapes, flat.leaves[0].shape[0] if stacked and shard_leaves else 0
        )
        key = (stages.gathers, stages.scatters, leaves)
        if key not in self._exchanges:

            def lowered(schedule: Schedule) -> Lowered:
                return Lowered(schedule, schedule.phases[0], {}, backend)

            gathers = tuple(LeafCollectives(p, lowered(s)) for p, s in stages.gather_schedules(leaves))
            scatters = tuple(LeafCollectives(p, lowered(s)) for p, s in stages.scatter_schedules(leaves))
            platform = getattr(backend, "platform", "")
            self._exchanges[key] = ShardedLayer(split, partial, backend, gathers, scatters, platform)
        typed = [
            backend.varying(x, split) if leaf.shape else x
            for x, leaf in zip(flat.leaves, shard_leaves, strict=True)
        ]
        return flat.like(typed), self._exchanges[key]

    def _whole(self, stages: ShardedStages, shard_leaves: Sequence[Leaf], shapes: Any, depth: int) -> Leaves:
        """The whole leaves of the layer with shards `shard_leaves`; raises CP0827 if they are ambiguous.

        depth: the number of stacked layers, or 0.
        """
        schedule = self.context.schedule
        split = stages.weights.placement.split
        ways = [schedule.size((axis,)) for axis in split]
        if shapes is not None:
            paths, flat = flatten(shapes)
            whole = leaves_of(zip(paths, flat.leaves, strict=True))
            candidates = {whole} if _fits(shard_leaves, whole, ways) else set[Leaves]()
            where = "in `shapes`"
        else:
            value = next(value for value in schedule.entry if value.id == stages.weights.id)
            candidates, where = (
                set(_layers_like(shard_leaves, value.uncut, ways)),
                f"in `{name_of(value.id)}`",
            )
            if depth and not candidates:  # The plan may be compiled for the stack.
                rows = tuple(
                    Leaf(x.path, x.shape[1:], x.dtype) for x in value.uncut if x.shape[:1] == (depth,)
                )
                candidates = set(_layers_like(shard_leaves, rows, ways))
        if len(candidates) != 1:
            text = ", ".join(f"{leaf.path or 'x'} {list(leaf.shape)}" for leaf in shard_leaves)
            problem = "no layer" if not candidates else f"{len(candidates)} layers of different shapes"
            call = "run.layers(.., shapes=[..]), a pytree of each layer"
            if depth:
                call = "run.scan_layers(.., shapes=..), a pytree of one layer"
            self._misfit(
                f"there is {problem} {where} with the shards {text}", f"pass the whole shapes: {call}"
            )
        (whole,) = candidates
        return tuple(Leaf(a.path, b.shape, a.dtype) for a, b in zip(shard_leaves, whole, strict=True))

    def _misfit(self, message: str, *notes: str) -> None:
        self.context.fail("CP0827", f"run.layers: {message}", *notes)


def _fits(shard_leaves: Sequence[Leaf], whole: Leaves, ways: Sequence[int]) -> bool:
    """Whether `shard_leaves` are the shards of `whole`."""
    cuts = cut_all("tree", whole, ways)
    return [(leaf.path, leaf.shape) for leaf in shard_leaves] == [(leaf.path, leaf.shape) for leaf in cuts]


def _layers_like(shard_leaves: Sequence[Leaf], whole: Leaves, ways: Sequence[int]) -> list[Leaves]:
    """The layers in `whole`, each below a common path, whose shards can be `shard_leaves`."""
    shapes = {leaf.path: leaf for leaf in whole}
    first = f"/{shard_leaves[0].path}".rstrip("/") if shard_leaves else ""
    roots = [path[: len(path) - len(first)] for path in shapes if f"/{path}".endswith(first)]
    candidates: list[Leaves] = []
    for root in roots:
        paths = ["/".join(filter(None, (root.strip("/"), leaf.path))) for leaf in shard_leaves]
        if all(path in shapes for path in paths):
            layer = tuple(
                Leaf(a.path, shapes[p].shape, a.dtype) for a, p in zip(shard_leaves, paths, strict=True)
            )
            candidates += [layer] if _fits(shard_leaves, layer, ways) else []
    return candidates


def _with_strong_type(x: Any) -> Any:
    """`x` as an array; if it comes from a Python number, with the type that it has after one operation."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(jax.typeof(x), "weak_type", False) else x


def _shapes(types: Sequence[Any]) -> list[Any]:
    return [(each.shape, each.dtype) for each in types]


def _types(arrays: Sequence[Any]) -> tuple[Any, ...]:
    types: list[Any] = [jax.typeof(x) for x in arrays]
    return tuple(types)


def _gathered(exchange: ShardedLayer, shards: Sequence[Any]) -> tuple[Any, ...]:
    """The types of the gathered leaves."""
    return traced(lambda *leaves: exchange.gather(leaves), *_types(shards)).types


def _with_types(body: Body, types: Sequence[Any]) -> Body:
    """`body` with results that have strong types and vary at least over the axes of `types`."""

    def retyped(weights: Any, x: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten(body(weights, x))
        if len(leaves) == len(types):
            pairs = zip(leaves, types, strict=True)
            leaves = [
                _compat.as_varying(_with_strong_type(y), sorted(_compat.varying_in(kind)))
                for y, kind in pairs
            ]
        return jax.tree_util.tree_unflatten(structure, leaves)

    return retyped
