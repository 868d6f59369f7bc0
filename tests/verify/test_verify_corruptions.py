"""The verifier: sound schedules pass, each targeted corruption is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byhand import F32, HERE, TREE, Maker, compiled, ensemble_plan, reduce_plan, sharded_plan, tree
from support.random_case import make_case

import commplan
from commplan.ir import plan as graph
from commplan.ir import schedule as ir
from commplan.ir.types import DType, Placement
from commplan.verify import verify

GIVEN = tree(w=(3, 3), b=(2,))
WIRE = graph.Hints(wire=DType.BF16, accumulate=DType.F32)
OWNED = graph.Algorithm("parameter_server", (graph.Arg(3, "owners"),))
LOADED = graph.Algorithm("multi_broadcast", (graph.Arg(2, "readers"),))


def elastic_plan(mode: Any = "sync") -> graph.Plan:
    maker = Maker(worker=2)
    maker.axis("hub", graph.AxisKind.SERVER, 1)
    params, center, eta = maker.input("params", per="worker"), maker.state("center"), maker.input("eta", F32)
    maker.value("pull.0", per="worker")
    maker.value("center.1")
    stage = graph.ElasticStage("pull.0", "center.1", params, center, ("worker",), mode, eta, 0.1, HERE)
    maker.phase("step", stage, outputs=("pull.0",), updates=("center.1",))
    return maker.plan()


def exchange_plan() -> graph.Plan:
    maker = Maker(worker=2)
    grads, weights = maker.input("grads", partial="worker"), maker.state("weights")
    maker.fn("sgd", (TREE, TREE), (TREE,), "device", elementwise=True)
    maker.value("weights.1")
    stage = graph.ExchangeStage(
        ("weights.1",), grads, (weights,), "sgd", ("worker",), graph.Reduction("mean"), HERE
    )
    maker.phase("step", stage, outputs=("weights.1",), updates=("weights.1",))
    return maker.plan()


def broadcast_plan() -> graph.Plan:
    maker = Maker(data=4)
    maker.input("x", per="data")
    maker.value("x.1")
    maker.phase("step", graph.Broadcast("x.1", "x.0", ("data",), 3, HERE), outputs=("x.1",))
    return maker.plan()


SOUND: dict[str, ir.Schedule] = {
    "reduce": compiled(reduce_plan("mean"), None, grads=GIVEN),
    "plain": compiled(reduce_plan("mean"), "", grads=GIVEN),
    "wire": compiled(reduce_plan("mean", hints=WIRE), None, grads=GIVEN),
    "sharded": compiled(sharded_plan(), None, params=GIVEN, grads=GIVEN),
    "rows": compiled(sharded_plan(), "", params=GIVEN, grads=GIVEN),
    "ensemble": compiled(ensemble_plan(via=LOADED), None),
    "elastic": compiled(elastic_plan(), "", params=GIVEN, center=GIVEN),
    "exchange": compiled(exchange_plan(), "", grads=GIVEN, weights=GIVEN),
    "broadcast": compiled(broadcast_plan(), "", x=GIVEN),
}

Change = Callable[[ir.Schedule], ir.Schedule]


def replace(value: Any, /, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


def whole(**changes: Any) -> Change:
    return lambda schedule: replace(schedule, **changes)


def phase(**changes: Any) -> Change:
    def change(schedule: ir.Schedule) -> ir.Schedule:
        last = schedule.phases[-1]
        values = {k: v(last) if callable(v) else v for k, v in changes.items()}
        return replace(schedule, phases=(*schedule.phases[:-1], replace(last, **values)))

    return change


def op(kind: type[Any], nth: int = 0, /, **changes: Any) -> Change:
    """Change fields of the `nth` op of `kind` in the last phase."""

    def ops(of: ir.Phase) -> tuple[ir.Op, ...]:
        places = [i for i, each in enumerate(of.ops) if isinstance(each, kind)]
        place = places[nth]
        values = {k: v(of.ops[place]) if callable(v) else v for k, v in changes.items()}
        return (*of.ops[:place], replace(of.ops[place], **values), *of.ops[place + 1 :])

    return phase(ops=ops)


def value(ref: str, /, **changes: Any) -> Change:
    def change(schedule: ir.Schedule) -> ir.Schedule:
        def fix(values: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
            return tuple(replace(v, **changes) if v.id == ref else v for v in values)

        phases = tuple(replace(p, values=fix(p.values)) for p in schedule.phases)
        return replace(schedule, entry=fix(schedule.entry), phases=phases)

    return change


def values(dtype: DType) -> Change:
    """Every leaf has another type."""

    def fix(of: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        return tuple(replace(v, leaves=tuple(replace(x, dtype=dtype) for x in v.leaves)) for v in of)

    def change(schedule: ir.Schedule) -> ir.Schedule:
        phases = tuple(replace(p, values=fix(p.values)) for p in schedule.phases)
        return replace(schedule, entry=fix(schedule.entry), phases=phases)

    return change


def fn(**changes: Any) -> Change:
    return lambda schedule: replace(schedule, fns=tuple(replace(each, **changes) for each in schedule.fns))


def part(**changes: Any) -> Callable[[Any], tuple[ir.Part, ...]]:
    return lambda pack: (replace(pack.parts[0], **changes), *pack.parts[1:])


def leaf(shape: tuple[int, ...], dtype: DType = DType.F32, path: str = "") -> tuple[ir.Leaf, ...]:
    return (ir.Leaf(path, shape, dtype),)


def spread(*counts: int) -> Change:
    """One axis over levels of `counts` places, with a hierarchy that lists two levels."""
    places = tuple(ir.Spread(name, count) for name, count in zip(("host", "rack"), counts, strict=False))

    def change(schedule: ir.Schedule) -> ir.Schedule:
        axes = tuple(replace(axis, levels=places) for axis in schedule.axes)
        return levels("ring", "ring", axes)(schedule)

    return change


def levels(inner: str, outer: str, axes: tuple[ir.Axis, ...] | None = None) -> Change:
    """A hierarchy over the levels of the axis `data`: two hosts in each of two racks, unless `axes` says."""
    both = graph.Algorithm("hierarchical", (graph.Arg(inner, "host"), graph.Arg(outer, "rack")))
    mesh_axes = axes or (replace(AXIS, levels=(ir.Spread("host", 2), ir.Spread("rack", 2))),)
    return lambda schedule: op(ir.Collective, algorithm=both)(replace(schedule, axes=mesh_axes))


INTS = tuple(replace(one, dtype=DType.I32) for one in GIVEN)
PER, PARTIAL = Placement(per=("data",)), Placement(partial=("data",))
STACKED = Placement(stacked=("data",))
AXIS = ir.Axis("data", graph.AxisKind.REPLICA, 4)
CORRUPTIONS: list[tuple[str, Change, str, str]] = [
    # names and definitions
    ("reduce", whole(schema=999), "CP0735", "schema version 999"),
    ("reduce", whole(axes=(AXIS, AXIS)), "CP0730", "two axes are called `data`"),
    ("reduce", lambda s: replace(s, phases=s.phases * 2), "CP0730", "two phases are called `step`"),
    ("ensemble", lambda s: replace(s, sources=s.sources * 2), "CP0730", "two sources are called `images`"),
    ("ensemble", lambda s: replace(s, fns=s.fns * 2), "CP0730", "two functions are called `decode`"),
    ("reduce", whole(entry=()), "CP0730", "the values on entry are not the inputs and states"),
    ("reduce", phase(ops=lambda p: p.ops[1:]), "CP0730", "declared but nothing makes it"),
    ("reduce", phase(ops=lambda p: (*p.ops, p.ops[-1])), "CP0730", "`grads.1` is made twice"),
    ("reduce", phase(values=lambda p: p.values[1:]), "CP0730", "is made but not declared"),
    ("reduce", phase(values=lambda p: (*p.values, p.values[0])), "CP0730", "two values are called"),
    ("reduce", op(ir.Scale, operand="grads.1/summ"), "CP0730", "did you mean `grads.1/sum`?"),
    ("reduce", phase(inputs=()), "CP0730", "reads `grads.0`, which the phase does not have"),
    ("reduce", phase(inputs=("grads.0", "x.0")), "CP0730", "reads `x.0`, which is not an input"),
    ("reduce", phase(states=("x.0",)), "CP0730", "reads `x.0`, which is not a state"),
    ("reduce", phase(outputs=(ir.Binding("g", "g.9"),)), "CP0730", "`g` is bound to `g.9`"),
    ("reduce", phase(outputs=lambda p: p.outputs * 2), "CP0730", "two outputs are called `grads`"),
    ("reduce", phase(updates=(ir.Binding("g", "grads.1"),)), "CP0730", "`g` is updated, but is not a state"),
    ("ensemble", op(ir.Map, fn="encode"), "CP0730", "there is no function `encode`"),
    ("ensemble", op(ir.Read, source="videos"), "CP0730", "there is no source `videos`"),
    ("exchange", op(ir.Exchange, fn="adam"), "CP0730", "there is no function `adam`"),
    ("ensemble", phase(outputs=(ir.Binding("batch", "batch.0"),)), "CP0730", "depend on sources alone"),
    ("reduce", phase(takes=(ir.Binding("g", "grads.0", source_only=True),)), "CP0730", "on sources alone"),
    # order
    ("reduce", phase(ops=lambda p: p.ops[::-1]), "CP0733", "made later: a cycle or a wrong order"),
    ("reduce", op(ir.Collective, after=("grads.1",)), "CP0733", "comes after `grads.1`, which is made later"),
    ("reduce", op(ir.Collective, after=("grads.1/sum/b0",)), "CP0733", "comes after itself: a cycle"),
    ("reduce", op(ir.Collective, after=("nothing.1",)), "CP0730", "comes after `nothing.1`"),
    # axes and placements
    ("reduce", whole(axes=()), "CP0734", "axis `data`, which the plan does not have"),
    ("reduce", whole(axes=(replace(AXIS, size=0),)), "CP0734", "axis `data` has size 0"),
    ("reduce", value("grads.1", placement=Placement(per=("dta",))), "CP0734", "is placed over axis `dta`"),
    ("reduce", value("grads.0", placement=Placement(per=("data",), partial=("data",))), "CP0734", "twice"),
    ("reduce", value("grads.1", placement=PARTIAL), "CP0734", "output `grads` is partial"),
    ("reduce", value("grads.1", placement=Placement(server="hub")), "CP0734", "which is not a server"),
    ("elastic", value("pull.0", placement=Placement(per=("hub",))), "CP0734", "is a server and not an axis"),
    ("reduce", op(ir.Collective, axes=()), "CP0734", "a collective over no axis"),
    ("reduce", op(ir.Collective, axes=("dta",)), "CP0734", "there is no axis `dta`"),
    ("reduce", op(ir.Collective, axes=("data", "data")), "CP0734", "an axis is named twice"),
    ("elastic", op(ir.Collective, axes=("hub",)), "CP0734", "`hub` is a server and cannot be used here"),
    ("plain", value("grads.0", placement=Placement()), "CP0734", "`grads.0` is the same over `data` already"),
    ("plain", value("grads.1/sum", placement=PER), "CP0734", "`grads.1/sum` is per data, expected same"),
    ("sharded", value("grads.1/sum/b0", placement=Placement()), "CP0734", "is same, expected split data"),
    ("sharded", op(ir.Slice, axes=()), "CP0734", "is cut over no axis"),
    ("sharded", op(ir.Slice, axes=("dta",)), "CP0734", "there is no axis `dta`"),
    ("ensemble", op(ir.Share, axes=("data",)), "CP0734", "there is no axis `data`"),
    ("ensemble", value("pixels.0", placement=Placement(per=("member",))), "CP0734", "cannot be shared"),
    ("ensemble", value("raw.0", placement=Placement(split=("member",))), "CP0734", "member, expected same"),
    ("reduce", value("grads.1/sum/b0/pack", placement=PER), "CP0734", "data, expected partial data"),
    ("wire", value("grads.1/b0/swapped", placement=PARTIAL), "CP0734", "expected stacked data"),
    ("wire", value("grads.1/b0/shard", placement=STACKED), "CP0734", "expected split data"),
    ("sharded", op(ir.Slice, operand="grads.0"), "CP0734", "only a replicated value can be sliced"),
    ("sharded", op(ir.Map, operands=("shard.1", "grads.0", "adam.0")), "CP0734", "is a term of a sum"),
    ("rows", op(ir.Collective, 1, operand="grads.0"), "CP0734", "the last cut is gathered first"),
    # shapes
    ("reduce", value("grads.1", leaves=GIVEN[:1]), "CP0731", "`grads.1` has the leaves"),
    ("reduce", value("grads.0", leaves=leaf((-1,))), "CP0731", "has a negative dimension"),
    ("reduce", value("grads.0", leaves=leaf((1,)) * 2), "CP0730", "two paths are called ``"),
    ("reduce", value("grads.0", kind="array"), "CP0731", "is an array, but has 2 leaves"),
    ("reduce", value("grads.0", kind="flat", leaves=leaf((11,))), "CP0731", "enters the plan as flat"),
    ("reduce", value("grads.1/sum/b0", leaves=leaf((11, 1))), "CP0731", "is not one leaf of one dimension"),
    ("reduce", value("grads.1", whole=GIVEN), "CP0731", "has uncut leaves, but is not split"),
    ("sharded", value("shard.1", whole=leaf((99,))), "CP0731", "not have the shapes of its uncut leaves"),
    ("sharded", value("adam.2", leaves=leaf((3,)), whole=leaf((12,))), "CP0731", "state `adam` is updated"),
    ("reduce", op(ir.Pack, parts=part(leaf=5)), "CP0731", "has no leaf 5"),
    ("reduce", op(ir.Pack, parts=part(start=3)), "CP0731", "are not inside its row"),
    ("reduce", op(ir.Pack, parts=part(start=-1)), "CP0731", "are not inside its row"),
    ("reduce", op(ir.Pack, parts=part(size=0)), "CP0731", "are not inside its row"),
    ("reduce", op(ir.Pack, parts=part(offset=9)), "CP0731", "are not inside its row"),
    ("reduce", op(ir.Pack, parts=part(offset=1)), "CP0731", "two parts overlap"),
    ("reduce", op(ir.Pack, ways=3), "CP0735", "have no 3 equal rows"),
    ("reduce", op(ir.Pack, ways=0), "CP0735", "have no 0 equal rows"),
    ("reduce", value("grads.1/sum/b0/pack", kind="array"), "CP0731", "is packed, but is not flat"),
    ("reduce", op(ir.Unpack, parts=lambda o: o.parts[1:]), "CP0731", "is not unpacked exactly once"),
    ("reduce", op(ir.Unpack, parts=lambda o: o.parts * 2), "CP0731", "is not unpacked exactly once"),
    ("reduce", op(ir.Unpack, parts=part(value="grads.0")), "CP0731", "`grads.0` is not a flat buffer"),
    ("reduce", op(ir.Unpack, ways=0), "CP0735", "a buffer has no 0 rows"),
    ("reduce", op(ir.Unpack, parts=part(leaf=9)), "CP0731", "has no leaf 9"),
    ("plain", op(ir.Collective, kind="reduce_scatter"), "CP0731", "has the leaves"),
    ("plain", op(ir.Collective, kind="all_to_all", op=None), "CP0731", "an all_to_all moves flat buffers"),
    ("wire", op(ir.Collective, kind="all_gather"), "CP0731", "has the leaves"),
    ("wire", op(ir.LocalSum, ways=5), "CP0731", "is not a flat buffer of 5 rows"),
    ("wire", op(ir.LocalSum, ways=2), "CP0731", "has the leaves"),
    ("wire", op(ir.Cast, dtype=DType.F16), "CP0731", "has the leaves"),
    ("wire", value("grads.1/b0/swapped", leaves=leaf((13,), DType.BF16)), "CP0731", ", expected "),
    ("reduce", op(ir.Collective, kind="reduce_scatter"), "CP0731", "are no 4 equal rows"),
    ("rows", op(ir.Collective, 1, operand="params.0"), "CP0734", "the same over `data` already"),
    ("reduce", op(ir.Collective, operand="grads.0", nbytes=44), "CP0731", "`grads.1/sum/b0` is flat"),
    ("plain", op(ir.Scale, by="grads.0"), "CP0731", "expected a scalar"),
    ("sharded", op(ir.Map, operands=("shard.1",)), "CP0731", "`adam_update` has 3 operands, 1 are written"),
    ("ensemble", value("pixels.0", leaves=leaf((8, 5), DType.U8)), "CP0731", ", expected "),
    ("ensemble", value("batch.0", leaves=leaf((8, 6), DType.U8)), "CP0731", "records of `batch.0` are"),
    ("ensemble", value("batch.0", leaves=leaf((8, 6, 6, 3))), "CP0731", "`augment` takes u8[6, 6, 3]"),
    ("ensemble", value("raw.0", kind="tree"), "CP0731", "`raw.0` is tree, expected records"),
    ("ensemble", value("pixels.0", kind="array"), "CP0731", "`share` takes loaded values"),
    ("ensemble", value("raw.0", leaves=leaf((3,), DType.U8)), "CP0731", "does not hold 8 records"),
    ("elastic", value("pull.0", leaves=leaf((3,))), "CP0731", ", expected "),
    ("elastic", op(ir.Elastic, eta="params.0"), "CP0731", "expected a scalar"),
    ("elastic", op(ir.Update, delta="eta.0"), "CP0731", ", expected "),
    ("exchange", op(ir.Exchange, states=()), "CP0731", "0 states are exchanged for 1 results"),
    # bytes and dtypes
    ("reduce", op(ir.Collective, nbytes=1), "CP0732", "has 44 bytes, not 1"),
    ("reduce", op(ir.Collective, dtype=DType.BF16), "CP0732", "bf16 is not the widest type"),
    ("reduce", value("grads.0", leaves=INTS), "CP0732", "is packed"),
    ("reduce", value("grads.1/sum", leaves=INTS), "CP0732", "from"),
    # values permitted by an op
    ("reduce", phase(period=0), "CP0735", "has period 0"),
    ("reduce", op(ir.Collective, op=None), "CP0735", "all_reduce and op None cannot be combined"),
    ("reduce", op(ir.Collective, root=0), "CP0735", "all_reduce and root 0 cannot be combined"),
    ("broadcast", op(ir.Collective, root=4), "CP0735", "the root 4 is out of range: `data` has 4 ranks"),
    ("broadcast", op(ir.Collective, root=None), "CP0735", "broadcast and root None"),
    ("broadcast", op(ir.Collective, op="sum"), "CP0735", "broadcast and op sum"),
    ("reduce", op(ir.Collective, algorithm=graph.Algorithm("magic")), "CP0735", "no algorithm `magic`"),
    (
        "reduce", op(ir.Collective, algorithm=graph.Algorithm("hierarchical", (graph.Arg("x"),))), "CP0735",
        "hierarchical(x) does not list the axes data",
    ),
    # algorithms: they fit, and their programs satisfy the postcondition of the collective
    ("reduce", spread(4), "CP0735", "`data` is on host"),
    ("reduce", spread(3, 2), "CP0735", "the levels of `data` have 3 x 2 places for 4 ranks"),
    ("reduce", spread(0, 4), "CP0735", "have 0 x 4 places for 4 ranks"),
    ("reduce", spread(1, 3), "CP0734", "axis `data` has 4 ranks, its levels 1 x 3 places"),
    ("reduce", levels("magic", "ring"), "CP0601", "there is no algorithm `magic`"),
    ("reduce", levels("native", "scatter_gather"), "CP0739", "and `scatter_gather` does not carry it out"),
    ("reduce", op(ir.Collective, algorithm=graph.Algorithm("scatter_gather")), "CP0603", "carry out"),
    ("wire", op(ir.Collective, algorithm=graph.Algorithm("ring")), "CP0735", "has no chunk program"),
    ("reduce", op(ir.Collective, form="split"), "CP0735", "form `split` is for the mpi backend only"),
    ("reduce", op(ir.Collective, algorithm=graph.Algorithm("parameter_server")), "CP0735", "no algorithm"),
    ("reduce", op(ir.Collective, lane="canal"), "CP0735", "there is no lane `canal`"),
    ("reduce", op(ir.Scale, by=0.0), "CP0735", "is scaled by 0.0"),
    ("reduce", op(ir.Scale, by=float("inf")), "CP0735", "is scaled by inf"),
    ("ensemble", op(ir.Map, lane="device"), "CP0735", "is a host function, but runs on lane device"),
    ("ensemble", op(ir.Map, 1, random=False), "CP0735", "is a host function"),
    ("broadcast", op(ir.Collective, root=-1), "CP0735", "the root -1 is out of range"),
    ("ensemble", op(ir.Share, readers=5), "CP0735", "5 readers are more than the 4 members of `member`"),
    ("ensemble", op(ir.Share, readers=0), "CP0735", "0 readers are too few"),
    ("ensemble", op(ir.Read, batch=()), "CP0735", "cannot be read"),
    ("ensemble", op(ir.Read, batch=(0,)), "CP0735", "cannot be read"),
    ("ensemble", op(ir.Read, batch=(7,), split=("member",)), "CP0735", "a batch of 7 records cannot be"),
    ("ensemble", op(ir.Read, clock="member"), "CP0735", "1 batch size for the 4 members of `member`"),
    ("ensemble", op(ir.Read, tail="drop"), "CP0735", "`tail drop` leaves records out"),
    ("elastic", op(ir.Elastic, mode="async"), "CP0735", "has the wrong results"),
    ("elastic", op(ir.Elastic, mode="async"), "CP0734", "the center of `async` is on a server"),
    ("elastic", op(ir.Elastic, eta=5.0), "CP0735", "`sync` is unstable: eta * rho * p = 1, and it must be"),
    ("elastic", op(ir.Elastic, rho=-1.0), "CP0735", "`rho` is a positive number, found `-1`"),
    ("elastic", op(ir.Elastic, rho=1e-50), "CP0735", "`rho` is 0 in f32, found `1e-50`"),
    ("exchange", op(ir.Exchange, algorithm=OWNED), "CP0735", "3 owners are more than the 2 workers"),
    ("elastic", values(DType.I32), "CP0735", "elastic averaging needs a float type, and leaf `b`"),
    ("exchange", values(DType.I32), "CP0735", "a mean needs a float type, and leaf `b` of `grads` is i32"),
    ("plain", values(DType.BOOL), "CP0735", "leaf `b` of `grads` is bool, and truth values have no sum"),
    ("exchange", fn(random=True), "CP0735", "the update `sgd` may not be random"),
    ("exchange", fn(where="host"), "CP0735", "the update `sgd` must be elementwise and on the device"),
    ("exchange", fn(operands=(TREE,)), "CP0731", "`sgd` takes 1 value, found 2"),
]  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_schedules_pass(name: str) -> None:
    assert verify(SOUND[name]) == ()


@pytest.mark.parametrize(
    ("name", "change", "code", "reason"),
    CORRUPTIONS,
    ids=[f"{i}-{name}-{code}" for i, (name, _, code, _) in enumerate(CORRUPTIONS)],
)
def test_each_corruption_is_refused_with_its_reason(
    name: str, change: Change, code: str, reason: str
) -> None:
    corrupted = change(SOUND[name])
    assert corrupted != SOUND[name]
    problems = [(problem.code, problem.message) for problem in verify(corrupted)]
    assert any(c == code and reason in message for c, message in problems), problems


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, change, _, _ in CORRUPTIONS],
    ids=[f"{i}-{name}-{code}" for i, (name, _, code, _) in enumerate(CORRUPTIONS)],
)
def test_what_was_sound_before_hides_nothing(name: str, change: Change) -> None:
    corrupted = change(SOUND[name])
    assert verify(corrupted, SOUND[name]) == verify(corrupted)


def test_problems_know_their_place() -> None:
    problem = verify(op(ir.Collective, nbytes=1)(SOUND["reduce"]))[0]
    assert (problem.span, problem.file) == (HERE, "made.plan")


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_random_schedules_pass(seed: int) -> None:
    case = make_case(seed)
    plan = commplan.loads(case.text, "x.plan")
    sizes = {axis.name: case.sizes[axis.name] for axis in plan.graph.axes}
    program = plan.compile(axes=sizes, shapes=case.shapes, passes=case.pipeline)
    assert verify(program.schedule) == ()


@pytest.mark.parametrize("name", SOUND)
def test_an_axis_without_ranks_is_refused_and_nothing_divides_by_it(name: str) -> None:
    axes = tuple(replace(axis, size=0) for axis in SOUND[name].axes)
    assert {problem.code for problem in verify(replace(SOUND[name], axes=axes))} == {"CP0734"}


def test_a_hierarchy_without_levels_says_so() -> None:
    schedule = compiled(reduce_plan("sum"), "", grads=GIVEN)
    (phase,) = schedule.phases
    ops = tuple(
        msgspec.structs.replace(op, algorithm=graph.Algorithm("hierarchical"))
        if isinstance(op, ir.Collective)
        else op
        for op in phase.ops
    )
    phase = msgspec.structs.replace(phase, ops=ops)
    (problem,) = verify(msgspec.structs.replace(schedule, phases=(phase,)))
    assert problem.code == "CP0735"
    assert problem.message == "`hierarchical` leaves out `data`"
