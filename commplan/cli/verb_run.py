"""`commplan run`: rehearse a plan on real input, on this machine's CPUs."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

import msgspec

from commplan.cli.binding import Compiled, compiled
from commplan.cli.console import Console

if TYPE_CHECKING:
    from commplan.explain import Line
    from commplan.runtime.data.usage import LineUsage
    from commplan.runtime.rehearse import PhaseTimes


class LineCost(msgspec.Struct, frozen=True):
    """One plan line of one phase in the whole rehearsal: the input's part is measured, `sent` is what each
    rank must at least send. Bytes; seconds."""

    line: int
    stage: str
    records: int | None = None
    cpu_s: float | None = None
    nbytes: int | None = None
    wait_s: float | None = None
    sent: int | None = None


class PhaseCost(msgspec.Struct, frozen=True):
    """One phase in the whole rehearsal."""

    name: str
    title: str
    calls: int
    first_s: float | None
    call_s: float | None
    batches: int
    wait_s: float
    lines: tuple[LineCost, ...]


def run(arguments: Namespace, console: Console) -> int:
    """Compile, bind to CPU devices, run, and say what every plan line cost."""
    from commplan.cli.jax_side import bind

    done = compiled(arguments.file, arguments, console)
    bound = bind(done, arguments, sources=True)
    from commplan.runtime.rehearse import rehearse

    with _progress(console) as progress:
        times = rehearse(bound, steps=arguments.steps, seed=arguments.seed, progress=progress)
    costs = _costs(done, times)
    if console.human:
        console.put(_tables(done, costs, console.color(sys.stdout)))
        return 0
    console.document(
        plan=done.plan.name,
        steps=arguments.steps,
        axes={axis.name: axis.size for axis in done.schedule.axes},
        mapping=done.mapping,
        phases=msgspec.to_builtins(costs),
        diagnostics=[],
    )
    return 0


def _costs(done: Compiled, times: list[PhaseTimes]) -> list[PhaseCost]:
    from commplan.explain import explain_plan

    explained = {phase.name: phase for phase in explain_plan(done.plan, done.schedule).phases}
    costs: list[PhaseCost] = []
    for one in times:
        phase = explained[one.name]
        usage = _usage(one.input.lines if one.input else ())
        costs.append(
            PhaseCost(
                one.name,
                phase.title,
                one.calls,
                one.first_s,
                one.call_s,
                one.input.batches if one.input else 0,
                one.input.wait_s if one.input else 0.0,
                tuple(_line(line, usage.get(line.line), one.calls) for line in phase.lines),
            )
        )
    return costs


def _usage(lines: Iterable[LineUsage]) -> dict[int, LineUsage]:
    """The input's work by plan line; one line may be mapped and then shared."""
    found: dict[int, LineUsage] = {}
    for one in lines:
        before = found.setdefault(one.span.line, one)
        if before is not one:
            found[one.span.line] = msgspec.structs.replace(
                before,
                cpu_s=before.cpu_s + one.cpu_s,
                records=max(before.records, one.records),
                nbytes=max(before.nbytes, one.nbytes),
                wait_s=before.wait_s + one.wait_s,
            )
    return found


def _line(line: Line, usage: LineUsage | None, calls: int) -> LineCost:
    sent = sum(entry.nbytes for entry in line.traffic) * calls if line.traffic else None
    if usage is None:
        return LineCost(line.line, line.stage, sent=sent)
    return LineCost(line.line, line.stage, usage.records, usage.cpu_s, usage.nbytes, usage.wait_s, sent)


def _tables(done: Compiled, costs: list[PhaseCost], color: bool) -> str:
    from rich.console import Console as Rich
    from rich.table import Table

    out = StringIO()
    screen = Rich(file=out, width=120, force_terminal=color, no_color=not color, highlight=False)
    ranks = math.prod(done.schedule.mesh_sizes.values())
    screen.print(f"plan {done.plan.name} on {ranks} CPU device{'s' if ranks > 1 else ''}", markup=False)
    for cost in costs:
        screen.print(f"\n{_headline(cost)}", markup=False)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("line", justify="right")
        table.add_column("stage", overflow="fold", ratio=1)
        for title in ("records", "CPU s", "bytes", "waited s", "sent by a rank"):
            table.add_column(title, justify="right", no_wrap=True)
        for line in cost.lines:
            table.add_row(str(line.line), _escaped(line.stage), *_cells(line))
        screen.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _headline(cost: PhaseCost) -> str:
    parts = [f"{cost.title}: {cost.calls} call{'s' if cost.calls != 1 else ''}"]
    if cost.first_s is not None:
        parts.append(f"first {cost.first_s:.3f} s with compilation")
    if cost.call_s is not None:
        parts.append(f"then {cost.call_s * 1e3:.2f} ms each")
    if cost.batches:
        parts.append(f"{cost.batches} batches, waited {cost.wait_s:.3f} s for them")
    return ", ".join(parts)


def _cells(line: LineCost) -> list[str]:
    from commplan.ir.types import sized

    return [
        "" if line.records is None else str(line.records),
        "" if line.cpu_s is None else f"{line.cpu_s:.3f}",
        "" if line.nbytes is None else sized(line.nbytes),
        "" if line.wait_s is None else f"{line.wait_s:.3f}",
        "" if line.sent is None else sized(line.sent),
    ]


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def _progress(console: Console) -> Generator[Callable[[str, int, int], None] | None]:
    """A bar on stderr, where that is a terminal and people are reading."""
    if not console.human or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console as Rich
    from rich.progress import Progress

    with Progress(console=Rich(stderr=True, no_color=not console.color(sys.stderr)), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, of: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=of)
            bars.update(tasks[name], completed=done)

        yield show
