"""The plans whose schedules are edited: every verb and option without servers, for both backends.

Functions of devices use operators only: the oracle calls them with NumPy arrays, a run with those of JAX.
Functions of hosts take bytes or NumPy records. `random` ones take a generator, or a key under JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

import commplan
from commplan.ir.refs import name_of
from commplan.topology import Level, Topology
from tests.support.case_functions import each

Tree = Any
Spec = Mapping[str, Any]


def leaf(*shape: int, dtype: str = "f32") -> Spec:
    return {"shape": list(shape), "dtype": dtype}


SMALL = {"w": leaf(3, 2), "b": leaf(5)}
MIXED = {"n": leaf(2, dtype="i32"), "h": leaf(4, dtype="bf16"), "w": leaf(3)}
HALF = {"a": leaf(6, dtype="f16"), "b": leaf(2, dtype="f16")}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan without its first line. backends: the backends that run it. machine: levels of a topology."""

    name: str
    body: str
    shapes: Mapping[str, Tree] = dataclasses.field(default_factory=dict[str, Tree])
    backends: tuple[Literal["jax", "mpi"], ...] = ("jax", "mpi")
    passes: tuple[str | None, ...] = (None, "bucket{max=16},overlap")
    machine: tuple[tuple[str, int], ...] = ()


def _keep(x: Any) -> Any:
    return x


def _zero(x: Any) -> Any:
    return x - x


def _twice(x: Any) -> Any:
    return x + x


def _more(x: Any) -> Any:
    return x + 1


def _less(w: Any, g: Any) -> Any:
    return w - g * w.dtype.type(0.3)


def _momentum(weights: Tree, moment: Tree, gradient: Tree) -> tuple[Tree, Tree]:
    moment = each(operator.add)(moment, gradient)
    return each(operator.sub)(weights, moment), moment


def _rate(x: Any) -> float:
    """A number that is weakly typed under JAX."""
    del x
    return 0.1


def _pair(x: Any) -> tuple[Any, Any]:
    return x, x + 1


def _drawn(key: Any, x: Any) -> Any:
    """`x` and random numbers, from a generator of NumPy or a key of JAX."""
    if isinstance(key, np.random.Generator):
        return x + key.integers(0, 100, np.shape(x)).astype(np.asarray(x).dtype)
    import jax  # noqa: PLC0415 - only under JAX

    return x + jax.random.randint(key, x.shape, 0, 100).astype(x.dtype)


def _sure(record: bytes) -> tuple[Any, Any]:
    """Pixels and a label."""
    return np.frombuffer(record, np.uint8)[:4], np.int32(record[0])


def _decode(record: bytes) -> tuple[Any, Any]:
    """As `_sure`, but it raises ValueError for some records."""
    if record[0] % 7 == 6:
        raise ValueError("a broken record")
    return _sure(record)


def _halve(x: Any) -> Any:
    return np.asarray(x, np.float32) / 2


def _flip(x: Any, rng: Any) -> Any:
    return x + rng.integers(0, 50, np.shape(x)).astype(np.uint8)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "keep": each(_keep),
    "zeros": each(_zero),
    "twice": each(_twice),
    "add": each(operator.add),
    "step": each(_less),
    "momentum": _momentum,
    "first": _more,
    "rate": _rate,
    "times": operator.mul,
    "pair": _pair,
    "noise": _drawn,
    "hiss": _drawn,
    "sure": _sure,
    "decode": _decode,
    "halve": _halve,
    "flip": _flip,
    "lighten": _more,
}
RECORDS = [bytes([number] * 4) for number in range(22)]

COLLECTIVES = """axis a = 2
axis b = 3
input p : tree per a, b
input g : tree partial a, b
input n : f32 per a, b
each step {{
    sum = reduce g over a, b by sum {{ {sum} }}
    mean = reduce g over b, a by mean {{ {mean} }}
    weighted = reduce g over a, b by mean(weight = n) {{ {sum} }}
    most = reduce p over b by max
    least = reduce most over a by min
    q = broadcast p over a, b from 4
    output sum, mean, weighted, least, q
}}"""
SHARDED = """axis data = 4
input g : tree partial data
state w : tree split data
fn keep(tree) -> tree on device elementwise
fn step(tree, tree) -> tree on device elementwise
input w0 : tree
at start {{
    s = slice w0 over data
    w = map keep(s)
}}
each step {{
    s = scatter g over data by mean {options}
    w = map step(w, s)
    whole = gather w over data {options_of_gather}
    output whole
}}"""
EXCHANGE = """{axes}
input p : tree per {names}
input g : tree partial {names}
input n : f32 per {names}
state w : tree
state m : tree
fn zeros(tree) -> tree on device elementwise
fn momentum(tree, tree, tree) -> tree, tree on device elementwise
at start {{
    w = broadcast p over {names} from 0
    m = map zeros(w)
    output w
}}
each step {{
    w, m = exchange g into w, m with momentum over {names} by {how} {options}
    output w
}}
phase look {{ output w, m }}"""
ELASTIC = """axis worker = 4
input p : tree per worker
input eta : f32
state c : tree
at start {{ c = broadcast p over worker from 1 }}
every 2 steps {{
    pull, c = elastic p with c over worker by sync(eta = {eta}, rho = 0.3) {options}
    output pull
}}
phase look {{ output c }}"""
LEVELS_OF_8 = (("near", 4), ("far", 2))
LARGE = {"w": leaf(40, 50)}
INTEGERS = """axis a = 3
input g : tree partial a
each step {
    first = reduce g over a by mean { integers = first, wire = bf16 }
    most = reduce g over a by mean { integers = max, bucket = 8 }
    output first, most
}"""
LEVELS = """axis a = 2
axis b = 4
input g : tree partial a, b
input p : tree per a, b
each step {
    x = reduce g over b, a by sum via hierarchical(b = ring, a = recursive_doubling) { chunk = 8 }
    y = reduce g over a, b by mean via hierarchical(b, a) { wire = bf16 }
    z = reduce p over a, b by max via hierarchical(b = ring, a)
    q = broadcast p over a, b from 3 via hierarchical(b = chain, a = binomial_tree)
    output x, y, z, q
}"""
MACHINE = """axis a = 8
input g : tree partial a
input p : tree per a
each step {
    x = reduce g over a by sum
    y = reduce g over a by mean { wire = bf16, chunk = 32 }
    q = broadcast p over a from 5
    output x, y, q
}"""
CUTS = """axis a = 2
axis b = 2
input x : f32[8, 3]
input y : f32[8] partial b
each step {
    s = slice x over a
    t = slice s over b
    u = gather t over b
    v = gather u over a
    w = scatter y over b by sum
    z = slice w over a
    o = gather z over a
    output v, t, o
}"""
MOVES = """axis a = 2
axis b = 3
input x : f32[6, 2] per a, b
each step {
    y = shift x over b by 2 { wire = bf16 }
    z = shift y over a by -1
    s = swap z over b via pairwise
    t = swap s over a { bucket = 8 }
    output z, t
}"""
CALLS = """axis a = 2
input x : f32[4] per a
state s : f32[4] per a
fn first(f32[4]) -> f32[4] on device elementwise
fn rate(f32[4]) -> f32 on device
fn times(f32[4], f32) -> f32[4] on device
fn pair(f32[4]) -> f32[4], f32[4] on device elementwise
fn add(f32[4], f32[4]) -> f32[4] on device elementwise linear
at start { s = map first(x) }
phase probe {
    y = map add(s, x)
    output y
}
every 3 steps { s = map add(s, x) }
each step {
    r = map rate(x)
    y = map times(x, r)
    u, v = map pair(y)
    s = map add(u, s)
    w = reduce v over a by sum
    output u, v, w, r
}"""
DRAWS = """axis a = 2
ensemble m = 2
ensemble k = 2
input x : f32[4] per a, m, k
fn noise(f32[4]) -> f32[4] on device random
fn hiss(f32[4]) -> f32[4] on device random
each step {
    y = map noise(x) per m
    t = broadcast x over a from 0
    z = map noise(t) per m, k
    u = map hiss(x)
    v = map hiss(y) per k, m
    output y, z, u, v
}"""
MEMBERS = """ensemble m = 2
axis data = 2
input g : tree per m partial data
input p : tree per m, data
each step {
    y = reduce g over data by mean
    z = reduce y across m by mean
    q = broadcast p over data from 1
    output y, z, q
}"""
LOADS = """axis data = 2
source s : bytes
fn sure(bytes) -> u8[4], i32 on host
fn decode(bytes) -> u8[4], i32 on host
fn halve(u8[4]) -> f32[4] on host
fn lighten(u8[4]) -> u8[4] on device elementwise
fn twice(f32[4]) -> f32[4] on device elementwise
each step {
    raw, n = load s batch 4 split data visit exactly_once seed 3 tail pad { prefetch = 2, cores = 2 }
    x, label = map decode(raw) { on_error = skip }
    h = map halve(x)
    t = map twice(h)
    y = map lighten(x)
    output label, y, n, t
}
phase test {
    raw, n = load s batch 6 visit at_most_once seed 0 tail drop { device_prefetch = 1 }
    x, label = map sure(raw)
    output label, x, n
}
phase stops {
    raw = load s batch 4 split data visit exactly_once seed 5 { on_failure = continue }
    x, label = map decode(raw)
    output label
}"""
SHARED = """ensemble m = 2
source s : bytes
fn sure(bytes) -> u8[4], i32 on host
fn decode(bytes) -> u8[4], i32 on host
fn flip(u8[4]) -> u8[4] on host random
fn noise(u8[4]) -> u8[4] on device random
each step {{
    raw, n = load s batch 4 visit exactly_once seed 9
    x, label = map sure(raw)
    {share}
    {share_of_labels}
    y = map flip(x) per m
    z = map noise(y) per m
    output label, y, z, n
}}
phase stops {{
    raw = load s batch 4 visit exactly_once seed 9
    x, label = map decode(raw)
    {share}
    output x
}}
phase skips {{
    raw, n = load s batch 4 visit exactly_once seed 9
    x, label = map decode(raw) {{ on_error = skip }}
    {share}
    output x, n
}}"""
CLOCKS = """ensemble m = 2
source s : bytes
source other : bytes
fn sure(bytes) -> u8[4], i32 on host
each step {
    raw = load s batch [4, 2] over m visit exactly_once seed 1
    x, label = map sure(raw)
    output label, x
}
phase both {
    raw = load s batch 4 per m visit exactly_once seed 1
    more = load other batch 4 per m visit at_least_once seed 2
    x, label = map sure(raw)
    y, second = map sure(more)
    output label, second
}"""
TREES: dict[str, Tree] = dict.fromkeys(("p", "g", "w", "m", "w0", "c"), SMALL)
HALVES: dict[str, Tree] = dict.fromkeys(TREES, HALF)
INPUT = (None, "")  # passes of plans that load


def _sums(name: str, first: str, mean: str, shapes: Mapping[str, Tree]) -> Plan:
    return Plan(name, COLLECTIVES.format(sum=first, mean=mean), shapes)


def _sharded(name: str, options: str = "", gather: str = "") -> Plan:
    return Plan(name, SHARDED.format(options=options, options_of_gather=gather), TREES)


def _elastic(options: str, eta: str = "0.05", shapes: Mapping[str, Tree] = TREES) -> Plan:
    text = ELASTIC.format(eta=eta, options=options)
    return Plan(f"elastic_{eta.partition('.')[2] or eta}", text, shapes)


def _exchange(name: str, axes: str, names: str, how: str, options: str = "") -> Plan:
    text = EXCHANGE.format(axes=axes, names=names, how=how, options=options)
    return Plan(f"exchange_{name}", text, TREES, passes=(None, "place{how=sharded}"))


def _shared(design: str) -> Plan:
    share = f"x = share x over m via {design} {{ on_failure = continue }}" if design else ""
    labels = share.replace("x = share x", "label = share label")  # of one load: shared by one design
    name = f"shared_{design.partition('(')[0] or 'chosen'}"
    return Plan(name, SHARED.format(share=share, share_of_labels=labels), backends=("jax",), passes=INPUT)


GRID = "axis r = 2\naxis a = 2"
PLANS = (
    _sums("sums", "bucket = 16", "overlap = backward", TREES),
    _sums("narrow", "wire = bf16", "wire = f16, accumulate = f32", TREES),
    _sums("half", "accumulate = f32", "wire = bf16", HALVES),
    Plan("integers", INTEGERS, {"g": MIXED}),
    Plan("levels", LEVELS, TREES),
    Plan("machine", MACHINE, {"g": LARGE, "p": LARGE}, passes=(None,), machine=LEVELS_OF_8),
    _sharded("sharded", "{ bucket = 16 }"),
    _sharded(
        "sharded_narrow", "via ring { wire = bf16, chunk = 4 }", "via ring { prefetch = 2, wire = bf16 }"
    ),
    Plan("cuts", CUTS),
    Plan("moves", MOVES),
    Plan("calls", CALLS, backends=("jax",)),
    Plan("draws", DRAWS, backends=("jax",)),
    Plan("members", MEMBERS, {"g": SMALL, "p": SMALL}),
    _elastic("{ bucket = 16 }", eta="eta"),
    _elastic("{ wire = bf16 }", shapes=HALVES),
    _exchange("all", "axis a = 4", "a", "mean", "{ chunk = 16 }"),
    _exchange("owners", GRID, "r, a", "sum", "via parameter_server(owners = 2)"),
    _exchange("within", GRID, "r, a", "mean", "via parameter_server(within = r) { wire = bf16 }"),
    Plan("loads", LOADS, backends=("jax",), passes=INPUT),
    *map(_shared, ("", "all_shared", "single_broadcast(readers = 1)", "multi_broadcast(readers = 2)")),
    _shared("duplicate"),
    Plan("clocks", CLOCKS, backends=("jax",), passes=INPUT),
)


@dataclasses.dataclass(frozen=True)
class Base:
    """A compiled schedule, which is edited. compiler: compiles its plan for other shapes."""

    name: str
    schedule: Any
    functions: Mapping[str, Callable[..., Any]]
    compiler: Callable[[Mapping[str, Tree]], Any]

    def compiled_for(self, shapes: Mapping[str, Tree]) -> Base:
        """The same plan, compiled by the same passes for other shapes of its trees."""
        name = f"{self.name} for {zlib.crc32(repr(shapes).encode()):08x}"
        return dataclasses.replace(self, name=name, schedule=self.compiler(shapes))

    def shapes_of(self, schedule: Any) -> Mapping[str, Tree]:
        """The shapes of the trees that the plan of a schedule declares, from its origin."""
        entry = {*schedule.inputs, *schedule.states}
        values = [value for value in schedule.origin.values if value.kind == "tree" and value.id in entry]
        return {name_of(value.id): _tree(value.uncut) for value in values}


def _tree(leaves: Sequence[Any]) -> Tree:
    """Leaves as nested dicts of their shapes."""
    tree: dict[str, Any] = {}
    for array in leaves:
        *folders, name = array.path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf(*array.shape, dtype=str(array.dtype))
    return tree


def _named(plan: Plan) -> dict[str, Tree]:
    """The shapes of the trees that a plan declares."""
    return {name: tree for name, tree in plan.shapes.items() if f" {name} " in plan.body.partition("{")[0]}


def bases(plans: tuple[Plan, ...] = PLANS) -> Iterator[Base]:
    """The schedule of every plan, for each of its backends and pipelines."""
    for plan in plans:
        machine = None
        if plan.machine:
            levels = [
                Level(name, count, 1e-6 * 10**index, 1e9) for index, (name, count) in enumerate(plan.machine)
            ]
            machine = Topology("edited", tuple(levels))
        for backend in plan.backends:
            for passes in plan.passes:
                compiler = functools.partial(_compiled, plan, backend, passes, machine)
                schedule = compiler(_named(plan))
                functions = {fn.name: FUNCTIONS[fn.name] for fn in schedule.fns if fn.name in FUNCTIONS}
                yield Base(f"{plan.name}/{backend}/{passes}", schedule, functions, compiler)


def _compiled(
    plan: Plan,
    backend: Literal["jax", "mpi"],
    passes: str | None,
    machine: Topology | None,
    shapes: Mapping[str, Tree],
) -> Any:
    text = f"plan {plan.name}\n{plan.body}\n"
    loaded = commplan.loads(text, f"{plan.name}.plan")
    return loaded.compile(shapes=shapes, passes=passes, backend=backend, topology=machine).schedule
