"""`commplan diff`: compare two plans or saved schedules, and detect regressions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from commplan.cli.console import Console, fold_table, name_of
from commplan.cli.simulated import simulate
from commplan.cli.user_step import with_step
from commplan.diagnostics import fail
from commplan.explain.diff import TIMES, Change, Limit, computations_text, diff
from commplan.ir.serialization.canonical_json import schedule_digest
from commplan.ir.types import sized, timed

# The measure of `explain.diff` for each word of --fail-on.
_MEASURES = {"slower": "exposed", "memory": "memory", "rounds": "rounds", "bytes": "bytes"}
_BYTES = ("memory", "bytes", "link bytes", "collective bytes")  # measures in bytes


def run(args: Namespace, console: Console) -> int:
    """Compare; returns 1 if the second is worse than --fail-on allows.

    Raises:
        CommplanError: CP1155 for `slower` without a topology, or an error of reading or compiling.
    """
    args = with_step(args, args.a, console, estimate=False)
    limits = [Limit(_MEASURES[name], share) for name, share in args.fail_on]
    files = (args.a, args.b or args.a)
    paths: list[str | None] = [*args.topology, *args.topology] if args.topology else [None, None]
    sides = [
        Namespace(**{**vars(args), "file": file, "ranks": None, "topology": path})
        for file, path in zip(files, paths, strict=False)
    ]
    a, _, first = simulate(sides[0], console)
    b, _, second = simulate(sides[1], console, first if len(args.topology) > 1 else None)
    times = (first.prediction, second.prediction) if first and second else None
    if times is None and any(limit.measure in TIMES for limit in limits):
        fail("CP1155", "without a topology there are no times to compare", "give one with --topology FILE")
    if times is not None and (different := computations_text(*times)):
        console.note(f"exposed times depend on the computations, which differ: {different}; `alone` does not")
    names = list(map(name_of, files))
    if first and second and len(args.topology) > 1:
        names = [
            f"{name} on {side.prediction.topology}" for name, side in zip(names, (first, second), strict=True)
        ]
    changes = diff(a, b, times)
    worse = [change for limit in limits for change in limit.exceeded(changes)]
    same = schedule_digest(a) == schedule_digest(b)
    if console.is_human:
        console.show(lambda rich: _print(rich, changes, worse, same=same, names=names), 110)
    else:
        facts = [{**msgspec.to_builtins(change), "changed": change.is_changed} for change in changes]
        schedules = [
            {"file": name_of(file), "digest": schedule_digest(schedule), "topology": path}
            for file, schedule, path in zip(files, (a, b), paths, strict=False)
        ]
        failed = msgspec.to_builtins(worse)
        console.document(schedules=schedules, same=same, changes=facts, failed=failed)
    return int(bool(worse))


def _print(
    rich: Any, changes: Sequence[Change], worse: Sequence[Change], *, same: bool, names: Sequence[str]
) -> None:
    """Print the changed figures as a table for each phase, and those that exceed --fail-on.

    Args:
        rich: the screen.
        changes: all figures.
        worse: those that exceed --fail-on.
        same: whether the schedules are equal; times may still differ.
        names: names of the two sides.
    """
    a, b = names
    shown = [change for change in changes if change.is_changed]
    if same:
        rich.print(f"{a} and {b}: the same schedule", markup=False)
    if same and not shown:
        return
    rich.print(f"{a} -> {b}: {len(shown)} of {len(changes)} figures differ", markup=False, soft_wrap=True)
    for phase, rows in groupby(shown, lambda change: change.phase):
        table = fold_table("", "before", "after", "change")
        for row in rows:
            subject = f"{row.measure} {row.subject}".strip()
            table.add_row(subject, _value_text(row, row.before), _value_text(row, row.after), _growth(row))
        rich.print(f"\nphase {phase}" if phase else "", markup=False, style="bold")
        rich.print(table, markup=False)
    if worse:
        rich.print("\nworse than --fail-on allows:", markup=False, style="bold")
    for change in worse:
        subject = f"{change.measure} {change.subject}".strip()
        values = f"{_value_text(change, change.before)} to {_value_text(change, change.after)}"
        rich.print(f"  phase {change.phase}: {subject} {_growth(change)}, {values}", markup=False)


def _value_text(change: Change, value: float | str | None) -> str:
    """A value of `change` with its unit; `-` for None or an empty text."""
    if value is None or isinstance(value, str):
        return value or "-"
    if change.measure in TIMES:
        return timed(value)
    nbytes = change.measure in _BYTES or (change.measure, change.subject) == ("buckets", "largest")
    return sized(value) if nbytes else str(value)


def _growth(change: Change) -> str:
    """The relative growth in percent, `new`, `gone`, or nothing if there is no ratio."""
    growth = change.growth
    if growth is None or change.before is None or change.after is None:
        return "new" if change.before is None else "gone" if change.after is None else ""
    return f"{growth:+.1%}"
