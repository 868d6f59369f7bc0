"""Stages in words, for drawings and explanations: close to how they are written, one line a thought."""

from __future__ import annotations

import msgspec

from commplan.ir.plan import (
    Broadcast,
    Elastic,
    Exchange,
    Gather,
    Hints,
    Load,
    Map,
    Phase,
    Reduce,
    Reduction,
    Scatter,
    Share,
    Slice,
    Stage,
    name_of,
    results,
)
from commplan.ir.schedule import Axis as ScheduledAxis
from commplan.ir.types import sized


def phase_title(phase: Phase) -> str:
    """The header of a phase, as written: `every 4 steps`."""
    match phase.kind:
        case "start":
            return "at start"
        case "step":
            return "each step"
        case "every":
            return f"every {phase.period} steps"
        case "named":
            return f"phase {phase.name}"


def stage_lines(stage: Stage) -> tuple[str, ...]:
    """What `stage` does, then where, then how, then its hints: one string each, empty ones left out."""
    lines = (*_what(stage), *_how(stage))
    return tuple(line for line in lines if line)


def stage_text(stage: Stage) -> str:
    """`stage` on one line, close to how it is written: `grads = reduce grads over data by mean`."""
    names = ", ".join(name_of(ref) for ref in results(stage))
    parts = (names, "=", *_written(stage), *_how(stage))
    return " ".join(part for part in parts if part)


def _written(stage: Stage) -> tuple[str, ...]:
    match stage:
        case Load():
            first, *rest = _what(stage)
            return (first.replace("load", f"load {stage.source}", 1), *rest)
        case Map():
            operands = ", ".join(name_of(ref) for ref in stage.operands)
            return (f"map {stage.fn}({operands})", f"per {', '.join(stage.per)}" if stage.per else "")
        case Broadcast():
            return (f"broadcast {name_of(stage.operand)}", _over(stage.axes), f"from {stage.root}")
        case Share():
            return (f"share {name_of(stage.operand)}", _over(stage.axes))
        case Reduce():
            over = _over(stage.axes, "across" if stage.across else "over")
            return (f"reduce {name_of(stage.operand)}", over, f"by {_op(stage.op)}")
        case Scatter():
            return (f"scatter {name_of(stage.operand)}", _over(stage.axes), f"by {_op(stage.op)}")
        case Slice():
            return (f"slice {name_of(stage.operand)}", _over(stage.axes))
        case Gather():
            return (f"gather {name_of(stage.operand)}", _over(stage.axes))
        case Exchange():
            states = ", ".join(name_of(ref) for ref in stage.states)
            into = f"exchange {name_of(stage.gradient)} into {states} with {stage.fn}"
            return (into, _over(stage.axes), f"by {_op(stage.op)}")
        case Elastic():
            both = f"elastic {name_of(stage.operand)} with {name_of(stage.center)}"
            return (both, _over(stage.axes), f"by {_mode(stage)}")


def _mode(stage: Elastic) -> str:
    eta, rho = (name_of(x) if isinstance(x, str) else f"{x:g}" for x in (stage.eta, stage.rho))
    return f"{stage.mode}(eta = {eta}, rho = {rho})"


def _what(stage: Stage) -> tuple[str, ...]:
    match stage:
        case Load():
            batch = f"{list(stage.batch)} over {stage.clock}" if stage.clock else str(stage.batch[0])
            split = f"split {', '.join(stage.split)}" if stage.split else ""
            per = f"per {', '.join(stage.per)}" if stage.per else ""
            tail = f"tail {stage.tail}" if stage.tail != "pad" else ""
            visit = " ".join(x for x in (f"visit {stage.visit}", f"seed {stage.seed}", tail) if x)
            return (f"load batch {batch}", split, per, visit)
        case Map():
            per = f"per {', '.join(stage.per)}" if stage.per else ""
            return (f"map {stage.fn}", "record by record" if stage.per_record else "", per)
        case Broadcast():
            return (f"broadcast from {stage.root}", _over(stage.axes))
        case Share():
            return ("share", _over(stage.axes))
        case Reduce():
            return (f"reduce by {_op(stage.op)}", _over(stage.axes, "across" if stage.across else "over"))
        case Scatter():
            return (f"scatter by {_op(stage.op)}", _over(stage.axes))
        case Slice():
            return ("slice", _over(stage.axes))
        case Gather():
            return ("gather", _over(stage.axes))
        case Exchange():
            return (f"exchange with {stage.fn} by {_op(stage.op)}", _over(stage.axes))
        case Elastic():
            return (f"elastic by {_mode(stage)}", _over(stage.axes))


def _how(stage: Stage) -> tuple[str, ...]:
    if isinstance(stage, Slice):
        return ()
    via = None if isinstance(stage, Load | Map) else stage.via
    return (f"via {via}" if via else "", hints_text(stage.hints))


def hints_text(hints: Hints) -> str:
    """`{ bucket = 25 MiB, wire = bf16 }`, or nothing where there are none."""
    given = [
        f"{field} = {sized(value) if field in ('bucket', 'chunk') else value}"
        for field in (info.name for info in msgspec.structs.fields(hints))
        if (value := getattr(hints, field)) is not None
    ]
    return f"{{ {', '.join(given)} }}" if given else ""


def _op(op: Reduction) -> str:
    return f"{op.name}(weight = {name_of(op.weight)})" if op.weight else op.name


def _over(axes: tuple[str, ...], word: str = "over") -> str:
    return f"{word} {', '.join(axes)}"


def levels_text(axis: ScheduledAxis) -> str:
    """`host x 4, rack x 2`: the levels that an axis is spread over, innermost first; one level by name."""
    if len(axis.levels) == 1:
        return axis.levels[0].level
    return ", ".join(f"{spread.level} x {spread.count}" for spread in axis.levels)
