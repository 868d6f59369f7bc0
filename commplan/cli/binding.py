"""Compile a plan as the command's flags specify: shapes, axis sizes, mapping and passes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from commplan import dsl
from commplan.cli.argument_types import once
from commplan.cli.console import Console, name_of
from commplan.cli.saved import plan_text
from commplan.cli.shapes import read_shapes
from commplan.compiler import compile_plan
from commplan.diagnostics import CommplanError
from commplan.explain.stages import levels_text
from commplan.ir.plan import Plan
from commplan.ir.schedule import Schedule
from commplan.passes.pipeline.manager import Observer
from commplan.pytree import shapes_of


class Compiled(NamedTuple):
    """A compiled plan.

    Attributes:
        plan: the checked plan, after `adapt`.
        schedule: its schedule.
        shapes: trees of shapes by name, from --shapes; empty without it.
    """

    plan: Plan
    schedule: Schedule
    shapes: dict[str, Any]

    @property
    def mapping(self) -> dict[str, str | None]:
        """The innermost topology level of each axis; None for axes without a level."""
        return {axis.name: axis.level for axis in self.schedule.axes}


def load_plan(path: str, console: Console) -> Plan:
    """Load and check a plan.

    Raises:
        CommplanError: all errors of the plan; CP1010 for a saved schedule; or CP0001 or CP0002 if the file
            cannot be read.
    """
    plan, diagnostics = dsl.load(plan_text(path, console), name_of(path))
    if plan is None:
        raise CommplanError(*diagnostics)
    return plan


def compile_with_flags(
    path: str,
    args: Namespace,
    console: Console,
    observer: Observer | None = None,
    adapt: Callable[[Plan], Plan] | None = None,
) -> Compiled:
    """Compile a plan as the flags specify, and print the mapping.

    Args:
        path: the plan file, or `-`.
        args: the flags.
        console: the output.
        observer: receives a record after every pass.
        adapt: changes the checked plan before it is compiled.

    Raises:
        CommplanError: an error of the plan or the flags.
    """
    plan = load_plan(path, console)
    plan = adapt(plan) if adapt else plan
    sizes = once(args.axis, "--axis")
    mapping = once(args.map, "--map") or None
    device = getattr(args, "device", "cpu")
    shapes = read_shapes(args.shapes, console, plan, device, **sizes) if args.shapes else {}
    leaves = {name: shapes_of(tree) for name, tree in shapes.items()}
    names = ("topology", "oversubscribe", "backend", "calibration")
    flags = {name: getattr(args, name) for name in names}
    schedule = compile_plan(
        plan, leaves, axes=sizes, mapping=mapping, passes=args.passes, observer=observer,
        step=args.computation if getattr(args, "step_profile", None) else None, **flags,
    )  # fmt: skip
    note_levels(schedule, console)
    return Compiled(plan, schedule, shapes)


def note_levels(schedule: Schedule, console: Console) -> None:
    """Print the topology levels of each axis."""
    for axis in schedule.axes:
        if axis.levels:
            console.note(f"{axis.kind} {axis.name} = {axis.size} on {levels_text(axis)}")
