"""Schedules to break: sample plans made small and random plans, for both backends, machines and pipelines."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir import plan as graph
from commplan.ir import schedule as ir
from commplan.ir.types import TreeType

from .plans import random_plan
from .random_case import make_case
from .random_machine import make_machine
from .random_stages import Spec

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = sorted([*ROOT.glob("examples/plans/*.plan"), *ROOT.glob("tests/plans/*.plan")])
EXTRAS = 24  # plans of this file
RANDOM = 140  # plans with data, of `random_case`
WIDE = 60  # plans of every stage, of `plans`
BACKENDS: tuple[Literal["jax", "mpi"], ...] = ("jax", "mpi")
PASSES = ("share", "rates", "place", "bucket", "fuse_update", "decompose", "wire", "select", "overlap")
DTYPES = ("f32", "bf16", "f16", "i32", "u8", "bool", "f64", "i64")
BROKEN = ("CP0718", "CP0719", "CP1005")  # a compiler that made what its verifier refuses
# Features that the other plans rarely have, and every algorithm with every stage that takes it.
EXTRA = """
plan extra
axis a = 2
axis b = {b}
input g : tree partial a, b
input p : tree per a, b
each step {{
    s = reduce g over a, b by mean via {reduce} {{ wire = bf16, accumulate = f32, bucket = 64 }}
    c = scatter g over b by sum via {scatter} {{ bucket = 64 }}
    c = reduce c over a by sum
    d = gather c over b via {gather}
    r = broadcast p over {over} from {root} via {broadcast}
    q = reduce p over a by max via {inner}
    t = broadcast p over a, b from 1 via {spread}
    output s, d, r, q, t
}}
"""
# Parameter servers among the workers, of which some own, and separate ones; states that are read elsewhere.
SERVED = """
plan served
axis a = 2
axis b = 2
server hub = {servers}
input p : tree per a, b
input q : tree per a, b
input g : tree partial a, b
input n : f32 per a, b
state w : tree
state m : tree on hub
state c : tree on hub
fn sgd(tree, tree) -> tree on device elementwise
fn other(tree, tree) -> tree on device elementwise
at start {{
    w = broadcast p over a, b from {root}
    m = broadcast q over a, b from 0
    c = broadcast p over a, b from 0
}}
each step {{
    w = exchange g into w with sgd over a, b by {op} via parameter_server(owners = {owners}{within})
    m = exchange g into m with other over a, b by {second} {{ chunk = 64, staleness = {late} }}
    output w
}}
every 2 steps {{
    d, c = elastic p with c over a, b by {mode}(eta = 0.25, rho = 0.5)
    output d
}}
phase look {{
    output m, c
}}
"""


class Base(NamedTuple):
    """A compiled schedule, its plan, and the stage verb of every line of it."""

    name: str
    schedule: ir.Schedule
    text: str
    verbs: Mapping[tuple[int, int], str]
    linear: frozenset[str]


def _trees(plan: graph.Plan, rng: random.Random) -> dict[str, Any]:
    """One tree for all that are trees; matrices and vectors that nothing divides, and a scalar."""
    dtype = rng.choice(["float32"] * 5 + ["float64", "bfloat16", "float16"])
    tree = {
        "b": Spec((rng.choice((3, 5, 7)),), dtype),
        "w": Spec((rng.choice((2, 3, 5)), rng.choice((2, 3, 4))), dtype),
    }
    if rng.random() < 0.5:
        tree["s"] = Spec((), dtype)
    if rng.random() < 0.3:
        tree["z"] = Spec((13,), dtype)
    return {value.name: tree for value in plan.values if isinstance(value.type, TreeType)}


def _small(text: str, rng: random.Random) -> str:
    """Sizes of a sample plan made small, so that the oracle is fast; bounds in bytes likewise."""
    text = re.sub(r"\b(\d+), (\d+), 3\]", "2, 2, 3]", text)
    text = re.sub(r"\b1_000\b", "1", text.replace("[64, 8, 8]", "[8, 8, 8]").replace("batch 7", "batch 6"))
    text = re.sub(r"readers = 50", "readers = 1", text)
    text = re.sub(r"from (31|7)\b", "from 3", text)
    text = re.sub(r"((?:axis|ensemble)\s+\w+\s*=\s*)(\d+)", lambda m: m[1] + str(min(int(m[2]), 4)), text)
    text = re.sub(r"\b[\d_]+ [KM]iB", lambda _: str(rng.choice((64, 128, 1024))), text)
    return re.sub(r"\[32, 32, 64\]", "[4, 4, 8]", re.sub(r"batch (64|32)\b", "batch 8", text))


def _compiled(name: str, text: str, rng: random.Random, passes: str | None = None) -> Base:
    """Compile a sample. Raises CommplanError if the draw is invalid."""
    plan = commplan.loads(text, f"{name}.plan")
    graph_ = plan.graph
    sizes = {axis.name: axis.size or rng.choice((2, 3)) for axis in graph_.axes}
    ranks = [sizes[axis.name] for axis in graph_.axes if axis.kind is not graph.AxisKind.SERVER]
    machine = make_machine(rng.randrange(10**6), ranks) if rng.random() < 0.5 else None
    backend = rng.choice(BACKENDS)
    program = plan.compile(
        axes=sizes, shapes=_trees(graph_, rng), passes=passes, topology=machine, backend=backend
    )
    where = "on a machine" if machine else "anywhere"
    return made(f"{name} for {backend} {where}, passes {passes}", program.schedule, text, graph_)


def made(name: str, schedule: ir.Schedule, text: str, plan: graph.Plan) -> Base:
    verbs = {
        (stage.span.line, stage.span.column): str(stage.__struct_config__.tag)
        for phase in plan.phases
        for stage in phase.stages
    }
    return Base(name, schedule, text, verbs, frozenset(fn.name for fn in plan.fns if fn.linear))


def _passes(rng: random.Random) -> str | None:
    if rng.random() < 0.5:
        return None
    chosen = [name for name in PASSES if name == "wire" or rng.random() < 0.7]
    limit = rng.choice(["", "{max=32}", "{max=1KiB}"])
    return ",".join(name + limit if name == "bucket" else name for name in chosen)


def sample(path: Path, number: int) -> Base | None:
    """A sample plan, in variant `number`; None if it cannot be compiled."""
    rng = random.Random(f"{path.stem} {number}")
    try:
        return _compiled(path.stem, _small(path.read_text(), rng), rng, _passes(rng))
    except CommplanError as error:
        return _none(error)


def _none(error: CommplanError) -> None:
    if any(diagnostic.code in BROKEN for diagnostic in error.diagnostics):
        raise error
    return


def random_base(seed: int) -> Base | None:
    """A plan of `random_case`, which has data."""
    rng = random.Random(f"base {seed}")
    case = make_case(seed, DTYPES, builtins=seed % 2 == 0)
    plan = commplan.loads(case.text, f"random_{seed}.plan")
    sizes = {axis.name: case.sizes[axis.name] for axis in plan.graph.axes}
    machine = make_machine(seed, list(sizes.values())) if rng.random() < 0.5 else None
    backend = rng.choice(BACKENDS)
    passes = _passes(rng) if rng.random() < 0.5 else case.pipeline
    try:
        program = plan.compile(
            axes=sizes, shapes=case.shapes, order=case.order, passes=passes, topology=machine, backend=backend
        )
    except CommplanError as error:
        return _none(error)
    where = "on a machine" if machine else "anywhere"
    return made(
        f"random_{seed} for {backend} {where}, passes {passes}", program.schedule, case.text, plan.graph
    )


def wide_base(seed: int) -> Base | None:
    """A plan of `plans`: loads, servers and ensembles too; at most sixteen ranks."""
    rng = random.Random(f"wide {seed}")
    text = random_plan(rng)
    sizes = re.findall(r"(?:axis|ensemble) \w+ = (\d+)", text)
    if math.prod(map(int, sizes)) > 16:
        return None
    try:
        return _compiled(f"wide_{seed}", text, rng, _passes(rng))
    except CommplanError as error:
        return _none(error)


def extra_base(number: int) -> Base | None:
    """`EXTRA` with algorithms that follow from `number`."""
    rng = random.Random(f"extra {number}")
    reduces = ("ring", "recursive_doubling", "halving_doubling", "binomial_tree", "double_tree", "chain",
               "hierarchical(b = ring, a = double_tree)", "hierarchical(b, a)")  # fmt: skip
    text = EXTRA.format(
        b=rng.choice((2, 3, 4)), root=rng.choice((0, 1)), over=rng.choice(("b", "b, a")),
        reduce=reduces[number % len(reduces)], scatter=rng.choice(("native", "ring", "torus", "bruck")),
        gather=rng.choice(("native", "ring", "recursive_doubling", "torus", "bruck")),
        broadcast=rng.choice(("ring", "binomial_tree", "chain", "scatter_gather", "double_tree")),
        inner=rng.choice(("torus", "binomial_tree", "double_tree", "chain", "native")),
        spread=rng.choice(("scatter_gather", "scatter_gather", "hierarchical(b, a)", "native")),
    )  # fmt: skip
    if number % 3 == 0:
        ops = ("sum", "mean", "mean(weight = n)")
        text = SERVED.format(
            servers=rng.choice((1, 2)), root=rng.randrange(4), owners=rng.choice((1, 2, 3, 4)),
            op=rng.choice(ops), second=rng.choice(ops), late=rng.choice((0, 1)),
            within=rng.choice(("", ", within = a", ", within = b")),
            mode=rng.choice(("round_robin", "async", "hogwild")),
        )  # fmt: skip
    try:
        return _compiled(f"extra_{number}", text, rng, _passes(rng))
    except CommplanError as error:
        return _none(error)


def bases(seed: int, share: float = 1.0) -> Iterator[Base | CommplanError]:
    """The schedules of one campaign, a `share` of them; or the compiler's error if a pass broke one."""
    rng = random.Random(f"bases {seed}")
    variants = max(1, round(3 * share))
    makers: list[Callable[[int], Base | None]] = [partial(sample, path) for path in SAMPLES] * variants
    for maker, count in ((extra_base, EXTRAS), (random_base, RANDOM), (wide_base, WIDE)):
        makers += [maker] * round(count * share)
    for maker in makers:
        try:
            base = maker(rng.randrange(10**6))
        except CommplanError as error:
            yield error
            continue
        if base is not None and any(phase.ops for phase in base.schedule.phases):
            yield base
