"""Random plans with shapes and machines, for campaigns on the compiler's choices and predictions."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from commplan.ir.schedule import Backend

SIZES = (1 << 8, 1 << 12, 1 << 16, 1 << 19, 1 << 22)  # elements of a leaf, about
CHUNKS = ("64 KiB", "1 MiB")
BUCKETS = ("1 MiB", "16 MiB", "256 MiB")


class Stage(NamedTuple):
    """A stage of a case: its text up to `via`, its options, and whether it reduces."""

    text: str
    options: tuple[str, ...] = ()
    reduces: bool = True

    def written(self, via: str = "", option: str = "") -> str:
        """The stage with a pin: an algorithm, or an option."""
        options = ", ".join(filter(None, (*self.options, option)))
        return self.text + (f" via {via}" if via else "") + (f" {{ {options} }}" if options else "")


class Case(NamedTuple):
    """A plan of one phase, its shapes, and the machine that it is compiled for."""

    seed: int
    head: str
    stages: tuple[Stage, ...]
    outputs: tuple[str, ...]
    axes: tuple[str, ...]  # those that stages run over, outermost first
    shapes: dict[str, Any]
    topology: str
    backend: Backend

    def text(self, stage: int = -1, via: str = "", option: str = "") -> str:
        """The plan, its stage number `stage` pinned."""
        lines = [
            each.written(via, option) if index == stage else each.written()
            for index, each in enumerate(self.stages)
        ]
        body = "".join(f"    {line}\n" for line in (*lines, *(f"output {name}" for name in self.outputs)))
        return f"{self.head}each step {{\n{body}}}\n"


def case(seed: int) -> Case:
    """The case of a seed: the same on every machine."""
    rng = random.Random(seed)
    backend: Backend = rng.choice(("jax", "mpi"))
    levels = [("gpu", rng.choice((2, 4, 8))), ("node", rng.choice((2, 3, 4, 8)))]
    if rng.random() < 0.2:
        levels.append(("pod", 2))
    elif rng.random() < 0.2:
        levels = levels[:1]
    by_level = rng.random() < 0.5
    axes = tuple(name for name, _ in reversed(levels)) if by_level else ("data",)
    ranks = 1
    for _, count in levels:
        ranks *= count
    sizes = dict(levels) if by_level else {"data": ranks}
    head = "plan random\n" + "".join(f"axis {name} = {sizes[name]}\n" for name in axes)
    over = ", ".join(axes)
    options = ("overlap = backward",) if backend == "mpi" and rng.random() < 0.5 else ()
    kind = rng.choice(("reduce", "reduce", "wire", "two", "scatter", "broadcast"))
    head += f"input grads : tree partial {over}\n"
    stages, outputs = (Stage(f"grads = reduce grads over {over} by mean", options),), ("grads",)
    if kind == "wire":
        stages = (Stage(f"grads = reduce grads over {over} by mean", (*options, "wire = bf16")),)
    elif kind == "two":
        head += f"input router : tree partial {over}\n"
        stages = (*stages, Stage(f"router = reduce router over {over} by sum", options))
        outputs = ("grads", "router")
    elif kind == "scatter" and len(axes) == 1:
        scatter = Stage(f"shard = scatter grads over {over} by sum", options)
        stages = (scatter, Stage(f"grads = gather shard over {over}", reduces=False))
    elif kind == "broadcast":
        head += f"input params : tree per {over}\n"
        stages = (*stages, Stage(f"params = broadcast params over {over} from 0", reduces=False))
        outputs = ("grads", "params")
    shapes = {name: _tree(rng) for name in ("grads", "router", "params") if f"input {name} " in head}
    return Case(seed, head, stages, outputs, axes, shapes, _topology(rng, levels), backend)


def _tree(rng: random.Random) -> dict[str, Any]:
    """Identical layers, and a few separate leaves."""
    layer = [rng.choice(SIZES) // rng.randint(1, 4) for _ in range(rng.randint(1, 5))]
    leaves = layer * rng.choice((1, 2, 8)) + [rng.choice(SIZES) for _ in range(rng.randint(0, 2))]
    return {f"w{index:03}": {"shape": [size], "dtype": "f32"} for index, size in enumerate(leaves)}


def _topology(rng: random.Random, levels: list[tuple[str, int]]) -> str:
    """Links from Ethernet to NVLink, slower outside."""
    bandwidth, latency = 10 ** rng.uniform(8.5, 11.7), 10 ** rng.uniform(-6, -4)
    text = 'name = "random"\n'
    for name, count in levels:
        text += f'[[level]]\nname = "{name}"\ncount = {count}\nlatency = "{latency * 1e6:.3f}us"\n'
        text += f'bandwidth = "{bandwidth / 1e6:.3f}MB/s"\n'
        bandwidth, latency = bandwidth * 10 ** rng.uniform(-1.2, 0.5), latency * 10 ** rng.uniform(0, 0.7)
    if rng.random() < 0.5:
        text += f'[backend]\ncall = "{rng.uniform(3, 20):.1f}us"\nround = "{rng.uniform(3, 20):.1f}us"\n'
    return text
