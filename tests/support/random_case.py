"""Random plans that are right by construction, with shapes, inputs, functions and a pipeline.

A case is a pure function of its seed. Data are small whole numbers, so that sums are exact in every
float type and integers can be compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from commplan.pytree import flatten

from .case_functions import FUNCTIONS, storage

Tree = Any
NUMPY = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64",
    "i32": "int32", "i64": "int64", "u8": "uint8", "bool": "bool",
}  # fmt: skip
FLOATS = ("f32", "bf16", "f16", "f64")
# What each stage takes after `via`; and the levels inside of others, which scatter and gather.
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
    """A value while the plan is written: what the next stages may do with it.

    `form` is a tree of `Spec`s, or one `Spec`; `key` tells apart forms that cannot be combined.
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
        """Its type, as a plan says it."""
        if self.is_tree:
            return "tree"
        spec = self.form
        word = next(short for short, name in NUMPY.items() if name == spec.dtype)
        return f"{word}[{', '.join(map(str, spec.shape))}]" if spec.shape else word

    @property
    def floats_only(self) -> bool:
        return all(spec.dtype in map(NUMPY.get, FLOATS) for spec in self.specs)

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


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan and all that it takes to compile and run it.

    `inputs` holds NumPy trees with one leading dimension for each `per` and `partial` axis, in plan
    order, split ones uncut; `varying` names those axes for each input.
    """

    seed: int
    text: str
    sizes: Mapping[str, int]
    shapes: Mapping[str, Tree]
    inputs: Mapping[str, Tree]
    varying: Mapping[str, tuple[str, ...]]
    split: Mapping[str, tuple[str, ...]]
    functions: Mapping[str, Callable[..., Any]]
    order: Mapping[str, tuple[str, ...]]
    pipeline: str | None


def make_case(seed: int, dtypes: Sequence[str] = ("f32", "bf16", "f16", "i32", "u8", "bool")) -> Case:
    """The case of `seed`, with leaves of `dtypes`, over at most eight ranks."""
    return _Writer(seed, dtypes).case()


_GRIDS = (
    (1,), (2,), (3,), (5,), (6,), (7,), (8,), (4,), (2, 2), (2, 3), (3, 2), (1, 5), (7, 1), (2, 4), (4, 2),
    (2, 2, 2), (1, 2, 3), (2, 1, 4),
)  # fmt: skip


class _Writer:
    def __init__(self, seed: int, dtypes: Sequence[str]) -> None:
        self.seed = seed
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

    def case(self) -> Case:
        forms = [self.form(number) for number in range(self.random.randint(1, 2))]
        for number in range(self.random.randint(1, 3)):
            self.inputs.append(self.placed(f"x{number}", *self.random.choice(forms)))
        self.inputs.append(Var("eta", Spec((), "float32"), "f32[]"))
        self.inputs.append(Var("count", Spec((), "int32"), "i32[]", per=frozenset(self.axes)))
        start = self.start()
        step, outputs = self.step()
        text = "\n".join(
            [f"plan random_{self.seed}", *self.declarations(), "", "at start {", *start, "}", "",
             "each step {", *step, f"    output {', '.join(outputs)}", "}", ""]
        )  # fmt: skip
        return Case(
            self.seed, text, self.axes,
            {v.name: v.form for v in (*self.inputs, *self.states) if v.is_tree},
            {v.name: self.data(v) for v in self.inputs},
            {v.name: tuple(a for a in self.axes if a in v.varying) for v in self.inputs},
            {v.name: v.split for v in self.inputs},
            self.functions, self.order(), self.pipeline(text),
        )  # fmt: skip

    # forms and data

    def form(self, number: int) -> tuple[Tree, str]:
        pick = self.random
        if pick.random() < 0.25:
            dims = tuple(pick.randint(1, 7) for _ in range(pick.randint(0, 2)))
            spec = Spec(dims, NUMPY[pick.choice(self.dtypes)])
            return spec, f"{spec.dtype}{dims}"
        palette = ["f32"] if pick.random() < 0.5 else pick.sample(self.dtypes, pick.randint(1, 3))
        if pick.random() < 0.4:
            palette = [d for d in palette if d in FLOATS] or ["f32"]
        leaves = [self.spec(palette) for _ in range(pick.randint(1, 4))]
        if pick.random() < 0.3:
            tree: Tree = tuple(leaves)
        elif len(leaves) > 2:
            tree = {"w": leaves[0], "inner": {"b": leaves[1], "list": leaves[2:]}}
        else:
            tree = {f"k{i}": leaf for i, leaf in enumerate(leaves)}
        return tree, f"tree{number}"

    def spec(self, palette: Sequence[str]) -> Spec:
        shape = self.random.choice([(), (0,), (1,), (3,), (5, 2), (2, 0), (7,), (2, 3, 2), (13,), (4, 4)])
        return Spec(shape, NUMPY[self.random.choice(palette)])

    def placed(self, name: str, form: Tree, key: str) -> Var:
        kinds = {axis: self.random.choice(["same", "per", "partial", "partial"]) for axis in self.axes}
        if any(spec.dtype == "bool" for _, spec in flatten(form)[0]):
            kinds = {axis: "per" if kind == "partial" else kind for axis, kind in kinds.items()}
        kinds |= {axis: "per" for axis in self.ensembles if kinds[axis] == "partial"}
        per = frozenset(axis for axis, kind in kinds.items() if kind == "per")
        partial = frozenset(axis for axis, kind in kinds.items() if kind == "partial")
        var = Var(name, form, key, per, partial)
        free = [axis for axis in self.axes if axis not in var.varying | self.ensembles]
        if free and var.can_be_cut and self.random.random() < 0.2:
            cut = self.random.sample(free, self.random.randint(1, len(free)))
            return dataclasses.replace(var, split=tuple(cut))
        return var

    def data(self, var: Var) -> Tree:
        numbers = np.random.default_rng([self.seed, len(var.name), *var.name.encode()])
        lead = tuple(n for axis, n in self.axes.items() if axis in var.varying)
        pairs, rebuild = flatten(var.form)
        return rebuild([self.array(numbers, (*lead, *spec.shape), spec.dtype, var.name) for _, spec in pairs])

    def array(self, numbers: np.random.Generator, shape: tuple[int, ...], dtype: str, name: str) -> Any:
        if name == "eta":
            return np.float32(0.5)
        low, high = (0, 3) if dtype == "uint8" or name == "count" else (-4, 5)
        array = numbers.integers(low, high, shape)
        if dtype == "bool":
            array = array > 0
        return array.astype(storage(dtype))

    # phases

    def start(self) -> list[str]:
        """States from inputs: as they are where nothing is partial, reduced first where something is."""
        lines: list[str] = []
        for number in range(self.random.randint(0, 2)):
            sources = [v for v in self.inputs[:-2] if not v.partial & self.ensembles]
            if not sources:
                continue
            source = self.random.choice(sources)
            made, name = source, f"s{number}"
            if source.partial:
                over = self.named(source.partial)
                made = dataclasses.replace(source, partial=frozenset())
                lines.append(f"    t{number} = {self.reduction(source.name, over, 'by sum')}")
                made = dataclasses.replace(made, name=f"t{number}")
            spread = self.named(made.per - self.ensembles)
            if spread and self.random.random() < 0.6:
                axes = ", ".join(spread)
                lines.append(f"    t{number} = broadcast {made.name} over {axes} from 0")
                made = dataclasses.replace(made, name=f"t{number}", per=made.per - set(spread))
            taken = made.varying | self.ensembles | set(made.split)
            free = [axis for axis in self.axes if axis not in taken]
            if made.can_be_cut and free and self.random.random() < 0.4:
                axis = self.random.choice(free)
                lines.append(f"    t{number} = slice {made.name} over {axis}")
                made = dataclasses.replace(made, name=f"t{number}", split=(*made.split, axis))
            lines.append(f"    {name} = map {self.fn('keep', [made])}({made.name})")
            self.states.append(dataclasses.replace(made, name=name))
        if not self.states:
            lines.append("    output eta")
        return lines

    def step(self) -> tuple[list[str], list[str]]:
        live = [*self.inputs[:-2], *self.states]
        lines: list[str] = []
        for _ in range(self.random.randint(2, 6)):
            written = self.stage(live)
            if written is not None:
                lines += written
        for state in self.states:
            latest = next(v for v in reversed(live) if v.name == state.name)
            if latest is not state:
                continue
            others = [v for v in live if v.like(state) and v.name != state.name]
            if others:
                other = self.random.choice(others)
                lines.append(
                    f"    {state.name} = map {self.fn('blend', [state, other])}({state.name}, {other.name})"
                )
            else:
                lines.append(f"    {state.name} = map {self.fn('bump', [state])}({state.name})")
        made = [v.name for v in live if not v.partial and v.name[0] in "vs"]
        return lines, list(dict.fromkeys(made)) or ["eta"]

    def stage(self, live: list[Var]) -> list[str] | None:
        """One random stage on a random value; None where the draw fits no stage."""
        var = self.random.choice([v for v in live if v.name[0] != "s"] or live)
        kinds = [self.reduce, self.reduce, self.broadcast, self.scatter, self.slice, self.gather, self.shift,
                 self.swap, self.unary, self.binary, self.elastic]  # fmt: skip
        self.random.shuffle(kinds)
        kinds.sort(key=lambda kind: kind != self.elastic)  # it seldom fits
        for kind in kinds:
            written = kind(var, live)
            if written is not None:
                text, made = written
                live.append(made)
                return [f"    {text}"]
        return None

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def named(self, axes: frozenset[str]) -> list[str]:
        chosen = [axis for axis in self.axes if axis in axes]
        self.random.shuffle(chosen)
        return chosen

    def reduction(self, operand: str, over: Sequence[str], rest: str) -> str:
        """A reduce over axes and, in a second stage of the same name, across ensembles is two stages."""
        word = "across" if set(over) <= self.ensembles else "over"
        return f"reduce {operand} {word} {', '.join(over)} {rest}"

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
        if var.floats_only:
            ops += ["mean", "mean(weight = count)"]
        ops = [op for op in ops if "weight" not in op or self.takes_weights(var)]
        if not ops:
            return None
        op = self.random.choice(ops)
        via = self.via(over, "reduce")
        rest = f"by {op}{via}{self.hints(var, op, native='native' in via)}"
        made = dataclasses.replace(
            var, name=self.fresh(), per=var.per - set(over), partial=var.partial - set(over)
        )
        return f"{made.name} = {self.reduction(var.name, over, rest)}", made

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

    def hints(self, var: Var, op: str = "sum", *, native: bool = False) -> str:
        items: list[str] = []
        if self.random.random() < 0.4:
            items.append(f"bucket = {self.random.choice([16, 64, 256, 1024])}")
        if self.random.random() < 0.2:
            items.append(f"chunk = {self.random.choice([4, 16, 64])}")
        wires = [w for w in ("bf16", "f16") if w in self.dtypes]
        if wires and var.floats_only and op not in ("max", "min") and self.random.random() < 0.3:
            wire = self.random.choice(wires)
            items.append(f"wire = {wire}")
            if native:  # which adds in the wire type
                items.append(f"accumulate = {wire}")
            elif self.random.random() < 0.5:
                items.append("accumulate = f32")
        return f" {{ {', '.join(items)} }}" if items else ""

    def broadcast(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        over = self.some(var.per - self.ensembles)
        if not over:
            return None
        root = self.random.randrange(int(np.prod([self.axes[axis] for axis in over])))
        made = dataclasses.replace(var, name=self.fresh(), per=var.per - set(over))
        hints = " { bucket = 64 }" if self.random.random() < 0.3 else ""
        how = self.via(over, "broadcast") + hints
        return f"{made.name} = broadcast {var.name} over {', '.join(over)} from {root}{how}", made

    def shift(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        over = self.named(var.per - self.ensembles)
        if not over:
            return None
        made, ranks = dataclasses.replace(var, name=self.fresh()), self.axes[over[0]]
        by = self.random.randint(-ranks - 1, 2 * ranks)
        wires = [wire for wire in ("bf16", "f16") if wire in self.dtypes and var.floats_only]
        options = ["", " { bucket = 64 }", *(f" {{ wire = {wire} }}" for wire in wires)]
        return f"{made.name} = shift {var.name} over {over[0]} by {by}{self.random.choice(options)}", made

    def swap(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        even = [
            axis
            for axis in self.named(var.per - self.ensembles)
            if not var.split
            and all(spec.shape and spec.shape[0] % self.axes[axis] == 0 for spec in var.specs)
        ]
        if not even:
            return None
        made = dataclasses.replace(var, name=self.fresh())
        wires = [wire for wire in ("bf16", "f16") if wire in self.dtypes and var.floats_only]
        options = ["", " { bucket = 64 }", *(f" {{ wire = {wire} }}" for wire in wires)]
        via = self.random.choice(("", " via bruck", " via pairwise"))
        return f"{made.name} = swap {var.name} over {even[0]}{via}{self.random.choice(options)}", made

    def takes_weights(self, var: Var) -> bool:
        """Of counts, which vary over all axes: so must the terms, scalars of a tree included."""
        return frozenset(self.axes) <= var.varying and not (var.is_tree and var.split)

    def scatter(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        axes = self.named(var.partial - self.ensembles)
        if not axes or not var.can_be_cut:
            return None
        ops = ["sum", "mean"] if var.floats_only else ["sum"]
        if var.floats_only and self.takes_weights(var):
            ops.append("mean(weight = count)")
        op = self.random.choice(ops)
        made = dataclasses.replace(
            var, name=self.fresh(), partial=var.partial - {axes[0]}, split=(*var.split, axes[0])
        )
        via = self.via(axes[:1], "scatter")
        how = via + self.hints(var, native="native" in via)
        return f"{made.name} = scatter {var.name} over {axes[0]} by {op}{how}", made

    def slice(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        free = [
            a for a in self.axes if a not in var.varying and a not in var.split and a not in self.ensembles
        ]
        if not free or var.partial or not var.can_be_cut:
            return None
        axis = self.random.choice(free)
        made = dataclasses.replace(var, name=self.fresh(), split=(*var.split, axis))
        return f"{made.name} = slice {var.name} over {axis}", made

    def gather(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        if not var.split:
            return None
        made = dataclasses.replace(var, name=self.fresh(), split=var.split[:-1])
        how = self.via(var.split[-1:], "gather") + self.random.choice(
            ["", "", " { bucket = 64 }", " { chunk = 8 }"]
        )
        return f"{made.name} = gather {var.name} over {var.split[-1]}{how}", made

    def unary(self, var: Var, _: list[Var]) -> tuple[str, Var] | None:
        made = dataclasses.replace(var, name=self.fresh())
        name = self.fn("double" if var.partial else "bump", [var])
        return f"{made.name} = map {name}({var.name})", made

    def binary(self, var: Var, live: list[Var]) -> tuple[str, Var] | None:
        others = [v for v in live if v.key == var.key and v.split == var.split and not v.partial]
        if var.partial or not others:
            return None
        other = self.random.choice(others)
        made = dataclasses.replace(var, name=self.fresh(), per=var.per | other.per)
        return f"{made.name} = map {self.fn('blend', [var, other])}({var.name}, {other.name})", made

    def elastic(self, var: Var, live: list[Var]) -> tuple[str, Var] | None:
        """The centre is a state that has what `var` has, but same over the axes."""
        for state in self.states:
            over = [axis for axis in self.axes if axis in var.per - state.per - self.ensembles]
            fits = (var.key, var.split, var.partial) == (state.key, state.split, frozenset())
            taken = any(v is not state and v.name == state.name for v in live)
            if not fits or not var.floats_only or not over or taken or var.per - set(over) != state.per:
                continue
            eta = self.random.choice(["eta", "0.25"])
            pull = dataclasses.replace(var, name=self.fresh())
            live.append(dataclasses.replace(state))
            axes = ", ".join(over)
            text = f"{pull.name}, {state.name} = elastic {var.name} with {state.name} over {axes}"
            return f"{text} by sync(eta = {eta}, rho = 0.125)", pull
        return None

    # functions

    def fn(self, kind: str, operands: Sequence[Var]) -> str:
        """The name of an elementwise function of `operands`; declared and made when first asked for."""
        word = operands[0].written
        types = ", ".join(v.written for v in operands)
        name = self.names.setdefault((kind, types), f"{kind}_{len(self.names)}")
        linear = " linear" if kind == "double" else ""
        self.fns[name] = f"fn {name}({types}) -> {word} on device elementwise{linear}"
        self.functions[name] = FUNCTIONS[kind]
        return name

    def declarations(self) -> list[str]:
        lines: list[str] = []
        for name, size in self.axes.items():
            kind = "ensemble" if name in self.ensembles else "axis"
            lines.append(f"{kind} {name} = {'?' if self.random.random() < 0.3 else size}")
        lines += self.fns.values()
        for word, values in (("input", self.inputs), ("state", self.states)):
            for v in values:
                lines.append(f"{word} {v.name} : {v.written} {self.placement(v)}".rstrip())
        return lines

    def placement(self, var: Var) -> str:
        parts = [
            (word, [a for a in self.axes if a in axes])
            for word, axes in (("per", var.per), ("partial", var.partial))
        ]
        parts.append(("split", list(var.split)))
        return " ".join(f"{word} {', '.join(axes)}" for word, axes in parts if axes)

    def order(self) -> dict[str, tuple[str, ...]]:
        """For some trees, an order in which a backward pass might make the leaves."""
        orders: dict[str, tuple[str, ...]] = {}
        for var in self.inputs:
            if var.is_tree and self.random.random() < 0.4:
                paths = [path for path, _ in flatten(var.form)[0]]
                orders[var.name] = tuple(self.random.sample(paths, len(paths)))
        return orders

    def pipeline(self, text: str) -> str | None:
        if self.random.random() < 0.3:
            return None
        passes = ["share", "bucket", "decompose", "wire", "select", "overlap"]
        kept = ("wire",) if "wire =" in text or "accumulate =" in text else ()
        chosen = [name for name in passes if self.random.random() < 0.75 or name in kept]
        limit = self.random.choice(["", "{max=32}", "{max=1KiB}"])
        return ",".join(name + limit if name == "bucket" else name for name in chosen)
