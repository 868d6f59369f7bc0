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

from commplan.dsl import load
from commplan.passes.pipeline.registry import PASSES
from commplan.pytree import flatten

from .case_functions import storage
from .random_stages import FLOATS, NUMPY, Spec, StageWriter, Tree, Var

OPTIONS = {
    "share": ("", "{design=none}", "{design=duplicate}", "{widening=keep}"),
    "place": ("", "{how=sharded}", "{how=replicated}"),
    "bucket": ("", "{max=1}", "{max=32}", "{max=1KiB, coalesce=false}", "{pinned=true}", "{in_process=true}"),
    "select": ("", "{split=false}"),
    "overlap": ("", "{chain=false}", "{in_process=true}"),
}


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
    call: int = 0  # the number of calls of the phase in fragments before the one that runs


def make_case(
    seed: int, dtypes: Sequence[str] = ("f32", "bf16", "f16", "i32", "u8", "bool"), *, builtins: bool = False
) -> Case:
    """The case of `seed`, with leaves of `dtypes`, over at most eight ranks.

    With `builtins` some functions are built in.
    """
    return _Writer(seed, dtypes, builtins).case()


def hidden(text: str, seed: int) -> str:
    """Sometimes `text` with its phase in fragments hidden, if it has one that can be."""
    if random.Random(f"commplan {seed} hidden").random() < 0.5:
        changed = text.replace(" fragments {", " fragments hidden under 1 step {")
        if load(changed, "random.plan")[0] is not None:
            return changed
    return text


class _Writer(StageWriter):
    def case(self) -> Case:
        forms = [self.form(number) for number in range(self.random.randint(1, 2))]
        for number in range(self.random.randint(1, 3)):
            self.inputs.append(self.placed(f"x{number}", *self.random.choice(forms)))
        self.inputs.append(Var("eta", Spec((), "float32"), "f32[]"))
        self.inputs.append(Var("count", Spec((), "int32"), "i32[]", per=frozenset(self.axes)))
        start = self.start()
        step, outputs = self.step()
        fragments, call = self.fragments()
        text = "\n".join(
            [f"plan random_{self.seed}", *self.declarations(), "", "at start {", *start, "}", "",
             "each step {", *step, f"    output {', '.join(outputs)}", "}", "", *fragments, ""]
        )  # fmt: skip
        return Case(
            self.seed, hidden(text, self.seed), self.axes,
            {v.name: v.form for v in (*self.inputs, *self.states) if v.is_tree},
            {v.name: self.data(v) for v in self.inputs},
            {v.name: tuple(a for a in self.axes if a in v.varying) for v in self.inputs},
            {v.name: v.split for v in self.inputs},
            self.functions, self.order(), self.pipeline(), call,
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
        """States from inputs: unchanged, or reduced first if they are partial."""
        lines: list[str] = []
        for number in range(self.random.randint(0, 2)):
            sources = [v for v in self.inputs[:-2] if not v.partial & self.ensembles]
            if not sources:
                continue
            source = self.random.choice(sources)
            var, name = source, f"s{number}"
            if source.partial:
                over = self.named(source.partial)
                var = dataclasses.replace(source, partial=frozenset())
                lines.append(f"    t{number} = {self.reduction(source.name, over, 'by sum')}")
                var = dataclasses.replace(var, name=f"t{number}")
            spread = self.named(var.per - self.ensembles)
            if spread and self.random.random() < 0.6:
                axes = ", ".join(spread)
                lines.append(f"    t{number} = broadcast {var.name} over {axes} from 0")
                var = dataclasses.replace(var, name=f"t{number}", per=var.per - set(spread))
            used = var.varying | self.ensembles | set(var.split)
            free = [axis for axis in self.axes if axis not in used]
            if var.can_be_cut and free and self.random.random() < 0.4:
                axis = self.random.choice(free)
                lines.append(f"    t{number} = slice {var.name} over {axis}")
                var = dataclasses.replace(var, name=f"t{number}", split=(*var.split, axis))
            lines.append(f"    {name} = map {self.fn('keep', [var])}({var.name})")
            self.states.append(dataclasses.replace(var, name=name))
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
            candidates = [v for v in live if v.like(state) and v.name != state.name]
            if candidates:
                other = self.random.choice(candidates)
                lines.append(
                    f"    {state.name} = map {self.fn('blend', [state, other])}({state.name}, {other.name})"
                )
            else:
                lines.append(f"    {state.name} = map {self.fn('bump', [state])}({state.name})")
        names = [v.name for v in live if not v.partial and v.name[0] in "vs"]
        return lines, list(dict.fromkeys(names)) or ["eta"]

    def fragments(self) -> tuple[list[str], int]:
        """Sometimes a phase in fragments, which replaces inputs and states, and the number of its call."""
        before, self.random = self.random, random.Random(f"commplan {self.seed} in fragments")
        try:
            return self._fragments()
        finally:
            self.random = before

    def divides(self, spec: Spec, axis: tuple[str, ...]) -> bool:
        """Whether a leaf can be cut into fragments, if others are split over `axis`."""
        return bool(spec.shape) or (not axis and spec.dtype in map(NUMPY.get, FLOATS))

    def _fragments(self) -> tuple[list[str], int]:
        trees = [v for v in (*self.inputs[:-2], *self.states) if v.is_tree and not v.partial]
        axis = self.random.choice([(), *sorted({v.split for v in trees if len(v.split) == 1})])
        cut = [v for v in trees if v.split in ((), axis) and all(self.divides(s, axis) for s in v.specs)]
        if not cut or self.random.random() < 0.3:
            return [], 0
        live, lines = list(cut), list[str]()
        for _ in range(self.random.randint(1, 4)):
            var = self.random.choice(live)
            kinds = [
                self.reduce,
                self.scatter,
                self.broadcast,
                self.slice,
                self.gather,
                self.shift,
                self.unary,
                self.binary,
            ]
            self.random.shuffle(kinds)
            text, result = next(written for kind in kinds if (written := kind(var, live)))
            live.append(result)
            lines.append(f"    {text}")
        names: list[str] = []
        for whole in self.random.sample(cut, self.random.randint(1, len(cut))):
            fits = [v for v in live if v.key == whole.key and v.split == whole.split and v.per <= whole.per]
            other = self.random.choice(fits)
            kind = "blend" if other.name != whole.name else "bump"
            operands = [whole, other][: 1 + (kind == "blend")]
            call = f"map {self.fn(kind, operands)}({', '.join(v.name for v in operands)})"
            lines.append(f"    {whole.name} = {call}")
            live = [v for v in live if v.name != whole.name]
            live.append(whole)
            names.append(whole.name)
        count, times = self.random.randint(2, 5), self.random.randint(1, 3)
        head = f"every {count * times} steps in {count} fragments {{"
        return [head, *lines, f"    output {', '.join(names)}", "}"], self.random.randrange(2 * count)

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
        """For some trees, a possible order of the leaves in a backward pass."""
        orders: dict[str, tuple[str, ...]] = {}
        for var in self.inputs:
            if var.is_tree and self.random.random() < 0.4:
                paths = [path for path, _ in flatten(var.form)[0]]
                orders[var.name] = tuple(self.random.sample(paths, len(paths)))
        return orders

    def pipeline(self) -> str | None:
        """Any selection of passes, with any options."""
        if self.random.random() < 0.3:
            return None
        share = self.random.random()  # of the passes that run
        chosen = [name for name in PASSES if self.random.random() < share]
        return ",".join(name + self.random.choice(OPTIONS.get(name, ("",))) for name in chosen)
