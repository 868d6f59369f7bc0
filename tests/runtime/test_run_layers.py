"""`run.layers` and `run.scan_layers`: weights in shards, equal to plain data parallelism."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.embedding import bind, mesh_of, refused

from commplan.ir.shard_shapes import cut_all
from commplan.ir.types import DType
from commplan.ir.values import Leaf
from commplan.runtime.layers import _layers_with_shards  # pyright: ignore[reportPrivateUsage]

PLAN = """plan sharded
axis data = 8
input weights : tree split data
input grads   : tree partial data
each step {
    whole = gather weights over data GATHER
    grads = scatter grads over data by mean SCATTER
    output whole, grads
}
"""
LAYERS, WIDTH, STEPS = 6, 24, 4
ADAM = optax.adam(1e-2)
Tree = Any


def shapes(width: int) -> Tree:
    return {
        "w": jax.ShapeDtypeStruct((width, width), jnp.float32),
        "b": jax.ShapeDtypeStruct((width,), jnp.float32),
    }


LAYER = shapes(WIDTH)
FORWARD = "phase forward {\n    whole = gather weights over data\n    output whole\n}\n"


def plan(gather: str = "", scatter: str = "") -> str:
    return PLAN.replace("GATHER", gather).replace("SCATTER", scatter)


def bound(layer: Tree = LAYER, gather: str = "", scatter: str = "") -> Any:
    return bind(plan(gather, scatter), mesh_of(data=8), {"weights": layer, "grads": layer})


def drawn(count: int = LAYERS, width: int = WIDTH) -> list[Tree]:
    rng = np.random.default_rng(0)
    return [
        {
            "w": (rng.normal(size=(width, width)) / width**0.5).astype("f4"),
            "b": rng.normal(size=width).astype("f4"),
        }
        for _ in range(count)
    ]


def block(weights: Tree, x: Any) -> Any:
    return jnp.tanh(x @ weights["w"] + weights["b"])


def stacked(layers: list[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def row(stack: Tree, number: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf[number], stack)


def batches(width: int = WIDTH) -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(32, width)).astype("f4") for _ in range(STEPS)]


def reference(params: Tree, loss: Callable[[Tree, Any], Any], xs: list[Any]) -> tuple[list[float], Tree]:
    """Losses and weights of plain training on the whole batch."""

    @jax.jit
    def step(params: Tree, opt: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt = ADAM.update(grads, opt, params)
        return value, optax.apply_updates(params, updates), opt

    opt, losses = ADAM.init(params), list[float]()
    for x in xs:
        value, params, opt = step(params, opt, x)
        losses.append(float(value))
    return losses, params


def trained(
    run: Any, params: Tree, loss: Callable[[Tree, Any], Any], xs: list[Any], *, stack: bool = False
) -> Any:
    """Losses, and weights put together again, of training through `run`."""

    @run.spmd(params="same", returns=("split data", "split data"))
    def start(state, params):
        shards = run.shards(params, stacked=stack)
        return state, shards, ADAM.init(shards)

    @run.jit
    @run.spmd(
        shards="split data", opt="split data", x="split data", returns=("split data", "split data", "same")
    )
    def step(state, shards, opt, x):
        value, grads = jax.value_and_grad(loss)(shards, x)
        updates, opt = ADAM.update(grads, opt, shards)
        return state, optax.apply_updates(shards, updates), opt, jax.lax.pmean(value, "data")

    _, shards, opt = start({}, params)
    losses = list[float]()
    for x in xs:
        _, shards, opt, value = step({}, shards, opt, x)
        losses.append(float(value))
    assert int(opt[0].count) == len(xs)
    return losses, jax.tree.map(lambda cut, like: joined(cut, like, stack=stack), shards, params)


def joined(cut: Any, like: Any, *, stack: bool) -> Any:
    """A whole leaf of the cuts of all ranks."""
    if not stack:
        return np.asarray(cut).reshape(-1)[: like.size].reshape(like.shape)
    layers = np.asarray(cut).reshape(8, like.shape[0], -1).transpose(1, 0, 2).reshape(like.shape[0], -1)
    return layers[:, : like[0].size].reshape(like.shape)


def assert_close(mine: Any, theirs: Any) -> None:
    np.testing.assert_allclose(mine[0], theirs[0], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), mine[1], theirs[1])


@pytest.mark.parametrize("prefetch", [1, 2, 9])
@pytest.mark.parametrize("scan", [False, True])
def test_training_is_that_of_plain_data_parallelism(prefetch: int, scan: bool):
    run, layers = bound(gather=f"{{ prefetch = {prefetch} }}"), drawn()

    def plain(params: Tree, x: Any) -> Any:
        for number in range(LAYERS):
            x = block(row(params, number) if scan else params[number], x)
        return (x**2).mean()

    def sharded(shards: Tree, x: Any) -> Any:
        return ((run.scan_layers if scan else run.layers)(block, shards, x) ** 2).mean()

    params = stacked(layers) if scan else layers
    assert_close(trained(run, params, sharded, batches(), stack=scan), reference(params, plain, batches()))


def test_one_layer_is_a_loop_of_none():
    run, params = bound(), stacked(drawn(1))

    def sharded(shards: Tree, x: Any) -> Any:
        return (run.scan_layers(block, shards, x) ** 2).mean()

    whole = reference(params, lambda p, x: (block(row(p, 0), x) ** 2).mean(), batches())
    assert_close(trained(run, params, sharded, batches(), stack=True), whole)


def test_a_number_may_be_carried_through_a_scan():
    """Its type is weak; the sum that a layer adds to it has a strong one."""
    run, params = bound(), stacked(drawn())

    def body(weights: Tree, carried: Any) -> Any:
        x, loss = carried
        return block(weights, x), loss + jnp.mean(weights["b"] ** 2)

    def sharded(shards: Tree, x: Any) -> Any:
        y, loss = run.scan_layers(body, shards, (x, 0.0))
        return (y**2).mean() + loss

    def plain(params: Tree, x: Any) -> Any:
        loss = 0.0
        for number in range(LAYERS):
            x, loss = body(row(params, number), (x, loss))
        return (x**2).mean() + loss

    assert_close(trained(run, params, sharded, batches(), stack=True), reference(params, plain, batches()))


def test_the_plan_may_be_compiled_for_the_stack():
    params = stacked(drawn())
    whole = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    run = bound({"blocks": whole, "head": shapes(10)})

    def sharded(shards: Tree, x: Any) -> Any:
        return (run.scan_layers(block, shards, x) ** 2).mean()

    def plain(params: Tree, x: Any) -> Any:
        for number in range(LAYERS):
            x = block(row(params, number), x)
        return (x**2).mean()

    assert_close(trained(run, params, sharded, batches(), stack=True), reference(params, plain, batches()))
    other = {"w": jnp.zeros((16, 3)), "b": jnp.zeros((16, 3))}
    code, text = inside(run, lambda s, x: run.scan_layers(block, s, x), other)
    assert (code, "run.scan_layers(.., shapes=..), a pytree of one layer" in text) == ("CP0827", True)


def test_layers_of_a_model_differ_share_weights_and_close_over_some():
    """An embedding used at both ends, whole numbers between layers, leaves without dimensions, padding."""
    width, words = 10, 13
    rng = np.random.default_rng(2)
    params = {
        "embed": rng.normal(size=(words, width)).astype("f4"),
        "blocks": [
            {"w": rng.normal(size=(width, width)).astype("f4") / 3, "scale": np.float32(0.5 + number)}
            for number in range(3)
        ],
        "shared": {"shift": rng.normal(size=(width,)).astype("f4")},
    }
    run = bound(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params))
    tokens = [rng.integers(0, words, size=(16, 5)).astype("i4") for _ in range(STEPS)]

    def embedded(embed: Any, tokens: Any) -> Any:
        return {"x": embed[tokens], "tokens": tokens}

    def head(embed: Any, activations: Tree) -> Any:
        scores = jax.nn.log_softmax(activations["x"] @ embed.T)
        return -jnp.take_along_axis(scores, activations["tokens"][..., None], -1).mean()

    def layer(shift: Any) -> Callable[[Tree, Tree], Tree]:
        def body(weights: Tree, activations: Tree) -> Tree:
            return {
                **activations,
                "x": activations["x"] + jnp.tanh(activations["x"] @ weights["w"] * weights["scale"] + shift),
            }

        return jax.checkpoint(body)

    def plain(params: Tree, tokens: Any) -> Any:
        activations, body = embedded(params["embed"], tokens), layer(params["shared"]["shift"])
        for weights in params["blocks"]:
            activations = body(weights, activations)
        return head(params["embed"], activations)

    def sharded(shards: Tree, tokens: Any) -> Any:
        shift = run.layer(lambda weights: weights["shift"], shards["shared"])
        bodies = [embedded, *[layer(shift)] * 3, head]
        return run.layers(bodies, [shards["embed"], *shards["blocks"], shards["embed"]], tokens)

    assert_close(trained(run, params, sharded, tokens), reference(params, plain, tokens))


def test_a_scanned_body_closes_over_what_is_differentiated():
    run, params = bound(), {"layers": stacked(drawn()), "shift": np.full(WIDTH, 0.25, np.float32)}

    @jax.jit
    @run.spmd(layers="same", shift="same", x="split data", returns=("split data", "same"))
    def step(state, layers, shift, x):
        def loss(shards: Tree, shift: Any) -> Any:
            return (run.scan_layers(lambda w, y: block(w, y) * shift, shards, x) ** 2).mean()

        cuts = run.shards(layers, stacked=True)
        shards, shift_gradient = jax.grad(loss, (0, 1))(cuts, run.varying(shift))
        return state, shards, jax.lax.pmean(shift_gradient, "data")

    def plain(layers: Tree, shift: Any) -> Any:
        x = batches()[0]
        for number in range(LAYERS):
            x = block(row(layers, number), x) * shift
        return (x**2).mean()

    _, shards, shift = step({}, params["layers"], params["shift"], batches()[0])
    expected = jax.jit(jax.grad(plain, (0, 1)))(params["layers"], params["shift"])
    for mine, whole in zip(jax.tree.leaves(shards), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(joined(mine, whole, stack=True), whole, atol=1e-6)
    np.testing.assert_allclose(shift, expected[1], atol=1e-6)


BLOCKS = "{ wire = int8(block = 8) }"


@pytest.mark.parametrize("gather", ["", "via ring", "{ bucket = 1 KiB }", "{ wire = bf16 }", BLOCKS])
@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_and_gradients_travel_as_the_plan_says(gather: str, check_vma: bool):
    scatter = BLOCKS if gather == BLOCKS else "{ wire = bf16, accumulate = f32 }"
    run, layers = bound(gather=gather, scatter=scatter), drawn(2)

    @run.spmd(params="same", x="split data", returns=("split data",), check_vma=check_vma)
    def step(state, params, x):
        return state, jax.grad(lambda s: (run.layers(block, s, x) ** 2).mean())(run.shards(params))

    lowered = jax.jit(step).lower({}, layers, batches()[0])
    _, shards = lowered.compile()({}, layers, batches()[0])
    whole = jax.jit(jax.grad(lambda p: (block(p[1], block(p[0], batches()[0])) ** 2).mean()))(layers)
    for mine, leaf in zip(jax.tree.leaves(shards), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(
            joined(mine, leaf, stack=False), leaf, atol=2e-2 if gather == BLOCKS else 2e-3
        )
    text = lowered.as_text()
    assert ("collective_permute" in text) == (gather == "via ring")
    assert ("all_gather" in text) == (gather != "via ring")
    assert "all_to_all" in text  # sent narrow and added wide


def test_two_axes_and_replicas_of_the_shards():
    """Weights split over the ranks of a host and alike on all hosts."""
    text = """plan replicated
axis host = 2
axis data = 4
input weights : tree split data
input grads   : tree partial host, data
each step {
    whole = gather weights over data
    cut   = scatter grads over data by sum
    grads = reduce cut over host by sum
    output whole, grads
}
phase both {
    whole = gather weights over data
    output whole
}
"""
    run = bind(text, mesh_of(host=2, data=4), {"weights": LAYER, "grads": LAYER})
    layers, x = drawn(3), batches()[0]

    @jax.jit
    @run.spmd(params="same", x="split host, data", returns=("split data",))
    def step(state, params, x):
        return state, jax.grad(lambda s: (run.layers(block, s, x) ** 2).sum())(run.shards(params))

    def plain(params: Tree) -> Any:
        y = x
        for layer in params:
            y = block(layer, y)
        return (y**2).sum()

    _, shards = step({}, layers, x)
    for mine, leaf in zip(
        jax.tree.leaves(shards), jax.tree.leaves(jax.jit(jax.grad(plain))(layers)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(mine)[: leaf.size].reshape(leaf.shape), leaf, atol=1e-4)


def test_no_more_collectives_and_memory_than_by_hand():
    """Six layers 256 wide, for eight devices."""
    shape = shapes(256)
    run = bound(shape)

    def whole(shards: Tree) -> Tree:
        return jax.tree.map(
            lambda cut, like: jax.lax.all_gather(cut, "data", tiled=True).reshape(like.shape), shards, shape
        )

    def by_hand(shards: list[Tree], x: Any) -> Any:
        for layer in shards:
            x = block(whole(layer), x)
        return (x**2).mean() / 8

    def planned(shards: list[Tree], x: Any) -> Any:
        return (run.layers(block, shards, x) ** 2).mean()

    def compiled(loss: Callable[[Tree, Any], Any]) -> tuple[list[int], int]:
        @run.spmd(shards="split data", opt="split data", x="split data")
        def step(state, shards, opt, x):
            updates, opt = ADAM.update(jax.grad(loss)(shards, x), opt, shards)
            return state, optax.apply_updates(shards, updates), opt

        shards = [{"w": jnp.zeros(256 * 256), "b": jnp.zeros(256)} for _ in range(6)]
        arguments = {}, shards, ADAM.init(shards), jnp.zeros((64, 256))
        result = jax.jit(step, donate_argnums=(1, 2)).lower(*arguments).compile()
        kinds = ("all-gather", "reduce-scatter", "all-reduce")
        counts = [len(re.findall(rf" {kind}\(", result.as_text() or "")) for kind in kinds]
        return counts, result.memory_analysis().temp_size_in_bytes

    (hand, hand_bytes), (plan, plan_bytes) = compiled(by_hand), compiled(planned)
    assert hand == [12, 12, 0]
    # Forward six layers of two leaves; back four matrices: the last is still there, the first is not needed.
    assert plan == [16, 12, 0]
    assert plan_bytes <= hand_bytes


def test_a_loop_gathers_and_scatters_a_layer_a_turn():
    run = bound()

    @run.spmd(shards="split data", x="split data", returns=("split data",))
    def step(state, shards, x):
        return state, jax.grad(lambda s: (run.scan_layers(block, s, x) ** 2).mean())(shards)

    cuts = {"w": jnp.zeros((8 * LAYERS, WIDTH * WIDTH // 8)), "b": jnp.zeros((8 * LAYERS, WIDTH // 8))}
    text = jax.jit(step).lower({}, cuts, batches()[0]).compile().as_text()
    kinds = (" all-gather(", " reduce-scatter(")
    bodies = [part.strip() for part in text.split("\n\n")]
    counted = [[part.count(kind) for kind in kinds] for part in bodies]
    entry = next(counts for part, counts in zip(bodies, counted, strict=True) if part.startswith("ENTRY"))
    # The first layer of each pass, without its bias in the backward pass; gradients of the last and first.
    assert entry == [3, 4]
    assert sorted(counts for counts in counted if any(counts) and counts is not entry) == [[1, 2], [2, 0]]


def inside(run: Any, call: Callable[[Any, Any], Any], shards: Tree) -> tuple[str, str]:
    @run.spmd(shards="split data", x="split data", returns=("per data",))
    def step(state, shards, x):
        return state, jnp.sum(jax.tree.leaves(call(shards, x))[0])[None]

    return refused(lambda: step({}, shards, batches()[0]))


def test_what_is_refused():
    run = bound()
    cut = {"w": jnp.zeros(WIDTH * WIDTH), "b": jnp.zeros(WIDTH)}
    assert refused(lambda: run.layers(block, [cut], batches()[0]))[0] == "CP0816"
    assert refused(lambda: run.scan_layers(block, cut, batches()[0]))[0] == "CP0816"
    assert refused(lambda: run.shards(cut))[0] == "CP0816"
    assert inside(run, lambda s, x: run.layers([block, block], [s], x), cut)[0] == "CP0827"
    code, text = inside(run, lambda s, x: run.layers(block, [{"w": s["b"], "b": s["b"]}], x), cut)
    assert (code, "no layer in `weights` with the shards b [3], w [3]" in text) == ("CP0827", True)
    code, text = inside(run, lambda s, x: run.scan_layers(lambda w, x: x[:, :2], s, x),
                        jax.tree.map(lambda leaf: leaf.reshape(8, -1), cut))  # fmt: skip
    assert (code, "keep shapes" in text) == ("CP0827", True)
    assert inside(run, lambda s, x: run.layers(block, [s], x, weights="grads"), cut)[0] == "CP0826"


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ({"w": np.zeros((2, 72)), "b": np.zeros((3, 3))}, "the shards b [3, 3], w [2, 72]"),
        ({"w": np.zeros((0, 72)), "b": np.zeros((0, 3))}, "the shards b [0, 3], w [0, 72]"),
        ({"w": 1.0, "b": np.zeros((2, 3))}, "the shards b [2, 3], w []"),
        ({}, "shards without leaves"),
    ],
)
def test_leaves_of_a_scan_have_one_number_of_layers(shards: Tree, problem: str):
    run = bound()
    code, text = inside(run, lambda _, x: run.scan_layers(block, shards, x), {})
    assert (code, f"run.scan_layers: {problem} are not stacked layers" in text) == ("CP0827", True)


def test_layers_of_other_shapes_and_the_same_cuts_are_told_apart_by_their_shapes():
    tall, wide = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((48, 12), (12, 48)))
    run = bound([{"w": tall}, {"w": wide}])
    cuts = [{"w": jnp.zeros(576)}, {"w": jnp.zeros(576)}]

    def body(weights: Tree, x: Any) -> Any:
        return x @ jnp.ones((x.shape[1], weights["w"].shape[0])) @ weights["w"]

    code, text = inside(run, lambda s, x: run.layers(body, s, x), cuts)
    assert (code, "2 layers of different shapes" in text) == ("CP0827", True)

    @run.spmd(shards="split data", x="split data", returns=("split data",))
    def step(state, shards, x):
        return state, run.layers(body, shards, x, shapes=[{"w": tall}, {"w": wide}])

    assert step({}, cuts, batches()[0])[1].shape == (32, 48)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scatter grads over data by mean", "reduce grads over data by mean"),
        ("whole = gather weights over data", "whole = reduce grads over data by sum"),
        ("by mean", "by mean(weight = count)"),
    ],
)
def test_a_phase_must_gather_and_scatter(old: str, new: str):
    text = plan().replace(old, new)
    text = text.replace("each step", "input count : f32 per data\neach step") if "count" in new else text
    run = bind(text, mesh_of(data=8), {"weights": LAYER, "grads": LAYER})
    cut = {"w": jnp.zeros(WIDTH * WIDTH), "b": jnp.zeros(WIDTH)}
    assert inside(run, lambda s, x: run.layers(block, [s], x), cut)[0] == "CP0826"


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_derivative_of_a_phase_that_gathers(check_vma: bool):
    """If JAX types values it is an all-reduce, which is reported; otherwise a reduce-scatter. The numbers are
    correct in both cases."""
    run = bind(plan() + FORWARD, mesh_of(data=8), {"weights": LAYER, "grads": LAYER})
    layer, x = drawn(1)[0], batches()[0]

    @run.spmd(params="same", x="split data", returns=("split data",), check_vma=check_vma)
    def step(state, params, x):
        def loss(shards: Tree) -> Any:
            return (block(run.forward(state, weights=shards)[0].whole, x) ** 2).sum()

        return state, jax.grad(loss)(run.shards(params))

    if check_vma:
        with pytest.warns(RuntimeWarning, match=r":11: the derivative of this `gather` is an all-reduce"):
            _, shards = step({}, layer, x)
    else:
        _, shards = step({}, layer, x)
        text = jax.jit(step).lower({}, layer, x).compile().as_text()
        assert (text.count(" reduce-scatter("), text.count(" all-reduce(")) == (2, 0)
    whole = jax.grad(lambda p: (block(p, x) ** 2).sum())(layer)
    for mine, leaf in zip(jax.tree.leaves(shards), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(joined(mine, leaf, stack=False), leaf, atol=1e-4)


@pytest.mark.parametrize("path", ["", "w", "kernel", "dense/kernel"])
def test_a_layer_that_is_the_whole_tree_is_found(path: str) -> None:
    tree = (Leaf(path, (9, 3), DType.F32),)
    assert _layers_with_shards(cut_all("tree", tree, (4,)), tree, (4,)) == [tree]
