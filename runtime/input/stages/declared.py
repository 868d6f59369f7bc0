"""The stages of a phase as its plan declares them: their lines in the summary, and which of them skip."""

from __future__ import annotations

from commplan.diagnostics import fail
from commplan.ir.plan import Ref
from commplan.ir.schedule import Read, Share, results
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.program import HostProgram


def declared(program: HostProgram, meter: Meter) -> dict[Ref, bool]:
    """Whether each Read and Map skips failing records, by its first result. Adds all lines to `meter`.

    A stage skips if its `on_error` is `skip`, or if it has no `on_error` and a load of its flow skips. It
    cannot skip a record for some members of an ensemble, because the others have the record already.

    Raises:
        CommplanError: CP0914 for `on_error = skip` on a stage that cannot skip.
    """
    skips: dict[Ref, bool] = {}
    for flow in program.flows:
        is_load_skipping = any(read.hints.on_error == "skip" for read in flow.reads)
        is_alike = all(read.per == flow.per for read in flow.reads)
        members = {*flow.per, *(read.clock for read in flow.reads)}  # axes whose members skip independently
        for op in flow.ops:
            key = results(op)[0]
            if isinstance(op, Share):
                meter.line(key, f"share {key.rpartition('.')[0]} via {op.design}", op.span)
                continue
            on_error = op.hints.on_error
            can_skip = is_alike and members.issuperset(program.per(key))
            if on_error == "skip" and not can_skip:
                fail(
                    "CP0914",
                    "a record cannot be skipped where members differ: the others have it already",
                    "put `on_error = skip` on the load, or on a map before the first `per`",
                    span=op.span,
                    file=program.schedule.file,
                )
            meter.line(key, f"load {op.source}" if isinstance(op, Read) else f"map {op.fn}", op.span)
            skips[key] = (on_error == "skip" or (on_error is None and is_load_skipping)) and can_skip
    return skips
