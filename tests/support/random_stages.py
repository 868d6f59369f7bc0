"""The stages of random plans: each is drawn for a value, and gives the line that says it and its result."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from commplan.ir.hints import Algorithm, Hints
from commplan.ir.stages import rules
from commplan.ir.types import DType
from commplan.pytree import flatten

from .case_functions import FUNCTIONS

Tree = Any
NUMPY = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64",
    "i32": "int32", "i64": "int64", "u8": "uint8", "bool": "bool",
}  # fmt: skip
FLOATS = ("f32", "bf16", "f16", "f64")
# The algorithms of each stage after `via`; and those of inner levels, which scatter and gather.
VIA = {
    "reduce": ("native", "ring", "recursive_doubling", "halving_doubling", "binomial_tree", "double_tree",
               "torus", "chain"),
    "broadcast": ("native", "ring", "binomial_tree", "double_tree", "torus", "chain", "scatter_gather"),
    "scatter": ("native", "ring", "halving_doubling", "torus", "bruck"),
    "gather": ("native", "ring", "recursive_doubling", "halving_doubling", "torus", "bruck"),
}  # fmt: skip
INNER_LEVELS = ("native", "ring", "halving_doubling", "torus")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A leaf of a tree of shapes."""

    shape: tuple[int, ...]
    dtype: str  # as NumPy calls it


@dataclasses.dataclass(frozen=True)
class Var:
    """A value while the plan is written, and the stages that may use it.

    `form` is a tree of `Spec`s, or one `Spec`; values with different `key` cannot be combined.
    """

    name: str
    form: Tree
    key: str
    per: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    split: tuple[str, ...] = ()

    @property
    def is_tree(self) -> bool:
        return self.key.startswith("tree")

    @property
    def specs(self) -> list[Spec]:
        return [spec for _, spec in flatten(self.form)[0]]

    @property
    def written(self) -> str:
        """Its type, in the syntax of plans."""
        if self.is_tree:
            return "tree"
        spec = self.form
        word = next(short for short, name in NUMPY.items() if name == spec.dtype)
        return f"{word}[{', '.join(map(str, spec.shape))}]" if spec.shape else word

    @property
    def floats_only(self) -> bool:
        return all(spec.dtype in map(NUMPY.get, FLOATS) for spec in self.specs)

    @property
    def has_floats(self) -> bool:
        return any(spec.dtype in map(NUMPY.get, FLOATS) for spec in self.specs)

    @property
    def varying(self) -> frozenset[str]:
        return self.per | self.partial

    @property
    def can_be_cut(self) -> bool:
        return self.is_tree or bool(self.form.shape)

    def like(self, other: Var) -> bool:
        """Whether a stage may give `other`'s name to this value where `other` is a state."""
        return (self.key, self.per, self.partial, self.split) == (
            other.key, other.per, other.partial, other.split)  # fmt: skip


_GRIDS = (
    (1,), (2,), (3,), (5,), (6,), (7,), (8,), (4,), (2, 2), (2, 3), (3, 2), (1, 5), (7, 1), (2, 4), (4, 2),
    (2, 2, 2), (1, 2, 3), (2, 1, 4),
)  # fmt: skip


class StageWriter:
    """The plan so far: its axes, values, functions, and the stages that they allow."""

    def __init__(self, seed: int, dtypes: Sequence[str], builtins: bool = False) -> None:
        self.seed, self.builtins = seed, builtins
        self.random = random.Random(f"commplan {seed}")
        self.dtypes = tuple(dtypes)
        grid = self.random.choice(_GRIDS)
        self.axes = dict(zip("abc", grid, strict=False))
        ensemble = self.random.random() < 0.3
        self.ensembles = frozenset("a") if ensemble else frozenset()
        self.fns: dict[str, str] = {}
        self.names: dict[tuple[str, str], str] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.inputs: list[Var] = []
        self.states: list[Var] = []
        self.count = 0
        self.lines: list[str] = []

    def stage(self, live: list[Var]) -> list[str] | None:
        """One random stage on a random value; None if no stage fits."""
        var = self.random.choice([v for v in live if v.name[0] != "s"] or live)
        kinds = [self.reduce, self.reduce, self.broadcast, self.scatter, self.slice, self.gather, self.shift,
                 self.swap, self.unary, self.binary, self.elastic]  # fmt: skip
        self.random.shuffle(kinds)
        kinds.sort(key=lambda kind: kind != self.elastic)  # it seldom fits
        for kind in kinds:
            written = kind(var, live)
            if written is not None:
                text, result = written
                live.append(result)
                return [f"    {text}"]
        return None

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def named(self, axes: frozenset[str]) -> list[str]:
        chosen = [axis for axis in self.axes if axis in axes]
        self.random.shuffle(chosen)
        return chosen

    def reduction(self, operand: str, over: Sequence[str], suffix: str) -> str:
        """A reduce over axes and, in a second stage of the same name, across ensembles is two stages."""
        word = "across" if set(over) <= self.ensembles else "over"
        return f"reduce {operand} {word} {', '.join(over)} {suffix}"

    def some(self, axes: frozenset[str]) -> list[str]:
        """Some of `axes`, ensembles and replicas not mixed."""
        group = self.random.choice([axes & self.ensembles, axes - self.ensembles])
        group = group or axes & self.ensembles or axes - self.ensembles
        chosen = self.named(group)
        count = max(self.random.randint(1, len(chosen)) for _ in range(2)) if chosen else 0
        return chosen[:count]

    def reduce(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        over = self.some(self.random.choice([var.partial, var.per, var.varying]))
        if not over:
            return None
        ops = [] if self.has_bool(var) else ["sum"]
        if set(over) <= var.per and (var.is_tree or not self.has_bool(var)):
            ops += ["max", "min"]
        if var.floats_only or (var.has_floats and not self.has_bool(var)):
            ops.append("mean")
        if var.floats_only:
            ops.append("mean(weight = count)")
        ops = [op for op in ops if "weight" not in op or self.takes_weights(var)]
        if not ops:
            return None
        op = self.random.choice(ops)
        via = self.via(over, "reduce")
        suffix = f"by {op}{via}{self.hints(var, op, via)}"
        result = dataclasses.replace(
            var, name=self.fresh(), per=var.per - set(over), partial=var.partial - set(over)
        )
        return f"{result.name} = {self.reduction(var.name, over, suffix)}", result

    def has_bool(self, var: Var) -> bool:
        return any(spec.dtype == "bool" for spec in var.specs)

    def via(self, over: Sequence[str], stage: str) -> str:
        """Nothing, or any algorithm that carries out `stage`, or levels of them."""
        if self.random.random() < 0.4:
            return ""
        if len(over) > 1 and self.random.random() < 0.6:
            order = self.random.sample(list(over), len(over))
            inside = INNER_LEVELS if stage == "reduce" else VIA[stage]
            named = [(axis, VIA[stage] if i == len(order) - 1 else inside) for i, axis in enumerate(order)]
            levels = [
                axis if self.random.random() < 0.4 else f"{axis} = {self.random.choice(names)}"
                for axis, names in named
            ]
            return f" via hierarchical({', '.join(levels)})"
        return f" via {self.random.choice(VIA[stage])}"

    def hints(self, var: Var, op: str, via: str) -> str:
        items: list[str] = []
        if self.random.random() < 0.4:
            items.append(f"bucket = {self.random.choice([16, 64, 256, 1024])}")
        if "native" not in via and self.random.random() < 0.2:
            items.append(f"chunk = {self.random.choice([4, 16, 64])}")
        items += self.types(var, op.partition("(")[0], via)
        return f" {{ {', '.join(items)} }}" if items else ""

    def types(self, var: Var, op: str, via: str) -> list[str]:
        """Any `wire` and `accumulate` that have an effect, and `integers` of a mean that needs it."""
        floats = [None, None, *(DType(name) for name in FLOATS if name in self.dtypes)]
        integers = None if op != "mean" or var.floats_only else self.random.choice(("max", "first"))
        hints = Hints(
            wire=self.random.choice(floats), accumulate=self.random.choice(floats), integers=integers
        )
        native = Algorithm("native") if "native" in via else None
        dtypes = [DType(name) for spec in var.specs for name in NUMPY if NUMPY[name] == spec.dtype]
        summed = [dtype for dtype in dtypes if dtype.is_float]
        idle = not summed or rules.options_without_effect(op, None, None, hints, dtypes)
        if idle or any(rules.native_accumulator(op, native, hints, dtype, "") for dtype in summed):
            hints = Hints(integers=integers)
        named = {"wire": hints.wire, "accumulate": hints.accumulate, "integers": integers}
        return [f"{name} = {value}" for name, value in named.items() if value is not None]

    def broadcast(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        over = self.some(var.per - self.ensembles)
        if not over:
            return None
        root = self.random.randrange(int(np.prod([self.axes[axis] for axis in over])))
        result = dataclasses.replace(var, name=self.fresh(), per=var.per - set(over))
        hints = " { bucket = 64 }" if self.random.random() < 0.3 else ""
        how = self.via(over, "broadcast") + hints
        return f"{result.name} = broadcast {var.name} over {', '.join(over)} from {root}{how}", result

    def shift(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        over = self.named(var.per - self.ensembles)
        if not over:
            return None
        result, ranks = dataclasses.replace(var, name=self.fresh()), self.axes[over[0]]
        by = self.random.randint(-ranks - 1, 2 * ranks)
        wires = [wire for wire in ("bf16", "f16") if wire in self.dtypes and var.floats_only]
        options = ["", " { bucket = 64 }", *(f" {{ wire = {wire} }}" for wire in wires)]
        return f"{result.name} = shift {var.name} over {over[0]} by {by}{self.random.choice(options)}", result

    def swap(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        even = [
            axis
            for axis in self.named(var.per - self.ensembles)
            if not var.split
            and all(spec.shape and spec.shape[0] % self.axes[axis] == 0 for spec in var.specs)
        ]
        if not even:
            return None
        result = dataclasses.replace(var, name=self.fresh())
        wires = [wire for wire in ("bf16", "f16") if wire in self.dtypes and var.floats_only]
        options = ["", " { bucket = 64 }", *(f" {{ wire = {wire} }}" for wire in wires)]
        via = self.random.choice(("", " via bruck", " via pairwise"))
        return f"{result.name} = swap {var.name} over {even[0]}{via}{self.random.choice(options)}", result

    def takes_weights(self, var: Var) -> bool:
        """Of counts, which vary over all axes: so must the terms, scalars of a tree included."""
        return frozenset(self.axes) <= var.varying and not (var.is_tree and var.split)

    def scatter(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        axes = self.named((var.partial or var.per) - self.ensembles)
        if not axes or not var.can_be_cut or self.has_bool(var):
            return None
        ops = ["sum", "mean"] if var.floats_only else ["sum"]
        if var.floats_only and self.takes_weights(var):
            ops.append("mean(weight = count)")
        op = self.random.choice(ops)
        result = dataclasses.replace(
            var,
            name=self.fresh(),
            per=var.per - {axes[0]},
            partial=var.partial - {axes[0]},
            split=(*var.split, axes[0]),
        )
        via = self.via(axes[:1], "scatter")
        how = via + self.hints(var, op, via)
        return f"{result.name} = scatter {var.name} over {axes[0]} by {op}{how}", result

    def slice(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        free = [
            a for a in self.axes if a not in var.varying and a not in var.split and a not in self.ensembles
        ]
        if not free or var.partial or not var.can_be_cut:
            return None
        axis = self.random.choice(free)
        result = dataclasses.replace(var, name=self.fresh(), split=(*var.split, axis))
        return f"{result.name} = slice {var.name} over {axis}", result

    def gather(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        if not var.split:
            return None
        result = dataclasses.replace(var, name=self.fresh(), split=var.split[:-1])
        how = self.via(var.split[-1:], "gather")
        how += self.random.choice(["", "", " { bucket = 64 }", "" if "native" in how else " { chunk = 8 }"])
        return f"{result.name} = gather {var.name} over {var.split[-1]}{how}", result

    def unary(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        result = dataclasses.replace(var, name=self.fresh())
        name = self.fn("double" if var.partial else "bump", [var])
        return f"{result.name} = map {name}({var.name})", result

    def binary(self, var: Var, live: list[Var]) -> tuple[str, Var] | None:
        candidates = [v for v in live if v.key == var.key and v.split == var.split and not v.partial]
        if var.partial or not candidates:
            return None
        other = self.random.choice(candidates)
        result = dataclasses.replace(var, name=self.fresh(), per=var.per | other.per)
        return f"{result.name} = map {self.fn('blend', [var, other])}({var.name}, {other.name})", result

    def elastic(self, var: Var, live: list[Var]) -> tuple[str, Var] | None:
        """The center is a state with the type of `var`, but the same over the axes."""
        for state in self.states:
            over = [axis for axis in self.axes if axis in var.per - state.per - self.ensembles]
            fits = (var.key, var.split, var.partial) == (state.key, state.split, frozenset())
            is_shared = any(v is not state and v.name == state.name for v in live)
            if not fits or not var.floats_only or not over or is_shared or var.per - set(over) != state.per:
                continue
            eta = self.random.choice(["eta", "0.25"])
            pull = dataclasses.replace(var, name=self.fresh())
            live.append(dataclasses.replace(state))
            axes = ", ".join(over)
            text = f"{pull.name}, {state.name} = elastic {var.name} with {state.name} over {axes}"
            return f"{text} by sync(eta = {eta}, rho = 0.125)", pull
        return None

    def fn(self, kind: str, operands: Sequence[Var]) -> str:
        """The name of an elementwise function of `operands`; declared and made when first asked for."""
        if self.builtins and self.random.random() < 0.6 and (name := self.builtin(kind, operands[0])):
            return name
        word = operands[0].written
        types = ", ".join(v.written for v in operands)
        name = self.names.setdefault((kind, types), f"{kind}_{len(self.names)}")
        linear = " linear" if kind == "double" else ""
        self.fns[name] = f"fn {name}({types}) -> {word} on device elementwise{linear}"
        self.functions[name] = FUNCTIONS[kind]
        return name

    def builtin(self, kind: str, operand: Var) -> str | None:
        """The name of a built-in function in place of one of `kind`, if its leaves allow it."""
        if any(spec.dtype == "bool" for spec in operand.specs):
            return None
        if kind == "double":
            self.fns["twice"] = "fn twice = scale(factor = 2)"
            return "twice"
        if kind != "blend":
            return None
        name = self.random.choice(["add", "subtract", "mix"] if operand.floats_only else ["add", "subtract"])
        if name == "mix":
            self.fns["mix"] = "fn mix = blend(alpha = 0.25)"
        return name
