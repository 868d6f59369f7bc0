"""The meaning of a plan, from its graph: the judge of compiler and oracle alike.

Every leaf is one array with a dimension for each axis of the plan (its value on each rank), followed by the
whole leaf. `same` values are equal along an axis. A split value is the whole value, independent of the
location of its parts, so `slice` and `gather` change nothing and `scatter` is a `reduce`. Floats are float64
for any declared type; integers keep their type and wrap around.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from commplan.ir import plan as graph
from commplan.ir.plan import operands
from commplan.ir.stages import Shift, Swap
from commplan.pytree import flatten

Array = np.ndarray[Any, Any]
Tree = Any


class Meaning:
    """A value: leaves over all ranks, and the containers that hold them."""

    def __init__(self, leaves: Sequence[Array], rebuild: Callable[[Sequence[Any]], Tree]) -> None:
        self.leaves = [leaf.astype(np.float64) if is_float(leaf) else leaf for leaf in leaves]
        self.rebuild = rebuild

    def with_leaves(self, leaves: Sequence[Array]) -> Meaning:
        return Meaning(leaves, self.rebuild)


def is_float(array: Array) -> bool:
    """Whether `array` holds floats, bfloat16 among them (whose NumPy kind is V)."""
    return array.dtype.kind in "fV"


class Judge:
    """Interprets the phases of a plan; `sizes` are those of all its axes, in plan order."""

    def __init__(
        self, plan: graph.Plan, sizes: Mapping[str, int], functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.plan = plan
        self.functions = functions
        self.axes = [axis.name for axis in plan.axes if axis.kind is not graph.AxisKind.SERVER]
        self.sizes = tuple(sizes[name] for name in self.axes)

    def enter(self, tree: Tree, varying: Sequence[str]) -> Meaning:
        """A value from arrays with one leading dimension for each axis in `varying`, in plan order."""
        pairs, rebuild = flatten(tree)
        return Meaning([self._over_all(np.asarray(leaf), varying) for _, leaf in pairs], rebuild)

    def _over_all(self, leaf: Array, varying: Sequence[str]) -> Array:
        lead = tuple(n if name in varying else 1 for name, n in zip(self.axes, self.sizes, strict=True))
        shape = leaf.shape[len(varying) :]
        return np.broadcast_to(leaf.reshape(*lead, *shape), (*self.sizes, *shape))

    def phase(
        self, name: str, state: Mapping[str, Meaning], inputs: Mapping[str, Meaning], number: int = 0
    ) -> tuple[dict[str, Meaning], dict[str, Meaning]]:
        """(outputs, states after the phase); `inputs` by name. `number` counts the calls of the phase."""
        phase = self.plan.phase(name)
        values = {**inputs, **state}
        entry = (*self.plan.inputs, *self.plan.states)
        env = {ref: values[name] for ref in entry if (name := ref.rpartition(".")[0]) in values}
        for stage in phase.stages:
            if isinstance(stage, graph.Load):  # loaded values enter as inputs, if they are needed
                loaded = (stage.result, *((stage.count,) if stage.count else ()))
                env |= {ref: values[name] for ref in loaded if (name := ref.rpartition(".")[0]) in values}
            elif all(ref in env for ref in operands(stage)):
                env |= self.stage(stage, env, number)
        outputs = {binding.name: env[binding.value] for binding in phase.outputs if binding.value in env}
        updates = {binding.name: env[binding.value] for binding in phase.updates}
        return outputs, {**state, **updates}

    def stage(self, stage: graph.Stage, env: Mapping[str, Meaning], number: int = 0) -> dict[str, Meaning]:
        """The results of a stage in call `number` of its phase."""
        match stage:
            case graph.MapStage():
                return dict(zip(stage.results, self._map(stage, env), strict=True))
            case graph.Broadcast():
                return {stage.result: self._broadcast(env[stage.operand], stage.axes, stage.root)}
            case Shift():
                (dim,) = self._dims(stage.axes)
                value = env[stage.operand]
                moved = [np.roll(leaf, stage.by, dim) for leaf in value.leaves]
                return {stage.result: value.with_leaves(moved)}
            case Swap():
                (dim,) = self._dims(stage.axes)
                value = env[stage.operand]
                return {stage.result: value.with_leaves([self._swapped(leaf, dim) for leaf in value.leaves])}
            case graph.PickStage():
                return {stage.result: self._pick(stage, env[stage.operand], number)}
            case graph.MergeStage():
                return {stage.result: self._merge(stage, env, number)}
            case graph.ShareStage() | graph.SliceStage() | graph.Gather():
                return {stage.result: env[stage.operand]}
            case graph.Reduce():
                return {
                    stage.result: self._reduce(env, stage.operand, stage.axes, stage.op, stage.hints.integers)
                }
            case graph.Scatter():
                return {
                    stage.result: self._reduce(env, stage.operand, stage.axes, stage.op, stage.hints.integers)
                }
            case graph.ElasticStage():
                return self._elastic(stage, env)
            case _:
                raise NotImplementedError(f"{type(stage).__name__} has no synchronous meaning")

    def _table(self, leaf: Array, stage: graph.PickStage | graph.MergeStage) -> Array:
        """A leaf as rows, one for each rank along `stage.rows`, with zeros at the end."""
        flat = leaf.reshape(*self.sizes, -1)
        ways = int(np.prod([self.sizes[dim] for dim in self._dims(stage.rows)], dtype=int))
        table = np.zeros((*self.sizes, -(-flat.shape[-1] // ways) * ways), leaf.dtype)
        table[..., : flat.shape[-1]] = flat
        return table.reshape(*self.sizes, ways, -1)

    def _columns(
        self, width: int, stage: graph.PickStage | graph.MergeStage, number: int
    ) -> tuple[Array, Array]:
        """The columns of a piece, and which of them the fragment owns."""
        size, fragment = -(-width // stage.fragments), number % stage.fragments
        columns = np.arange(size) + min(fragment * size, width - size)
        return columns, columns // max(size, 1) == fragment

    def _pick(self, stage: graph.PickStage, value: Meaning, number: int) -> Meaning:
        if stage.fragments == 1:
            return value
        tables = [self._table(leaf, stage) for leaf in value.leaves]
        pieces = [table[..., self._columns(table.shape[-1], stage, number)[0]] for table in tables]
        return value.with_leaves([piece.reshape(*self.sizes, -1) for piece in pieces])

    def _merge(self, stage: graph.MergeStage, env: Mapping[str, Meaning], number: int) -> Meaning:
        whole, leaves = env[stage.whole], list[Array]()
        for leaf, piece in zip(whole.leaves, env[stage.piece].leaves, strict=True):
            table = self._table(leaf, stage)
            columns, is_owned = self._columns(table.shape[-1], stage, number)
            pieces = piece.reshape(*table.shape[:-1], -1)
            table[..., columns[is_owned]] = pieces[..., is_owned]
            size = int(np.prod(leaf.shape[len(self.sizes) :], dtype=int))
            leaves.append(table.reshape(*self.sizes, -1)[..., :size].reshape(leaf.shape))
        return whole.with_leaves(leaves)

    def _dims(self, over: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.axes.index(name) for name in over)

    def _reduce(
        self,
        env: Mapping[str, Meaning],
        operand: str,
        over: Sequence[str],
        op: graph.Reduction,
        integers: str | None = None,
    ) -> Meaning:
        value, dims = env[operand], self._dims(over)
        if op.name in ("max", "min"):
            extreme = np.max if op.name == "max" else np.min
            return value.with_leaves([self._all(extreme(leaf, dims, keepdims=True)) for leaf in value.leaves])
        weight = None if op.weight is None else env[op.weight].leaves[0]
        leaves: list[Array] = []
        for leaf in value.leaves:
            if op.name == "sum":
                leaves.append(self._all(leaf.sum(dims, keepdims=True, dtype=leaf.dtype)))
                continue
            if integers is not None and leaf.dtype.kind in "iub":
                whole = leaf.max(dims, keepdims=True)
                if integers == "first":
                    whole = leaf[tuple(slice(0, 1) if n in dims else slice(None) for n in range(leaf.ndim))]
                leaves.append(self._all(whole))
                continue
            weights = np.ones(self.sizes) if weight is None else weight
            weights = weights.reshape(*self.sizes, *[1] * (leaf.ndim - len(self.sizes)))
            total = weights.sum(dims, keepdims=True)
            counted = np.where(weights == 0, 0.0, leaf)  # a term without weight may be NaN
            weighted = (counted * weights).sum(dims, keepdims=True)
            # Nothing was counted: the mean over no records is zero.
            leaves.append(self._all(np.where(total == 0, 0.0, weighted / np.where(total == 0, 1.0, total))))
        return value.with_leaves(leaves)

    def _all(self, leaf: Array) -> Array:
        return np.broadcast_to(leaf, (*self.sizes, *leaf.shape[len(self.sizes) :]))

    def _swapped(self, leaf: Array, dim: int) -> Array:
        """Block j of the dimension behind those of the axes goes to rank j along `dim`."""
        ranks, rows = self.sizes[dim], len(self.sizes)
        blocks = np.stack(np.split(leaf, ranks, rows), rows)  # a separate dimension for the block
        return np.swapaxes(blocks, dim, rows).reshape(leaf.shape)

    def _broadcast(self, value: Meaning, over: Sequence[str], root: int) -> Meaning:
        places = np.unravel_index(root, [self.sizes[dim] for dim in self._dims(over)])
        leaves = list(value.leaves)
        for dim, place in zip(self._dims(over), places, strict=True):
            leaves = [self._all(np.take(leaf, [int(place)], dim)) for leaf in leaves]
        return value.with_leaves(leaves)

    def _elastic(self, stage: graph.ElasticStage, env: Mapping[str, Meaning]) -> dict[str, Meaning]:
        if stage.mode != "sync":
            raise NotImplementedError(f"elastic by {stage.mode} has no synchronous meaning")
        member, center = env[stage.operand], env[stage.center]
        eta, rho = (
            env[x].leaves[0] if isinstance(x, str) else np.full(self.sizes, x) for x in (stage.eta, stage.rho)
        )
        factor = eta * rho
        dims = self._dims(stage.axes)
        pulls = [
            factor.reshape(*self.sizes, *[1] * (w.ndim - len(self.sizes))) * (w - c)
            for w, c in zip(member.leaves, center.leaves, strict=True)
        ]
        moved = [
            c + self._all(pull.sum(dims, keepdims=True)) for c, pull in zip(center.leaves, pulls, strict=True)
        ]
        return {stage.pull: member.with_leaves(pulls), stage.result: center.with_leaves(moved)}

    def _map(self, stage: graph.MapStage, env: Mapping[str, Meaning]) -> list[Meaning]:
        """The function on every rank's whole values."""
        operands = [env[ref] for ref in stage.operands]
        body = self.plan.fn(stage.fn).body
        function = self.functions[stage.fn] if body is None else _builtin(body)
        answers: dict[tuple[int, ...], list[Tree]] = {}
        for rank in itertools.product(*map(range, self.sizes)):
            trees = [operand.rebuild([leaf[rank] for leaf in operand.leaves]) for operand in operands]
            answer = function(*trees)
            answers[rank] = list(answer) if len(stage.results) > 1 else [answer]
        results: list[Meaning] = []
        for number in range(len(stage.results)):
            flat = {rank: flatten(trees[number]) for rank, trees in answers.items()}
            first, rebuild = next(iter(flat.values()))
            leaves: list[Array] = []
            for place in range(len(first)):
                parts = [np.asarray(pairs[place][1]) for pairs, _ in flat.values()]
                leaves.append(np.stack(parts).reshape(*self.sizes, *parts[0].shape))
            results.append(Meaning(leaves, rebuild))
        return results


def _builtin(body: graph.Builtin) -> Callable[..., Tree]:
    """A built-in function on trees of float64, by the matrix of its coefficients; a cast rounds nothing."""

    def apply(*trees: Tree) -> list[Tree] | Tree:
        flat = [flatten(tree) for tree in trees]
        rows = [[1.0]] if body.name == "cast" else _coefficients(body.name, *body.factors)
        columns = list(zip(*([x for _, x in pairs] for pairs, _ in flat), strict=True))
        results = [
            rebuild([_combined(row, xs) for xs in columns])
            for row, (_, rebuild) in zip(rows, flat, strict=False)
        ]
        return results if len(rows) > 1 else results[0]

    return apply


def _coefficients(name: str, *factors: float) -> list[list[float]]:
    match name, factors:
        case "zeros", _:
            return [[0]]
        case "add", _:
            return [[1, 1]]
        case "subtract", _:
            return [[1, -1]]
        case "scale", (factor,):
            return [[factor]]
        case "blend", (alpha,):
            return [[alpha, 1 - alpha]]
        case "sgd", (rate,):
            return [[1, -rate]]
        case "nesterov", (rate, mu):
            return [[1, -rate * mu * mu, -rate * (1 + mu)], [0, mu, 1]]
        case _:
            raise NotImplementedError(name)


def _combined(row: Sequence[float], xs: Sequence[Array]) -> Array:
    """The sum of `xs` times the numbers of `row`, in their own type if they are whole numbers."""
    if is_float(np.asarray(xs[0])):
        return sum((c * np.asarray(x) for c, x in zip(row, xs, strict=True)), np.zeros(np.shape(xs[0])))
    dtype = np.asarray(xs[0]).dtype
    whole = [np.array(int(c), np.int64).astype(dtype) for c in row]
    with np.errstate(all="ignore"):
        terms = [np.multiply(x, c, dtype=dtype) for c, x in zip(whole, xs, strict=True)]
        return np.add.reduce(terms, dtype=dtype)
