"""From the command's flags to a compiled plan: shapes, axis sizes, mapping, passes."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from commplan import dsl
from commplan.cli.console import Console, name_of
from commplan.cli.saved import plan_text
from commplan.compiler import check_complete, compile_plan
from commplan.diagnostics import CommplanError, fail
from commplan.explain.stages import levels_text
from commplan.ir.plan import Plan
from commplan.ir.schedule import Schedule
from commplan.passes.pipeline.manager import Observer
from commplan.pytree import shapes_of


class Compiled(NamedTuple):
    """A plan, its schedule, and the shapes as they were given."""

    plan: Plan
    schedule: Schedule
    shapes: dict[str, Any]

    @property
    def mapping(self) -> dict[str, str | None]:
        """The level that each axis lies on; None where there is no topology."""
        return {axis.name: axis.level for axis in self.schedule.axes}


def checked(path: str, console: Console) -> Plan:
    """The checked plan in a file. Raises CommplanError with all that is wrong."""
    plan, diagnostics = dsl.load(plan_text(path, console), name_of(path))
    if plan is None:
        raise CommplanError(*diagnostics)
    return plan


def compiled(
    path: str,
    args: Namespace,
    console: Console,
    observer: Observer | None = None,
    adapt: Callable[[Plan], Plan] | None = None,
) -> Compiled:
    """The plan in a file, compiled as the flags say; the mapping is printed. Raises CommplanError.

    adapt: what becomes of the checked plan before it is compiled.
    """
    plan = checked(path, console)
    plan = adapt(plan) if adapt else plan
    shapes = read_shapes(args.shapes, console) if args.shapes else {}
    sizes, mapping = once(args.axis, "--axis"), once(args.map, "--map") or None
    leaves = {name: shapes_of(tree) for name, tree in shapes.items()}
    names = ("topology", "oversubscribe", "backend", "calibration")
    flags = {name: getattr(args, name) for name in names}
    schedule = compile_plan(
        plan, sizes, leaves, mapping=mapping, pipeline=args.passes, observer=observer, **flags
    )
    check_complete(schedule)
    note_levels(schedule, console)
    return Compiled(plan, schedule, shapes)


def note_levels(schedule: Schedule, console: Console) -> None:
    """Say on which levels of the topology each axis lies."""
    for axis in schedule.axes:
        if axis.levels:
            console.note(f"{axis.kind} {axis.name} = {axis.size} on {levels_text(axis)}")


def read_shapes(path: str, console: Console) -> dict[str, Any]:
    """The contents of a shapes file. Raises CP1103 where it is not a JSON object."""
    text = console.read(path)
    try:
        shapes = json.loads(text, object_pairs_hook=_unique)
    except CommplanError as error:
        raise CommplanError(*(replace(d, file=path) for d in error.diagnostics)) from None
    except ValueError as error:
        fail("CP1103", f"the shapes are not JSON: {error}", file=path)
    except RecursionError:
        fail("CP1103", "the shapes are nested too deep", "trees this deep cannot be read", file=path)
    if not isinstance(shapes, dict):
        message = f"the shapes are a JSON {_json_kind(shapes)}: expected an object"
        fail("CP1103", message, 'such as {"params": {"w": {"shape": [3, 4], "dtype": "f32"}}}', file=path)
    return {str(name): tree for name, tree in shapes.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises CP1103 where a key is in it twice: one of the two would be lost."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        fail("CP1103", f"the key `{twice}` is written twice in one object", "each name has one value")
    return entries


def _json_kind(value: object) -> str:
    names = {"list": "array", "str": "string", "bool": "boolean", "int": "number", "float": "number"}
    return names.get(type(value).__name__, "null")


def once(pairs: Sequence[tuple[str, Any]], flag: str) -> dict[str, Any]:
    """The pairs as a mapping. Raises CP1104 where a name is given two values."""
    bindings: dict[str, Any] = {}
    for name, value in pairs:
        if bindings.setdefault(name, value) != value:
            fail("CP1104", f"{flag} {name} is given twice: {bindings[name]} and {value}")
    return bindings
