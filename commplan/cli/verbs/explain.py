"""`commplan explain`: describe how a plan was compiled, or print the page of an error code."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from commplan.cli.argument_types import once
from commplan.cli.console import Console, name_of
from commplan.diagnostics import fail, fail_if
from commplan.errors import RANGES, page, titles

if TYPE_CHECKING:
    from commplan.cli.simulated import MachineTimes
    from commplan.ir.plan import Plan
    from commplan.ir.schedule import Schedule
    from commplan.lowering.jax.compiler_options import CompilerOption
    from commplan.topology import Topology

_CODE_LENGTH = 6  # "CP" and four digits


def run(args: Namespace, console: Console) -> int:
    """Explain a plan, a code or a range of codes.

    Raises:
        CommplanError: CP1102 for an unknown code or range, CP1108 for lengths of unknown sources, or an error
            of reading, compiling or predicting.
    """
    subject = args.what
    if re.fullmatch(r"CP\d{0,4}", subject, re.IGNORECASE) and not Path(subject).exists():
        is_code = len(subject) == _CODE_LENGTH  # a shorter one is the prefix of a range
        return _code(subject.upper(), console) if is_code else _codes(subject.upper(), console)
    return _plan(args, console)


def _codes(prefix: str, console: Console) -> int:
    """List the codes that begin with `prefix`, by range."""
    codes = {code: title for code, title in titles().items() if code.startswith(prefix)}
    if not codes:
        ranges = (f"{start}..: {subject}" for start, subject in RANGES.items())
        fail("CP1102", f"there is no error {prefix}..", *ranges)
    if not console.is_human:
        console.document(codes=codes)
        return 0
    for start, subject in RANGES.items():
        entries = [f"  {code}  {title}" for code, title in codes.items() if code.startswith(start)]
        console.put("\n".join([f"{start}  {subject}", *entries, ""]) if entries else "")
    return 0


def _code(code: str, console: Console) -> int:
    """Print the page of a code. Raises CP1102, with the three nearest codes, if there is none."""
    text = page(code)
    if text is None:
        same_range = [other for other in titles() if other[:4] == code[:4]] or list(titles())
        near = sorted(same_range, key=lambda other: abs(int(other[2:]) - int(code[2:])))[:3]
        notes = (f"{other}: {titles()[other]}" for other in sorted(near))
        fail("CP1102", f"there is no error {code}", *notes, "`commplan explain CP` lists all codes")
    if console.is_human and console.color(sys.stdout):
        from rich.markdown import Markdown

        console.show(lambda screen: screen.print(Markdown(text)), 100)
    elif console.is_human:
        console.put(text)
    else:
        title = text.splitlines()[0].partition(": ")[2]
        console.document(code=code, title=title, text=text)
    return 0


def _plan(args: Namespace, console: Console) -> int:
    """Print how the plan or saved schedule `args.what` was compiled."""
    from commplan.cli.user_step import with_step
    from commplan.cli.verbs.check import unknown_sources
    from commplan.explain.report import explain_plan, line_text

    args = with_step(args, args.what, console)
    plan, schedule, topology = _subject(args, console)
    records = once(args.records, "--records")
    fail_if(unknown_sources(plan, records))
    predictor, prediction = _predict(args, schedule, topology) or (None, None)
    explanation = explain_plan(plan, schedule, predictor, records, prediction)
    options = _options(args, schedule)
    if not console.is_human:
        more = {} if options is None else {"compiler_options": msgspec.to_builtins(options)}
        data = msgspec.to_builtins(explanation)
        for phase, lines in zip(explanation.phases, data["phases"], strict=True):
            for line, fields in zip(phase.lines, lines["lines"], strict=True):
                fields["text"] = line_text(line)
        console.document(**data, mapping={axis.name: axis.level for axis in schedule.axes}, **more)
        return 0
    console.put(explanation.text())
    if options is not None:
        console.put("\n".join([*_option_lines(args.target, options), ""]))
    return 0


def _subject(args: Namespace, console: Console) -> tuple[Plan, Schedule, Topology | None]:
    """The plan and its schedule, compiled or loaded, and the topology for its times."""
    from commplan.cli.binding import compile_with_flags
    from commplan.cli.saved import is_saved
    from commplan.topology import load_topology, topology_of

    text = console.read(args.what)
    if not is_saved(args.what, text):
        compiled = compile_with_flags(args.what, args, console)
        return compiled.plan, compiled.schedule, topology_of(compiled.plan, args.topology)
    from commplan.cli.simulated import place_schedule

    topology = load_topology(args.topology) if args.topology else None
    schedule = place_schedule(text, name_of(args.what), args, topology, console)
    assert schedule.origin is not None  # decoding rejects files without it
    return schedule.origin.plan, schedule, topology


def _options(args: Namespace, schedule: Schedule) -> tuple[CompilerOption, ...] | None:
    """The XLA options for `--target`; None without a target."""
    if not args.target:
        return None
    from commplan.lowering.jax.compiler_options import as_installed, compiler_options

    return as_installed(compiler_options(schedule, args.target))


def _option_lines(target: str, options: Sequence[CompilerOption]) -> Iterator[str]:
    """Lines that list the compiler options, and those that the installed compiler does not support."""
    passed = [option for option in options if option.known is not False]
    unknown = [option for option in options if option.known is False]
    queried = (
        "; JAX is not installed, so its compiler was not queried"
        if any(o.known is None for o in options)
        else ""
    )
    yield f"options of the compiler for {target}, which run.jit passes{queried}"
    yield from (f"  {option}" for option in passed or ("none",))
    if unknown:
        yield "not passed, because the installed compiler does not support them"
        yield from (f"  {option}" for option in unknown)


def _predict(args: Namespace, schedule: Schedule, topology: Topology | None) -> MachineTimes | None:
    """The predicted times on `topology`; None without one. Raises CP0752 if the flags require one."""
    if topology is None:
        from commplan.cli.user_step import need_machine

        need_machine(args)
        return None
    from commplan.cli.simulated import timed_on

    return timed_on(schedule, topology, args)
