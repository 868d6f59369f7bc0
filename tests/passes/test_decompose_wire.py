"""decompose and wire: the ops that a hierarchy and a narrow wire become."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from support.byhand import HERE, Maker, compiled, reduce_plan, sharded_plan, tree
from support.oracle import Oracle

from commplan.compiler import compile_plan
from commplan.cost.schedule.prediction import predict
from commplan.cost.schedule.predictor import Predictor
from commplan.ir import plan as graph
from commplan.ir.schedule import Cast, Collective, Leaf, LocalSum, Op, Schedule
from commplan.ir.types import ArrayType, DType
from commplan.passes.pipeline.manager import PassRecord, Pipeline
from commplan.topology import Level, Topology
from commplan.verify import verify

TWO = graph.Algorithm("hierarchical", (graph.Arg("gpu"), graph.Arg("node")))
GIVEN = tree(w=(3, 3), b=(2,))  # 11 elements


def step(schedule: Schedule) -> tuple[Op, ...]:
    return schedule.phase(schedule.phases[-1].name).ops


def moves(schedule: Schedule) -> list[tuple[str, tuple[str, ...], int]]:
    return [(op.kind, op.axes, op.nbytes) for op in step(schedule) if isinstance(op, Collective)]


def test_a_sum_goes_up_and_down_the_levels() -> None:
    schedule = compiled(reduce_plan("sum", TWO, node=3, gpu=4), "bucket,decompose", grads=GIVEN)
    assert moves(schedule) == [
        ("reduce_scatter", ("gpu",), 48),  # 11 elements, padded to 12
        ("all_reduce", ("node",), 12),
        ("all_gather", ("gpu",), 12),
    ]
    assert "reduce_scatter gpu, all_reduce node, all_gather gpu" in schedule.choices[-1].what
    assert "via hierarchical(gpu, node)" in schedule.choices[-1].why


def test_three_levels() -> None:
    via = graph.Algorithm("hierarchical", (graph.Arg("c"), graph.Arg("b"), graph.Arg("a")))
    schedule = compiled(reduce_plan("sum", via, a=2, b=2, c=2), "bucket,decompose", grads=GIVEN)
    assert [(kind, axes) for kind, axes, _ in moves(schedule)] == [
        ("reduce_scatter", ("c",)), ("reduce_scatter", ("b",)), ("all_reduce", ("a",)),
        ("all_gather", ("b",)), ("all_gather", ("c",)),
    ]  # fmt: skip


def test_algorithms_of_levels() -> None:
    via = graph.Algorithm("hierarchical", (graph.Arg("native", "gpu"), graph.Arg("ring", "node")))
    schedule = compiled(reduce_plan("sum", via, node=2, gpu=2), "bucket,decompose", grads=GIVEN)
    ops = [op for op in step(schedule) if isinstance(op, Collective)]
    assert [op.algorithm.name for op in ops] == ["native", "ring", "native"]


def test_a_maximum_goes_level_by_level() -> None:
    schedule = compiled(reduce_plan("max", TWO, node=2, gpu=4), "bucket,decompose", grads=GIVEN)
    assert moves(schedule) == [("all_reduce", ("gpu",), 44), ("all_reduce", ("node",), 44)]


@pytest.mark.parametrize(("root", "places"), [(0, (0, 0)), (3, (0, 3)), (5, (1, 1)), (7, (1, 3))])
def test_a_broadcast_goes_from_outside_in(root: int, places: tuple[int, int]) -> None:
    maker = Maker(node=2, gpu=4)
    params = maker.input("params", per="node gpu")
    maker.value("params.1")
    maker.phase(
        "start",
        graph.Broadcast("params.1", params, ("node", "gpu"), root, HERE, via=TWO),
        outputs=("params.1",),
    )
    schedule = compiled(maker.plan(), "bucket,decompose", params=GIVEN)
    broadcasts = [(op.axes, op.root) for op in step(schedule) if isinstance(op, Collective)]
    assert broadcasts == [(("node",), places[0]), (("gpu",), places[1])]


def test_a_hierarchy_of_one_level_is_its_algorithm() -> None:
    via = graph.Algorithm("hierarchical", (graph.Arg("ring", "data"),))
    schedule = compiled(reduce_plan("sum", via, data=4), "bucket,decompose", grads=GIVEN)
    (collective,) = [op for op in step(schedule) if isinstance(op, Collective)]
    assert (collective.kind, collective.algorithm.name) == ("all_reduce", "ring")


def test_decompose_packs_what_bucket_has_not() -> None:
    schedule = compiled(reduce_plan("sum", TWO, node=3, gpu=4), "decompose", grads=GIVEN)
    assert len(moves(schedule)) == 3


def hinted(wire: str | None, accumulate: str | None, **more: Any) -> graph.Hints:
    return graph.Hints(
        wire=DType(wire) if wire else None, accumulate=DType(accumulate) if accumulate else None, **more
    )


def test_bf16_on_the_wire_is_added_in_f32() -> None:
    hints = hinted("bf16", "f32", bucket=1000)
    schedule = compiled(reduce_plan("mean", hints=hints, data=4), "bucket,wire", grads=GIVEN)
    names = [op.kind if isinstance(op, Collective) else type(op).__name__ for op in step(schedule)]
    assert names == [
        "Pack", "Cast", "all_to_all", "Cast", "LocalSum", "Scale", "Cast", "all_gather", "Cast", "Unpack",
    ]  # fmt: skip
    casts = [op.dtype for op in step(schedule) if isinstance(op, Cast)]
    assert casts == [DType.BF16, DType.F32, DType.BF16, DType.F32]
    assert moves(schedule) == [("all_to_all", ("data",), 24), ("all_gather", ("data",), 6)]
    (total,) = [op for op in step(schedule) if isinstance(op, LocalSum)]
    assert total.ways == 4
    remaining = [op.hints for op in step(schedule) if isinstance(op, Collective)]
    assert remaining == [graph.Hints(bucket=1000)] * 2
    assert "a backend's own all_reduce of bf16 would add in bf16" in schedule.choices[-1].why


def test_bf16_sums_of_bf16_values_in_f32() -> None:
    leaves = (Leaf("w", (8,), DType.BF16),)
    schedule = compiled(reduce_plan("sum", hints=hinted("bf16", "f32"), data=4), "bucket,wire", grads=leaves)
    casts = [op.dtype for op in step(schedule) if isinstance(op, Cast)]
    assert casts == [DType.F32, DType.BF16, DType.BF16]
    values = {v.id: v for v in schedule.phase("step").values}
    assert values["grads.1"].leaves[0].dtype is DType.BF16


def test_sums_in_the_wire_type_are_the_backends_own() -> None:
    schedule = compiled(reduce_plan("sum", hints=hinted("bf16", "bf16"), data=4), "bucket,wire", grads=GIVEN)
    assert moves(schedule) == [("all_reduce", ("data",), 22)]


def test_a_wire_alone_adds_in_the_values_own_type() -> None:
    schedule = compiled(reduce_plan("sum", hints=hinted("bf16", None), data=4), "bucket,wire", grads=GIVEN)
    assert [kind for kind, _, _ in moves(schedule)] == ["all_to_all", "all_gather"]


def test_maxima_need_no_wider_type() -> None:
    schedule = compiled(reduce_plan("max", hints=hinted("bf16", None), data=4), "bucket,wire", grads=GIVEN)
    assert moves(schedule) == [("all_reduce", ("data",), 22)]
    assert "nothing is added" in schedule.choices[-1].why


def test_whole_numbers_travel_as_they_are() -> None:
    leaves = (Leaf("n", (8,), DType.I32), Leaf("w", (8,), DType.F32))
    schedule = compiled(reduce_plan("sum", hints=hinted("bf16", "f32"), data=4), "bucket,wire", grads=leaves)
    assert [(kind, size) for kind, _, size in moves(schedule)] == [
        ("all_to_all", 16), ("all_gather", 4), ("all_reduce", 32),
    ]  # fmt: skip


def test_scatter_adds_in_the_declared_type() -> None:
    plan = sharded_plan(4)
    stages = plan.phases[1].stages
    changed = tuple(
        msgspec.structs.replace(s, hints=hinted("bf16", "f32" if isinstance(s, graph.Scatter) else None))
        if isinstance(s, graph.Scatter | graph.Gather)
        else s
        for s in stages
    )
    phases = (plan.phases[0], msgspec.structs.replace(plan.phases[1], stages=changed))
    schedule = compiled(
        msgspec.structs.replace(plan, phases=phases), "bucket,wire", params=GIVEN, grads=GIVEN
    )
    assert [kind for kind, _, _ in moves(schedule)] == ["all_to_all", "all_gather"]
    assert all(op.dtype is DType.BF16 for op in step(schedule) if isinstance(op, Collective))


def test_a_hierarchy_on_a_narrow_wire() -> None:
    plan = reduce_plan("sum", TWO, hinted("bf16", "f32"), node=3, gpu=4)
    schedule = compiled(plan, "bucket,decompose,wire", grads=GIVEN)
    assert [(kind, axes) for kind, axes, _ in moves(schedule)] == [
        ("all_to_all", ("gpu",)),
        ("all_to_all", ("node",)), ("all_gather", ("node",)),
        ("all_gather", ("gpu",)),
    ]  # fmt: skip


@pytest.mark.parametrize(("wire", "add"), [("bf16", "f32"), ("bf16", "bf16"), ("f32", "f32")])
def test_levels_are_weighed_by_what_travels(wire: str, add: str) -> None:
    """Left to choose, the compiler takes no longer than with the hierarchy that the plan could have named."""
    machine = Topology("pod", (Level("gpu", 8, 2e-6, 450e9), Level("node", 8, 5e-6, 50e9)))
    times: list[float] = []
    for via in (None, TWO):
        plan = reduce_plan("sum", via, hinted(wire, add), node=8, gpu=8)
        schedule = compile_plan(plan, {"grads": tree(w=(1024, 1024))}, topology=machine)
        times.append(predict(schedule, Predictor(machine, schedule.axes)).phases[0].seconds)
    assert times[0] <= times[1] * 1.01


@pytest.mark.parametrize(("dtype", "wire", "accumulate"), [("bf16", None, "f16"), ("f16", "bf16", "f32")])
@pytest.mark.parametrize("passes", [None, "", "wire", "rates,decompose,overlap"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_nothing_is_added_over_one_rank(
    op: str, passes: str | None, dtype: str, wire: str | None, accumulate: str
) -> None:
    plan = reduce_plan(op, hints=hinted(wire, accumulate), data=1)
    schedule = compiled(plan, passes, grads=(Leaf("w", (3,), DType(dtype)),))
    casts = [op.dtype for op in schedule.phases[0].ops if isinstance(op, Cast)]
    assert casts == ([] if wire is None else [DType(wire), DType(dtype)])


def test_a_pipeline_without_wire_writes_out_sums_all_the_same() -> None:
    plan = reduce_plan("mean", hints=hinted("bf16", "f32"), data=4)
    schedule = compiled(plan, "rates,decompose,overlap", grads=GIVEN)
    assert schedule.pipeline == "lower,rates,decompose,wire,overlap"
    assert {kind for kind, _, _ in moves(schedule)} == {"all_to_all", "all_gather"}


@pytest.mark.parametrize("accumulate", ["f32", "bf16", None])
def test_sums_that_ignore_the_wire_type_are_refused(accumulate: str | None) -> None:
    records: list[PassRecord] = []
    plan = reduce_plan("sum", hints=hinted("bf16", accumulate), data=4)
    after = compile_plan(plan, {"grads": GIVEN}, passes="", observer=records.append)
    assert [record.name for record in records] == ["lower", "wire"]
    assert {problem.code for problem in verify(records[0].after)} == {"CP0766"}
    assert not verify(after)


def test_wire_packs_what_bucket_has_not() -> None:
    maker = Maker(data=3)
    x = maker.input("x", ArrayType(DType.F32, (4,)), per="data")
    maker.value("x.1", ArrayType(DType.F32, (4,)))
    hints = hinted("f16", None)
    maker.phase("start", graph.Broadcast("x.1", x, ("data",), 2, HERE, hints=hints), outputs=("x.1",))
    schedule = compiled(maker.plan(), "wire")
    assert moves(schedule) == [("broadcast", ("data",), 8)]


@pytest.mark.parametrize(
    ("dtype", "wire", "accumulate", "expected"),
    [
        ("f32", "bf16", "f32", "bf16 f32"),
        ("f32", "bf16", None, "bf16 f32"),
        ("f32", None, None, "f32 f32"),
        ("f32", "bf16", "bf16", "bf16 bf16"),
        ("f64", "f32", "f32", "f32 f32"),
        ("bf16", "bf16", "f32", "bf16 f32"),
        ("bf16", "f32", None, "f32 f32"),  # never narrower than what travels
        ("f32", None, "f64", "f32 f64"),
        ("f32", None, "bf16", "f32 f32"),  # never narrower than what travels
        ("f16", "bf16", None, "bf16 f16"),
        ("i32", "bf16", "f32", "i32 i32"),
    ],
)
def test_the_types_of_wire_and_sum(
    dtype: str, wire: str | None, accumulate: str | None, expected: str
) -> None:
    assert " ".join(hinted(wire, accumulate).wire_types(DType(dtype))) == expected


def answer(schedule: Schedule, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The oracle's result for numbers that differ between ranks."""
    shape = (*ranks, 11)
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    grads = {"b": numbers[..., :2], "w": numbers[..., 2:].reshape((*ranks, 3, 3))}
    return Oracle(schedule).phase("step", {}, {"grads": grads})[0]["grads"]


def altered(schedule: Schedule, change: Any) -> Schedule:
    phase = schedule.phases[0]
    ops, values = change(list(phase.ops), list(phase.values))
    phase = msgspec.structs.replace(phase, ops=tuple(ops), values=tuple(values))
    return msgspec.structs.replace(schedule, phases=(phase,))


def test_a_buffer_between_collectives_is_padded_and_trimmed() -> None:
    before = compiled(reduce_plan("sum", TWO, node=2, gpu=4), "bucket,decompose", grads=GIVEN)

    def narrow(ops: list[Any], values: list[Any]) -> Any:
        place = next(i for i, op in enumerate(ops) if isinstance(op, Collective) and op.axes == ("node",))
        ops[place] = msgspec.structs.replace(ops[place], hints=hinted("f16", "f32"))  # 3 elements, 2 ranks
        return ops, values

    edited = msgspec.structs.replace(altered(before, narrow), origin=None)  # its plan does not ask for it
    after = Pipeline.parse("wire").run(edited)
    assert [(kind, size) for kind, axes, size in moves(after) if axes == ("node",)] == [
        ("all_to_all", 8), ("all_gather", 4),
    ]  # fmt: skip
    for name, expected in answer(before, (2, 4)).items():
        np.testing.assert_allclose(answer(after, (2, 4))[name], expected, rtol=1e-3)


def test_a_result_that_is_read_whole_is_trimmed() -> None:
    before = compiled(reduce_plan("sum", TWO, node=2, gpu=4), "bucket", grads=GIVEN)

    def read_whole(ops: list[Any], values: list[Any]) -> Any:
        place = next(i for i, op in enumerate(ops) if isinstance(op, Collective))
        result = ops[place].result
        output_value = next(v for v in values if v.id == result)
        ops[place] = msgspec.structs.replace(ops[place], result="whole.0")
        ops.insert(place + 1, Cast(result, "whole.0", DType.F32, HERE))
        return ops, [*values, msgspec.structs.replace(output_value, id="whole.0")]

    sound = altered(before, read_whole)
    after = Pipeline.parse("decompose").run(sound)
    assert [kind for kind, _, _ in moves(after)] == ["reduce_scatter", "all_reduce", "all_gather"]
    for name, expected in answer(sound, (2, 4)).items():
        np.testing.assert_array_equal(answer(after, (2, 4))[name], expected)
