"""Random well-typed plans, as text: every stage, clause, hint and placement of the language.

`random_plan` builds a graph with a separate small model of the rules, which shares nothing with the checker,
and prints it. The text must pass the check. For plans to run, with data and functions, see `random_case`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

FLOATS = ("f32", "f16", "bf16", "f64")
ROOT_ALGORITHMS = ("native", "ring", "binomial_tree", "scatter_gather", "chain")
SUM_ALGORITHMS = ("ring", "recursive_doubling", "halving_doubling", "double_tree", "torus")


@dataclasses.dataclass(frozen=True)
class Var:
    """A value in the model. `batch` is set while it is loaded; `type` is then that of one record."""

    name: str
    type: str
    per: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    split: tuple[str, ...] = ()
    batch: int | None = None

    @property
    def is_scalar(self) -> bool:
        return self.batch is None and self.type not in ("tree", "bytes") and "[" not in self.type

    @property
    def is_float(self) -> bool:
        return self.type == "tree" or self.type.partition("[")[0] in FLOATS

    @property
    def varying(self) -> frozenset[str]:
        return self.per | self.partial | frozenset(self.split)


class Writer:
    """One plan while it is written: declarations above, phases below."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sizes = {f"a{i}": rng.randint(1, 4) for i in range(rng.randint(1, 3))}
        self.ensemble = "member" if rng.random() < 0.5 else None
        self.members = rng.randint(1, 4)
        self.server = "hub" if rng.random() < 0.4 else None
        self.head: list[str] = [f"axis {name} = {size}" for name, size in self.sizes.items()]
        if self.ensemble:
            self.head.append(f"ensemble {self.ensemble} = {self.members}")
        if self.server:
            self.head.append(f"server {self.server} = {rng.randint(1, 3)}")
        self.start: list[str] = []
        self.body: list[str] = []
        self.values: list[Var] = []
        self.count = 0

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def maybe(self, text: str, chance: float = 0.3) -> str:
        return text if self.rng.random() < chance else ""

    def some(self, names: Iterable[str], least: int = 0) -> list[str]:
        """A random selection in random order."""
        pool = sorted(names)
        return self.rng.sample(pool, self.rng.randint(least, len(pool)))

    def array(self) -> str:
        dtype = self.rng.choice((*FLOATS, "i32", "i64"))
        dims = [str(self.rng.randint(1, 9)) for _ in range(self.rng.randint(0, 2))]
        return f"{dtype}[{', '.join(dims)}]" if dims else dtype

    def fn(self, operands: Iterable[str], results: Iterable[str], flags: str) -> str:
        name = self.fresh("f")
        self.head.append(f"fn {name}({', '.join(operands)}) -> {', '.join(results)} on {flags}")
        return name

    def bind(self, line: str, value: Var) -> Var:
        self.body.append(line)
        self.values.append(value)
        return value

    def is_placed(self, value: Var) -> str:
        words = [("per", sorted(value.per)), ("partial", sorted(value.partial)), ("split", list(value.split))]
        self.rng.shuffle(words)
        return " ".join(f"{word} {', '.join(axes)}" for word, axes in words if axes)

    # -- declarations

    def declare_input(self) -> None:
        """An input of any placement."""
        type_ = self.rng.choice(("tree", self.array(), self.array()))
        free = self.some(self.sizes)
        per, partial, split = set[str](), set[str](), list[str]()
        for axis in free:
            kind = self.rng.choice(("per", "partial", "split"))
            if kind == "split" and (type_ == "tree" or "[" in type_):
                split.append(axis)
            elif kind == "partial":
                partial.add(axis)
            else:
                per.add(axis)
        if self.ensemble and self.rng.random() < 0.5:
            per.add(self.ensemble)
        value = Var(self.fresh("x"), type_, frozenset(per), frozenset(partial), tuple(split))
        self.head.append(f"input {value.name} : {type_} {self.is_placed(value)}".rstrip())
        self.values.append(value)

    def declare_state(self) -> None:
        """A state that is a copy of an input at first, and combined with it at every step."""
        model = self.rng.choice(self.values)
        if model.partial or model.batch:
            return
        state = dataclasses.replace(model, name=self.fresh("s"))
        self.head.append(f"state {state.name} : {state.type} {self.is_placed(state)}".rstrip())
        copy = self.fn((state.type,), (state.type,), "device elementwise")
        update = self.fn((state.type, state.type), (state.type,), "device elementwise")
        self.start.append(f"{state.name} = map {copy}({model.name})")
        self.body.append(f"{state.name} = map {update}({state.name}, {model.name})")
        self.values.append(state)

    # -- stages

    def reduce(self, x: Var) -> None:
        axes = self.some(x.per.union(x.partial) & self.sizes.keys(), 1)
        ops = [
            "sum",
            *(["mean"] if x.is_float else []),
            *(["max", "min"] if not x.partial & set(axes) else []),
        ]
        op = self.rng.choice(ops)
        weights = [
            v for v in self.values
            if v.is_scalar and not v.partial and v.varying <= x.varying
            and not (x.type == "tree" and v.varying & set(x.split))
        ]  # fmt: skip
        if op == "mean" and weights and self.rng.random() < 0.5:
            op = f"mean(weight = {self.rng.choice(weights).name})"
        via = self.rng.choice(SUM_ALGORITHMS)
        if self.rng.random() < 0.5:
            levels = self.rng.sample(axes, len(axes))
            via = f"hierarchical({', '.join(a + self.maybe(' = ring') for a in levels)})"
        hints = self.maybe(" { bucket = 1 MiB, overlap = backward }")
        y = dataclasses.replace(x, name=self.fresh("y"), per=x.per - set(axes), partial=x.partial - set(axes))
        via = self.maybe(f" via {via}")
        self.bind(f"{y.name} = reduce {x.name} over {', '.join(axes)} by {op}{via}{hints}", y)

    def across(self, x: Var) -> None:
        if self.ensemble is None or self.ensemble not in x.per:
            return
        op = self.rng.choice(("max", "min", "sum", *(["mean"] if x.is_float else [])))
        y = dataclasses.replace(x, name=self.fresh("y"), per=x.per - {self.ensemble})
        self.bind(f"{y.name} = reduce {x.name} across {self.ensemble} by {op}", y)

    def broadcast(self, x: Var) -> None:
        axes = self.some(x.per & self.sizes.keys(), 1)
        ranks = 1
        for axis in axes:
            ranks *= self.sizes[axis]
        root = self.rng.randrange(ranks)
        via = self.maybe(f" via {self.rng.choice(ROOT_ALGORITHMS)}")
        y = dataclasses.replace(x, name=self.fresh("y"), per=x.per - set(axes))
        self.bind(f"{y.name} = broadcast {x.name} over {', '.join(axes)} from {root}{via}", y)

    def shift(self, x: Var) -> None:
        axis = self.rng.choice(sorted(x.per & self.sizes.keys()))
        y = dataclasses.replace(x, name=self.fresh("y"))
        wire = self.maybe(" { wire = bf16 }") if x.is_float else ""
        self.bind(f"{y.name} = shift {x.name} over {axis} by {self.rng.randint(-5, 5)}{wire}", y)

    def swap(self, x: Var) -> None:
        axis = self.rng.choice(sorted(x.per & self.sizes.keys()))
        rows = x.type.partition("[")[2].rstrip("]").split(",")[0] or "0"
        if x.split or x.type == "tree" or x.is_scalar or int(rows) % self.sizes[axis]:
            return
        y = dataclasses.replace(x, name=self.fresh("y"))
        how = self.maybe(" via bruck") + self.maybe(" { bucket = 4096 }")
        self.bind(f"{y.name} = swap {x.name} over {axis}{how}", y)

    def scatter(self, x: Var) -> None:
        axis = self.rng.choice(sorted(x.partial))
        y = dataclasses.replace(x, name=self.fresh("y"), partial=x.partial - {axis}, split=(*x.split, axis))
        op = self.rng.choice(("sum", "mean")) if x.is_float else "sum"
        hints = self.maybe(" { bucket = 65_536 }")
        self.bind(f"{y.name} = scatter {x.name} over {axis} by {op}{self.maybe(' via torus')}{hints}", y)

    def cut(self, x: Var) -> None:
        axis = self.rng.choice(sorted(self.sizes.keys() - x.varying))
        y = dataclasses.replace(x, name=self.fresh("y"), split=(*x.split, axis))
        self.bind(f"{y.name} = slice {x.name} over {axis}", y)

    def gather(self, x: Var) -> None:
        y = dataclasses.replace(x, name=self.fresh("y"), split=x.split[:-1])
        wire = self.maybe(" { wire = bf16 }") if x.is_float else ""
        self.bind(f"{y.name} = gather {x.name} over {x.split[-1]}{self.maybe(' via bruck')}{wire}", y)

    def map_values(self, x: Var) -> None:
        """A device fn on whole values, with the flags that its operands need."""
        alike = [
            v for v in self.values
            if v.batch is None and v.partial == x.partial and (v.split == x.split or v.is_scalar)
            and v.type == x.type and not v.per & set(x.split) and not x.per & set(v.split)
        ]  # fmt: skip
        operands = [x, *self.rng.sample(alike, min(len(alike), self.rng.randint(0, 2)))]
        per = frozenset[str]().union(*(v.per for v in operands))
        flags = " elementwise" if x.split or self.rng.random() < 0.3 else ""
        flags += " linear" if x.partial or self.rng.random() < 0.2 else ""
        results = [x.type] * self.rng.randint(1, 2)
        members = ""
        if self.ensemble and self.rng.random() < 0.3:
            members, flags, per = f" per {self.ensemble}", f"{flags} random", per | {self.ensemble}
        fn = self.fn([v.type for v in operands], results, f"device{flags}")
        results_of = [dataclasses.replace(x, name=self.fresh("y"), per=per, split=x.split) for _ in results]
        names = ", ".join(v.name for v in results_of)
        self.body.append(f"{names} = map {fn}({', '.join(v.name for v in operands)}){members}")
        self.values += results_of

    def load(self) -> None:
        type_ = self.rng.choice(("bytes", "u8[4, 4]", "f32[3]"))
        source = self.fresh("data")
        self.head.append(f"source {source} : {type_}")
        split = self.some(self.sizes, 1)
        ways = 1
        for axis in split:
            ways *= self.sizes[axis]
        batch = ways * self.rng.randint(1, 3)
        per = frozenset({self.ensemble}) if self.ensemble and self.rng.random() < 0.3 else frozenset[str]()
        x = Var(self.fresh("r"), type_, per, frozenset(), tuple(split), batch)
        n = Var(self.fresh("n"), "i32", per | set(split))
        count = self.rng.random() < 0.5
        visit, tail = self.rng.choice(
            (("exactly_once", "pad"), ("at_least_once", "pad"), ("at_most_once", "drop"))
        )
        line = (
            f"{x.name}{f', {n.name}' if count else ''} = load {source} batch {batch} split {', '.join(split)}"
            f"{f' per {self.ensemble}' if per else ''} visit {visit} seed {self.rng.randrange(99)}"
            f"{f' tail {tail}' if tail != 'pad' else self.maybe(' tail pad')}"
            f"{self.maybe(' { prefetch = 2, device_prefetch = 1, on_error = skip }')}"
        )
        self.bind(line, x)
        if count:
            self.values.append(n)
        self.use_records(x)

    def use_records(self, x: Var) -> None:
        """share, host fns and at last a device fn."""
        if self.ensemble and self.ensemble not in x.per and self.rng.random() < 0.5:
            design = self.rng.choice(
                ("duplicate", "all_shared", f"multi_broadcast(readers = {self.rng.randint(1, self.members)})")
            )
            x = self.bind(
                f"{x.name}s = share {x.name} over {self.ensemble} via {design}",
                dataclasses.replace(x, name=f"{x.name}s"),
            )
        random_, per, members = "", x.per, ""
        if self.ensemble and self.rng.random() < 0.5:
            random_, per, members = " random", x.per | {self.ensemble}, f" per {self.ensemble}"
        decode = self.fn((x.type,), ("u8[5]",), f"host{random_}")
        y = self.bind(
            f"{x.name}d = map {decode}({x.name}){members}{self.maybe(' { cores = 1 }')}",
            dataclasses.replace(x, name=f"{x.name}d", type="u8[5]", per=per),
        )
        if self.rng.random() < 0.5:
            device = self.fn((y.type,), ("f32[5]",), "device")
            z = dataclasses.replace(y, name=f"{x.name}v", type=f"f32[{x.batch}, 5]", batch=None)
            self.bind(f"{z.name} = map {device}({y.name})", z)

    def exchange(self) -> None:
        axes = self.some(self.sizes, 1)
        w, g, p = self.fresh("w"), self.fresh("g"), self.fresh("p")
        place = f" on {self.server}" if self.server and self.rng.random() < 0.5 else ""
        update = self.fn(("tree", "tree"), ("tree",), "device elementwise")
        over = ", ".join(axes)
        self.head += [
            f"input {p} : tree per {over}",
            f"input {g} : tree partial {over}",
            f"state {w} : tree{place}",
        ]
        self.start.append(f"{w} = broadcast {p} over {over} from 0")
        via = self.maybe(f" via parameter_server(within = {axes[0]})")
        line = f"{w} = exchange {g} into {w} with {update} over {over} by mean{via}"
        self.body.append(line + self.maybe(" { chunk = 32 KiB }"))

    def elastic(self) -> None:
        axis = self.rng.choice(sorted(self.sizes))
        w, c, d = self.fresh("w"), self.fresh("c"), self.fresh("d")
        place, mode = (f" on {self.server}", "async") if self.server else ("", "sync")
        self.head += [f"input {w} : tree per {axis}", f"state {c} : tree{place}"]
        self.start.append(f"{c} = broadcast {w} over {axis} from 0")
        line = f"{d}, {c} = elastic {w} with {c} over {axis} by {mode}(eta = 0.2, rho = 0.9)"
        self.bind(line, Var(d, "tree", frozenset({axis})))

    def stage(self) -> None:
        """Any stage that some value allows."""
        x = self.rng.choice(self.values)
        replicas = self.sizes.keys()
        if x.batch is not None:
            return
        steps = [self.map_values]
        if x.per & replicas or x.partial:
            steps.append(self.reduce)
        if x.per & replicas:
            steps += [self.broadcast, self.shift, self.swap]
        if x.partial and not x.is_scalar:
            steps.append(self.scatter)
        if replicas - x.varying and not x.is_scalar:
            steps.append(self.cut)
        if x.split:
            steps.append(self.gather)
        if x.per - replicas and not x.partial:
            steps.append(self.across)
        self.rng.choice(steps)(x)

    def text(self) -> str:
        """The whole plan, everything that may leave its phase put out."""
        out = [v.name for v in self.values if not v.partial and v.type != "bytes"]
        if out:
            self.body.append(f"output {', '.join(out)}")
        phases = ["at start {", *(f"    {line}" for line in self.start), "}"] if self.start else []
        step = self.rng.choice(("each step", "every 4 steps", "phase train"))
        return "\n".join(
            [
                "plan random",
                *self.head,
                *phases,
                f"{step} {{",
                *(f"    {line}" for line in self.body),
                "}",
                "",
            ]
        )


def random_plan(rng: random.Random) -> str:
    """A plan of a random size that checks clean; the same for the same state of `rng`."""
    writer = Writer(rng)
    for _ in range(rng.randint(1, 4)):
        writer.declare_input()
    for _ in range(rng.randint(0, 2)):
        writer.declare_state()
    for chance, stage in ((0.5, writer.load), (0.3, writer.exchange), (0.3, writer.elastic)):
        if rng.random() < chance:
            stage()
    for _ in range(rng.randint(1, 8)):
        writer.stage()
    return writer.text()
