"""The models: a transformer, unrolled or scanned, ResNet-50, and a mixture of experts.

Shapes only, without numbers. Weights are bf16, and the names of layers sort in the order of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any
VOCABULARY, HEAD = 32_768, 128
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # of ResNet-50: width and blocks


def leaf(*dims: int) -> Any:
    return jax.ShapeDtypeStruct(dims, "bfloat16")


@dataclass(frozen=True)
class Moves:
    """The hooks of a training method into a model.

    Attributes:
        layer: applied to a layer's weights in the body of a scan.
        body: applied to that body.
        swap: sends row i of [n, ..] to rank i.
    """

    layer: Callable[[Tree], Tree] = lambda weights: weights
    body: Callable[[Any], Any] = lambda function: function
    swap: Callable[[Any], Any] = lambda blocks: blocks


@dataclass(frozen=True)
class Transformer:
    """Decoder of `layers` layers with a tied embedding.

    Attributes:
        scanned: layers are stacked, under `lax.scan`.
        experts: of every second layer, one on each rank, at most a quarter more tokens each than on average.
    """

    layers: int = 12
    width: int = 2048
    rows: int = 2
    length: int = 1024
    scanned: bool = False
    experts: bool = False

    def shapes(self) -> Tree:
        """The weights that all ranks have."""
        if self.scanned:
            deep = {k: leaf(self.layers, *v.shape) for k, v in self._layer(0).items()}
            return {"embed": leaf(VOCABULARY, self.width), "layers": deep}
        named = {f"layer{i:02}": self._layer(i) for i in range(self.layers)}
        return {"embed": leaf(VOCABULARY, self.width)} | named

    def own_shapes(self) -> Tree:
        """The weights that each rank has for itself: its expert of every second layer."""
        both = {"e_up": leaf(self.width, 4 * self.width), "f_down": leaf(4 * self.width, self.width)}
        return {f"layer{i:02}": both for i in range(1, self.layers, 2)} if self.experts else {}

    def batch(self) -> Mapping[str, Any]:
        """One rank's input of a step."""
        return {"tokens": jax.ShapeDtypeStruct((self.rows, self.length), "int32")}

    def _layer(self, number: int) -> Tree:
        width = self.width
        common = {"a_norm": leaf(width), "b_qkv": leaf(width, 3 * width), "c_out": leaf(width, width),
                  "d_norm": leaf(width)}  # fmt: skip
        if self.experts and number % 2:
            return common | {"e_router": leaf(width, 128)}
        return common | {"e_up": leaf(width, 4 * width), "f_down": leaf(4 * width, width)}

    def loss(self, weights: Tree, own: Tree, batch: Mapping[str, Any], moves: Moves) -> Any:
        """Next-token cross-entropy."""
        tokens = batch["tokens"]
        x = weights["embed"][tokens]
        if self.scanned:

            def body(x: Any, layer: Tree) -> tuple[Any, None]:
                layer = moves.layer(layer)
                x = attention(x, layer)
                return x + feed_forward(norm(x, layer["d_norm"]), layer), None

            x, _ = lax.scan(moves.body(body), x, weights["layers"])
        for name in sorted(set(weights) - {"embed", "layers"}):
            x = attention(x, weights[name])
            hidden = norm(x, weights[name]["d_norm"])
            if name in own:
                x = x + routed(hidden, weights[name]["e_router"], own[name], moves.swap)
            else:
                x = x + feed_forward(hidden, weights[name])
        return next_token_loss(x, weights["embed"], tokens)


def attention(x: Any, layer: Tree) -> Any:
    """Causal attention with heads of `HEAD`, added to `x` [rows, length, width]."""
    rows, length, width = x.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    qkv = (norm(x, layer["a_norm"]) @ layer["b_qkv"]).reshape(rows, length, 3, width // HEAD, HEAD)
    q, k, v = (qkv[:, :, i] for i in range(3))
    weights = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / HEAD**0.5
    weights = jax.nn.softmax(jnp.where(mask, weights, -1e30)).astype(x.dtype)
    return x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, width) @ layer["c_out"]


def next_token_loss(x: Any, embed: Any, tokens: Any) -> Any:
    """Cross-entropy of the next tokens, by a tied embedding."""
    logits = (x @ embed.T).astype(jnp.float32)[:, :-1]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def feed_forward(x: Any, layer: Tree) -> Any:
    return jax.nn.gelu(x @ layer["e_up"]) @ layer["f_down"]


def routed(x: Any, router: Any, expert: Tree, swap: Callable[[Any], Any]) -> Any:
    """Each token through the best expert that has room for it, with the router's weight (Fedus et al. 2021).

    Tokens are sorted by expert; the i-th of an expert's room is a row of its block.
    """
    flat = x.reshape(-1, x.shape[-1])
    tokens, ranks = flat.shape[0], lax.axis_size("data")
    room = -(-5 * tokens // (4 * ranks))
    odds = jax.nn.softmax((flat @ router)[:, :ranks].astype(jnp.float32))
    best, gate = jnp.argmax(odds, -1), jnp.max(odds, -1)
    order = jnp.argsort(best)
    first = jnp.searchsorted(best[order], jnp.arange(ranks))
    place = jnp.arange(tokens) - first[best[order]]
    seats = jnp.where(place < room, best[order] * room + place, ranks * room)
    blocks = jnp.zeros((ranks * room, flat.shape[1]), x.dtype).at[seats].set(flat[order], mode="drop")
    answers = swap(feed_forward(swap(blocks), expert))
    returned = answers.at[seats].get(mode="fill", fill_value=0)
    merged = jnp.zeros_like(flat).at[order].set(returned)
    return (merged * gate[:, None].astype(x.dtype)).reshape(x.shape)


@dataclass(frozen=True)
class ResNet50:
    """He et al. 2015, bottlenecks with the stride in the 3x3; normalized over each picture of side x side.

    stages: of the four groups of blocks, the first.
    """

    pictures: int = 64
    side: int = 224
    stages: int = 4

    def shapes(self) -> Tree:
        tree = {"a_stem": {"conv": leaf(7, 7, 3, 64), "scale": leaf(64)}}
        channels = 64
        for stage, (width, blocks) in enumerate(STAGES[: self.stages]):
            for block in range(blocks):
                name = f"stage{stage}_{block}"
                tree[name] = {
                    "a": leaf(1, 1, channels, width), "a_scale": leaf(width), "b": leaf(3, 3, width, width),
                    "b_scale": leaf(width), "c": leaf(1, 1, width, 4 * width), "c_scale": leaf(4 * width),
                }  # fmt: skip
                if block == 0:
                    tree[name] |= {"short": leaf(1, 1, channels, 4 * width)}
                channels = 4 * width
        return tree | {"z_dense": {"weight": leaf(channels, 1000)}}

    def own_shapes(self) -> Tree:
        return {}

    def batch(self) -> Mapping[str, Any]:
        return {"pixels": jax.ShapeDtypeStruct((self.pictures, self.side, self.side, 3), "bfloat16"),
                "labels": jax.ShapeDtypeStruct((self.pictures,), "int32")}  # fmt: skip

    def loss(self, weights: Tree, own: Tree, batch: Mapping[str, Any], moves: Moves) -> Any:
        """Mean cross-entropy."""
        del own, moves
        stem = weights["a_stem"]
        x = jax.nn.relu(picture_norm(convolved(batch["pixels"], stem["conv"], 2), stem["scale"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for name in sorted(name for name in weights if name.startswith("stage")):
            stride = 2 if name.endswith("_0") and not name.startswith("stage0") else 1
            x = bottleneck(x, weights[name], stride)
        logits = (x.mean((1, 2)) @ weights["z_dense"]["weight"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, batch["labels"][:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def bottleneck(x: Any, block: Tree, stride: int) -> Any:
    y = jax.nn.relu(picture_norm(convolved(x, block["a"], 1), block["a_scale"]))
    y = jax.nn.relu(picture_norm(convolved(y, block["b"], stride), block["b_scale"]))
    y = picture_norm(convolved(y, block["c"], 1), block["c_scale"])
    return jax.nn.relu(y + (convolved(x, block["short"], stride) if "short" in block else x))


def convolved(x: Any, kernel: Any, stride: int) -> Any:
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=names)


def picture_norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = wide.mean((1, 2, 3), keepdims=True)
    variance = ((wide - mean) ** 2).mean((1, 2, 3), keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-3)).astype(x.dtype) * scale


MODELS: Mapping[str, Transformer | ResNet50] = {
    "transformer": Transformer(),
    "transformer, scanned": Transformer(scanned=True),
    "mixture of experts": Transformer(experts=True),
    "ResNet-50": ResNet50(),
}
