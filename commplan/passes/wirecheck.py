"""What a backend's own sum cannot do, said once the types of all leaves are known."""

from __future__ import annotations

from collections.abc import Mapping

from commplan.diagnostics import Diagnostic, Note
from commplan.ir import plan as graph
from commplan.ir.schedule import Value
from commplan.passes.shapecheck import leaf_name
from commplan.passes.wire import wire_types


def check_wires(plan: graph.Plan, values: Mapping[graph.Ref, Value]) -> list[Diagnostic]:
    """`via native` adds in the type that it sends: refuse it where a wider sum is wanted (CP0606).

    Leaves say in which type they are added where `accumulate` is left out, and in which one they
    travel where `wire` is. The checker has refused what is wrong whatever the leaves are.
    """
    stages = (stage for phase in plan.phases for stage in phase.stages)
    problems = (_narrow_sum(plan, stage, values) for stage in stages)
    return [problem for problem in problems if problem is not None]


def _narrow_sum(plan: graph.Plan, stage: graph.Stage, values: Mapping[graph.Ref, Value]) -> Diagnostic | None:
    if not isinstance(stage, graph.Reduce | graph.Scatter | graph.Elastic):
        return None
    adds = stage.mode == "sync" if isinstance(stage, graph.Elastic) else stage.op.name in ("sum", "mean")
    if not adds or stage.via is None or not _names_native(stage.via):
        return None
    for leaf in values[stage.operand].leaves:
        wire, accumulate = wire_types(leaf.dtype, stage.hints)
        if accumulate.nbytes <= wire.nbytes:
            continue
        if stage.hints.accumulate is not None:
            what, notes = f"{accumulate} is asked for", list[str]()
        else:
            what = f"{leaf_name(leaf, stage.operand)} is {leaf.dtype}"
            notes = ["where `accumulate` is left out, values are added in their own type"]
        notes.append(
            "the backend's own reduction has no accumulator of another type: leave `via` out, or write "
            f"`accumulate = {wire}`"
        )
        message = f"`native` adds in the wire type {wire}, but {what}"
        return Diagnostic("CP0606", message, stage.span, tuple(map(Note, notes)), file=plan.file)
    return None


def _names_native(via: graph.Algorithm) -> bool:
    """Whether `native` is written, for the stage or for one of its levels."""
    return via.name == "native" or any(arg.key and arg.value == "native" for arg in via.args)
