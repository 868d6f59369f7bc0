"""Hand-made plan graphs: inputs of the compiler's tests, independent of the parser."""

from __future__ import annotations

from typing import Any

import msgspec

from commplan.compiler import compile_plan
from commplan.diagnostics import Span
from commplan.ir import plan as graph
from commplan.ir.schedule import Leaf, Schedule
from commplan.ir.types import ArrayType, BytesType, DType, Placement, RecordsType, TreeType

HERE = Span(1, 1, 1, 2)
TREE = TreeType()
F32 = ArrayType(DType.F32)


def tree(**shapes: tuple[int, ...]) -> tuple[Leaf, ...]:
    """Leaves of dtype f32 by path, in path order."""
    return tuple(Leaf(path, shape, DType.F32) for path, shape in sorted(shapes.items()))


def place(per: str = "", partial: str = "", split: str = "", server: str | None = None) -> Placement:
    return Placement(tuple(per.split()), tuple(partial.split()), tuple(split.split()), server)


class Maker:
    """Collects a plan: `maker.value(...)` for every value, stages given whole."""

    def __init__(self, **axes: int | None) -> None:
        self.axes = [graph.Axis(name, graph.AxisKind.REPLICA, size, HERE) for name, size in axes.items()]
        self.values: list[graph.Value] = []
        self.inputs: list[str] = []
        self.states: list[str] = []
        self.sources: list[graph.Source] = []
        self.fns: list[graph.Fn] = []
        self.phases: list[graph.Phase] = []

    def axis(self, name: str, kind: graph.AxisKind, size: int | None) -> None:
        self.axes.append(graph.Axis(name, kind, size, HERE))

    def value(self, ref: str, kind: Any = TREE, **placement: Any) -> str:
        self.values.append(graph.Value(ref, kind, place(**placement), HERE))
        return ref

    def input(self, name: str, kind: Any = TREE, **placement: Any) -> str:
        self.inputs.append(self.value(f"{name}.0", kind, **placement))
        return self.inputs[-1]

    def state(self, name: str, kind: Any = TREE, **placement: Any) -> str:
        self.states.append(self.value(f"{name}.0", kind, **placement))
        return self.states[-1]

    def fn(
        self, name: str, operands: tuple[Any, ...], results: tuple[Any, ...], where: Any, **flags: bool
    ) -> str:
        self.fns.append(graph.Fn(name, operands, results, where, HERE, **flags))
        return name

    def phase(
        self, name: str, *stages: graph.Stage, outputs: tuple[str, ...] = (), updates: tuple[str, ...] = ()
    ) -> None:
        kind: Any = name if name in ("start", "step") else "every" if name.startswith("every_") else "named"
        period = int(name.removeprefix("every_")) if kind == "every" else 1

        def bind(refs: tuple[str, ...]) -> tuple[graph.Binding, ...]:
            return tuple(graph.Binding(ref.rpartition(".")[0], ref) for ref in refs)

        self.phases.append(graph.Phase(name, kind, HERE, period, stages, bind(outputs), bind(updates)))

    def plan(self, name: str = "made") -> graph.Plan:
        return graph.Plan(
            name, tuple(self.axes), tuple(self.sources), tuple(self.fns), tuple(self.inputs),
            tuple(self.states), tuple(self.values), tuple(self.phases), "made.plan",
        )  # fmt: skip


def compiled(plan: graph.Plan, pipeline: str | None = None, **shapes: tuple[Leaf, ...]) -> Schedule:
    return compile_plan(plan, shapes, passes=pipeline)


def reduce_plan(
    op: str = "mean", via: graph.Algorithm | None = None, hints: graph.Hints = graph.NO_HINTS, **axes: int
) -> graph.Plan:
    """`grads = reduce grads over ALL by op`, all axes partial."""
    maker = Maker(**(axes or {"data": 4}))
    names = " ".join(axes or ("data",))
    grads = maker.input("grads", partial=names)
    maker.value("grads.1")
    reduction: Any = graph.Reduction(op)  # pyright: ignore[reportArgumentType]
    stage = graph.Reduce("grads.1", grads, tuple(names.split()), reduction, HERE, via=via, hints=hints)
    maker.phase("step", stage, outputs=("grads.1",))
    return maker.plan()


def sharded_plan(ranks: int = 4) -> graph.Plan:
    """slice, scatter, an elementwise update of a split state, gather."""
    maker = Maker(data=ranks)
    params, grads = maker.input("params"), maker.input("grads", partial="data")
    adam = maker.state("adam", split="data")
    maker.fn("adam_init", (TREE,), (TREE,), "device", elementwise=True)
    maker.fn("adam_update", (TREE, TREE, TREE), (TREE, TREE), "device", elementwise=True)
    for ref in ("shard.0", "adam.1", "shard.1", "grads.1", "shard.2", "adam.2"):
        maker.value(ref, split="data")
    maker.value("params.1")
    maker.phase(
        "start",
        graph.SliceStage("shard.0", params, ("data",), HERE),
        graph.MapStage(("adam.1",), "adam_init", ("shard.0",), HERE),
        updates=("adam.1",),
    )
    maker.phase(
        "step",
        graph.SliceStage("shard.1", params, ("data",), HERE),
        graph.Scatter("grads.1", grads, ("data",), graph.Reduction("mean"), HERE),
        graph.MapStage(("shard.2", "adam.2"), "adam_update", ("shard.1", "grads.1", adam), HERE),
        graph.Gather("params.1", "shard.2", ("data",), HERE),
        outputs=("params.1",),
        updates=("adam.2",),
    )
    return maker.plan("sharded")


def ensemble_plan(members: int = 4, via: graph.Algorithm | None = None) -> graph.Plan:
    """load, decode (host), optionally a pinned share, augment per member (host, random)."""
    maker = Maker()
    maker.axis("member", graph.AxisKind.ENSEMBLE, members)
    image = ArrayType(DType.U8, (6, 6, 3))
    maker.sources.append(graph.Source("images", BytesType(), HERE))
    maker.fn("decode", (BytesType(),), (image,), "host")
    maker.fn("augment", (image,), (image,), "host", random=True)
    maker.value("raw.0", RecordsType((8,), BytesType()))
    maker.value("pixels.0", RecordsType((8,), image))
    maker.value("batch.0", RecordsType((8,), image), per="member")
    stages: list[graph.Stage] = [
        graph.Load("raw.0", "images", (8,), "exactly_once", 17, HERE),
        graph.MapStage(("pixels.0",), "decode", ("raw.0",), HERE, per_record=True),
    ]
    decoded = "pixels.0"
    if via is not None:
        decoded = maker.value("pixels.1", RecordsType((8,), image))
        stages.append(graph.ShareStage("pixels.1", "pixels.0", ("member",), via, HERE))
    stages.append(graph.MapStage(("batch.0",), "augment", (decoded,), HERE, ("member",), per_record=True))
    maker.phase("step", *stages, outputs=("batch.0",))
    return maker.plan("ensemble")


def replaced(value: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)
