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
    Op,
    Phase,
    Reduce,
    Ref,
    Scatter,
    Share,
    Slice,
    Stage,
)


def name_of(ref: Ref) -> str:
    """`grads` of `grads.1`."""
    return ref.rpartition(".")[0]


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


def operands(stage: Stage) -> tuple[Ref, ...]:
    """Every value that `stage` reads, each once, in the order written."""
    match stage:
        case Load():
            refs: tuple[Ref | None, ...] = ()
        case Map():
            refs = stage.operands
        case Exchange():
            refs = (stage.gradient, *stage.states, stage.op.weight)
        case Elastic():
            scalars = tuple(x for x in (stage.eta, stage.rho) if isinstance(x, str))
            refs = (stage.operand, stage.center, *scalars)
        case Reduce() | Scatter():
            refs = (stage.operand, stage.op.weight)
        case Broadcast() | Share() | Slice() | Gather():
            refs = (stage.operand,)
    return tuple(dict.fromkeys(ref for ref in refs if ref is not None))


def results(stage: Stage) -> tuple[Ref, ...]:
    """Every value that `stage` makes."""
    match stage:
        case Load():
            return (stage.result, stage.count) if stage.count else (stage.result,)
        case Map() | Exchange():
            return stage.results
        case Elastic():
            return (stage.pull, stage.result)
        case _:
            return (stage.result,)


def stage_lines(stage: Stage) -> tuple[str, ...]:
    """What `stage` does, then where, then how, then its hints: one string each, empty ones left out."""
    lines = (*_what(stage), *_how(stage))
    return tuple(line for line in lines if line)


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
            return (f"broadcast from {stage.root}", _over(stage.over))
        case Share():
            return ("share", _over(stage.over))
        case Reduce():
            return (f"reduce by {_op(stage.op)}", _over(stage.over, "across" if stage.across else "over"))
        case Scatter():
            return (f"scatter by {_op(stage.op)}", _over((stage.over,)))
        case Slice():
            return ("slice", _over((stage.over,)))
        case Gather():
            return ("gather", _over((stage.over,)))
        case Exchange():
            return (f"exchange with {stage.fn} by {_op(stage.op)}", _over(stage.over))
        case Elastic():
            eta, rho = (name_of(x) if isinstance(x, str) else f"{x:g}" for x in (stage.eta, stage.rho))
            return (f"elastic by {stage.mode}(eta = {eta}, rho = {rho})", _over(stage.over))


def _how(stage: Stage) -> tuple[str, ...]:
    if isinstance(stage, Slice):
        return ()
    via = None if isinstance(stage, Load | Map) else stage.via
    return (f"via {via}" if via else "", hints_text(stage.hints))


def hints_text(hints: Hints) -> str:
    """`{ bucket = 25 MiB, wire = bf16 }`, or nothing where there are none."""
    given = [
        f"{field} = {size(value) if field in ('bucket', 'chunk') else value}"
        for field in (info.name for info in msgspec.structs.fields(hints))
        if (value := getattr(hints, field)) is not None
    ]
    return f"{{ {', '.join(given)} }}" if given else ""


def size(nbytes: int) -> str:
    """A number of bytes in the largest unit that leaves it readable: `25 MiB`, `1.5 KiB`, `12 B`."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 1000 * scale else f"{nbytes / scale:.0f} {unit}"
    return f"{nbytes} B"


def _op(op: Op) -> str:
    return f"{op.name}(weight = {name_of(op.weight)})" if op.weight else op.name


def _over(axes: tuple[str, ...], word: str = "over") -> str:
    return f"{word} {', '.join(axes)}"
