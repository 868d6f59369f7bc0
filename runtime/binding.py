"""Bind a program: check its sources, functions and options, and find its machine."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, cast

from commplan.diagnostics import Diagnostic, Note, fail, fail_if, near_note
from commplan.hang_limits import UNWATCHED, HangLimits
from commplan.ir import schedule as ir
from commplan.lowering.jax.builtins import builtin_functions
from commplan.lowering.jax.pytree import known_structures
from commplan.runtime.context import Context
from commplan.runtime.input.sources.files import bind_sources
from commplan.runtime.input.stages.functions import checked_functions
from commplan.runtime.machines.machine import BindRequest
from commplan.runtime.machines.mesh import machine_for
from commplan.runtime.run import Run
from commplan.runtime.run_input import RunInput
from commplan.wait import TIMEOUT_S, check_seconds

if TYPE_CHECKING:
    from commplan.api import Program


def bind(program: Program[Any], mesh: Any, bindings: Bindings) -> Run:
    """Bind `program` to a mesh or a communicator; see `Program.bind`.

    Raises:
        CommplanError: the errors of `machine_for` for a mesh or communicator that does not fit, and those of
            `Bindings.check`.
    """
    schedule = program.schedule
    check = functools.partial(bindings.check, schedule)
    request = BindRequest(schedule, program.digest, bindings.seed, check, bindings.limits, bindings.timeout)
    machine = machine_for(request, mesh)
    structures = known_structures(program.structures.values())
    functions = {**builtin_functions(schedule), **(bindings.functions or {})}
    seed = operator.index(bindings.seed)
    context = Context(schedule, machine, functions, seed, structures)
    run = Run(program, context, RunInput(dict(bindings.sources or {})))
    context.warn_about_flags()
    return run


class Bindings(NamedTuple):
    """The data, functions and options that a program is bound with; see `Program.bind`.

    Attributes:
        sources: The sources by name; None for none.
        functions: The user's functions by name, without built-in ones; None for none.
        seed: The seed of random functions, the same in all processes.
        limits: When the watchdog reports a process that waits, and when it ends the job.
        timeout: Seconds to wait for other processes that bind the program.
    """

    sources: Mapping[str, Any] | None = None
    functions: Mapping[str, Callable[..., Any]] | None = None
    seed: SupportsIndex = 0
    limits: HangLimits = UNWATCHED
    timeout: float = TIMEOUT_S

    def check(self, schedule: ir.Schedule) -> None:
        """Check all values before any is used.

        Raises:
            CommplanError: CP0803 for values of the wrong type and for names that are missing or unknown;
                the errors of `bind_sources` for sources that cannot be read; CP0908 for host functions with
                other parameters.
        """
        self._check_kinds(schedule)
        sources, functions = self.sources or {}, dict(self.functions or {})
        check_bound(schedule, dict(sources), functions)
        # Only the sources that were passed: a phase without any of its sources may still run without data.
        bind_sources(schedule, dict(sources), sources)
        checked_functions(schedule, functions)

    def _check_kinds(self, schedule: ir.Schedule) -> None:
        """Raise CP0803 for values of the wrong type.

        Sources and functions must be mappings, the seed an integer, the others positive numbers of seconds.
        """
        passed: dict[str, object] = {"sources": self.sources, "functions": self.functions}
        for name, value in passed.items():
            if value is not None and not isinstance(value, Mapping):
                message = f"{name} is of type {type(value).__name__}: expected a mapping by name"
                fix = f"pass it: program.bind(mesh, {name}={{NAME: ...}})"
                fail("CP0803", message, fix, file=schedule.file)
        seed = cast("object", self.seed)
        if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
            message = f"the seed is {seed!r}, of type {type(seed).__name__}: expected a whole number"
            fail("CP0803", message, "such as program.bind(mesh, seed=0)", file=schedule.file)
        self.limits.check("CP0803", "program.bind(comm, {})", schedule.file)
        fix = "such as program.bind(comm, timeout=600)"
        check_seconds("CP0803", "timeout", self.timeout, fix, file=schedule.file)


def check_bound(schedule: ir.Schedule, sources: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
    """Check the names of sources and functions.

    Raises:
        CommplanError: CP0803, with one diagnostic for each name that is missing, unknown or that of a
            built-in function of the plan, and for each function that cannot be called.
    """
    builtin = {fn.name: str(fn.body) for fn in schedule.fns if fn.body is not None}
    used = {op.fn for phase in schedule.phases for op in phase.ops if isinstance(op, ir.Map | ir.Exchange)}
    used -= builtin.keys()
    read = {op.source for phase in schedule.phases for op in phase.ops if isinstance(op, ir.Read)}
    wrong = _differences("function", {f.name for f in schedule.fns}, used, functions, schedule.file)
    wrong += _differences("source", {s.name for s in schedule.sources}, read, sources, schedule.file)
    wrong += _missing_sources(schedule, sources)
    wrong += [
        Diagnostic(
            "CP0803",
            f"the plan defines `{name}` as the built-in function `{builtin[name]}`, which is not bound",
            None,
            (Note(f"leave it out, or declare `fn {name}(TYPES) -> TYPES on device` in the plan"),),
            file=schedule.file,
        )
        for name in functions
        if name in builtin
    ]
    wrong += [
        Diagnostic(
            "CP0803",
            f"function `{name}` is of type `{type(function).__name__}`, which cannot be called",
            file=schedule.file,
        )
        for name, function in functions.items()
        if not callable(function)
    ]
    fail_if(wrong)


def _missing_sources(schedule: ir.Schedule, sources: Mapping[str, Any]) -> list[Diagnostic]:
    """Report sources that are missing in a phase that has other sources: it can never make batches.

    A phase without any of its sources runs without data, which is no error.
    """
    wrong: dict[str, Diagnostic] = {}
    for phase in schedule.phases:
        reads = [op for op in phase.ops if isinstance(op, ir.Read)]
        bound = [op.source for op in reads if op.source in sources]
        for op in reads if bound else ():
            if op.source not in sources and op.source not in wrong:
                also = Note(f"phase `{phase.name}` also reads `{bound[0]}`, which is bound")
                fix = Note(f"pass it: program.bind(mesh, sources={{{op.source!r}: ...}})")
                message = f"source `{op.source}` is not bound"
                wrong[op.source] = Diagnostic("CP0803", message, op.span, (also, fix), file=schedule.file)
    return list(wrong.values())


def _differences(
    kind: str, declared: set[str], used: set[str], passed: Mapping[str, Any], file: str
) -> list[Diagnostic]:
    """Report names in `passed` that are not `declared`, and `used` functions that were not passed.

    `kind` is "function" or "source". A source that was not passed is no error here; see `_missing_sources`.
    """
    has = Note(f"the plan declares: {', '.join(sorted(declared)) or 'none'}")
    wrong = [
        Diagnostic(
            "CP0803", f"the plan has no {kind} `{name}`", None,
            (*map(Note, near_note(name, declared)), has), file=file,
        )
        for name in sorted(passed)
        if name not in declared
    ]  # fmt: skip
    if kind == "source":  # A run without data is an error only once its batches are requested.
        return wrong
    fix = Note(f"pass it: program.bind(mesh, {kind}s={{...}})")
    return wrong + [
        Diagnostic("CP0803", f"{kind} `{name}` is not bound", None, (fix,), file=file)
        for name in sorted(used - set(passed))
    ]
