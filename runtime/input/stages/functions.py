"""Validation of host functions, and the worker processes that call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.ir.schedule import FnType, Map, Schedule
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.program import HostProgram

if TYPE_CHECKING:
    from commplan.runtime.input.sources.adapters import Source
    from commplan.runtime.input.stages.worker_pool import Workers
    from commplan.runtime.machines.pinned import Pinning


def called_functions(
    program: HostProgram, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """The host functions that `program` calls, by name, validated as `checked_functions` does."""
    names = [op.fn for flow in program.flows for op in flow.ops if isinstance(op, Map)]
    return checked_functions(program.schedule, functions, names)


def checked_functions(
    schedule: Schedule, functions: Mapping[str, object], names: Sequence[str] | None = None
) -> dict[str, Callable[..., Any]]:
    """The validated host functions of `schedule`, by name.

    Args:
        schedule: the schedule.
        functions: the objects that the user passes, by the names of functions. Other items are ignored.
        names: the functions to validate; None for all that the schedule calls.

    Raises:
        CommplanError: CP0908, all in one error, for each function that is missing, is not callable, or does
            not accept its operands (and the keyword `rng` if it is random).
    """
    problems: list[Diagnostic] = []
    chosen: dict[str, Callable[..., Any]] = {}
    spans = {op.fn: op.span for phase in schedule.phases for op in phase.ops if isinstance(op, Map)}
    for fn in schedule.fns:
        if fn.where != "host" or fn.name not in (spans if names is None else names):
            continue
        function = functions.get(fn.name)
        problem = _function_problem(fn, function)
        if problem:
            notes = (Note(f"expected: {_call(fn)}"),)
            problems.append(Diagnostic("CP0908", problem, spans.get(fn.name), notes, file=schedule.file))
        else:
            chosen[fn.name] = cast("Callable[..., Any]", function)
    if problems:
        raise CommplanError(*problems)
    return chosen


def _call(fn: FnType) -> str:
    """The call of a host function, for messages: `augment(<u8[32, 32, 3]>, rng=<numpy.random.Generator>)`."""
    arguments = [f"<{operand}>" for operand in fn.operands]
    arguments += ["rng=<numpy.random.Generator>"] if fn.random else []
    return f"{fn.name}({', '.join(arguments)})"


def _function_problem(fn: FnType, function: object) -> str | None:
    """The reason why the plan cannot call `function`; None if it can."""
    if function is None:
        return f"host function `{fn.name}` is not bound"
    if not callable(function):
        return f"`{fn.name}` is of type `{type(function).__name__}`, which cannot be called"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # some builtins have no signature; a wrong call raises an error
    keywords: dict[str, object] = {"rng": None} if fn.random else {}
    try:
        signature.bind(*[None] * len(fn.operands), **keywords)
    except TypeError as error:
        return f"host function `{fn.name}{signature}` cannot be called as the plan does: {error}"
    return None


def workers_of(
    workers: str,
    cores: int,
    program: HostProgram,
    sources: Mapping[str, Source],
    functions: Mapping[str, Callable[..., Any]],
    block: int,
    meter: Meter,
    pinning: Pinning | None = None,
) -> Workers | None:
    """The worker processes of a phase; None if threads do the work. Describes the workers on `meter`.

    Args:
        workers: "threads" or "processes".
        cores: the number of threads or processes.
        program: the host program.
        sources: its sources by name.
        functions: its host functions by name.
        block: the maximum number of records in a job.
        meter: counts costs and restarts.
        pinning: registers the memory of batches with devices; None if batches are not copied ahead.

    Raises:
        CommplanError: CP0955 for another value of `workers` or too many processes; CP0952 for a source or
            function that cannot be pickled; CP0954 inside of a worker process.
    """
    if workers not in ("threads", "processes"):
        fail("CP0955", f"workers are 'threads' or 'processes', not {workers!r}", span=program.phase.span)
    singular = {"threads": "thread", "processes": "process"}[workers]
    meter.workers(f"1 {singular}" if cores == 1 else f"{cores} {workers}")
    if workers == "threads":
        return None
    from commplan.runtime.input.stages.worker_pool import Workers  # noqa: PLC0415  memory that few need

    return Workers(program, sources, functions, block, cores, meter, pinning)
