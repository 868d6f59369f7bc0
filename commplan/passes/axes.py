"""Binding axis sizes: every axis of the plan gets a number, and what depends on it is checked."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import SupportsIndex

from commplan.diagnostics import CommplanError, Diagnostic, Note, Span
from commplan.ir.plan import AxisKind, Broadcast, Elastic, Exchange, Load, Plan, Share, Stage
from commplan.ir.schedule import Axis
from commplan.passes.shapecheck import LARGEST

Broken = tuple[str, ...] | None  # a message and its notes, where a rule is broken


def bind_axes(plan: Plan, sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    """The axes of `plan` with their sizes (ranks along each).

    `sizes` gives those written `?` and may repeat the others. Raises CP0706 (unbound), CP0708
    (another size than declared, or no size at all), CP0709 (no such axis), CP0710 (the sizes
    break a rule of a stage).
    """
    problems = [_unknown(plan, name) for name in sizes if name not in {a.name for a in plan.axes}]
    bound: list[Axis] = []
    for axis in plan.axes:
        given = sizes.get(axis.name)
        size = axis.size if given is None else _whole(given)
        if size is None and given is not None:
            problems.append(
                _problem(
                    plan,
                    "CP0708",
                    f"axis `{axis.name}` has size {given!r}, which is no whole number",
                    axis.span,
                    "expected the number of ranks along it",
                )
            )
            continue
        if size is None:
            problems.append(
                _problem(
                    plan,
                    "CP0706",
                    f"axis `{axis.name}` has no size yet: it is declared `?`",
                    axis.span,
                    f"give its size when compiling: a mesh with an axis `{axis.name}`, "
                    f"axes={{{axis.name!r}: N}}, or --axis {axis.name}=N",
                )
            )
            continue
        if size < 1 or (axis.size is not None and size != axis.size):
            declared = "at least 1" if axis.size is None else str(axis.size)
            problems.append(
                _problem(
                    plan,
                    "CP0708",
                    f"axis `{axis.name}` has size {size}, but the plan declares {declared}",
                    axis.span,
                    f"expected {declared}, found {size}",
                    f"use a mesh whose axis `{axis.name}` has that size, or declare `{axis.name} = ?`",
                )
            )
            continue
        if size > LARGEST:
            message = f"axis `{axis.name}` has size {size}, and no machine has so many ranks"
            problems.append(_problem(plan, "CP0708", message, axis.span, f"at most {LARGEST} can be counted"))
            continue
        bound.append(Axis(axis.name, axis.kind, size))
    if problems:
        raise CommplanError(*problems)
    axes = tuple(bound)
    broken = [p for phase in plan.phases for stage in phase.stages for p in _stage_rules(plan, axes, stage)]
    if broken:
        raise CommplanError(*broken)
    return axes


def check_mesh(plan: Plan, mesh: Mapping[str, int]) -> None:
    """Refuse a mesh that lacks an axis of the plan (CP0707). Servers are no axes of a mesh."""
    missing = [a for a in plan.axes if a.kind is not AxisKind.SERVER and a.name not in mesh]
    if not missing:
        return
    found = ", ".join(f"{name}={size}" for name, size in mesh.items()) or "no axes"
    raise CommplanError(
        *(
            _problem(
                plan,
                "CP0707",
                f"the mesh has no axis `{axis.name}`",
                axis.span,
                f"expected an axis `{axis.name}` of size {axis.size or 'your choice'}, found {found}",
                _mesh_fix(axis.name, axis.kind),
            )
            for axis in missing
        )
    )


def _whole(size: object) -> int | None:
    """`size` as an int where it is a whole number of any kind."""
    if isinstance(size, bool) or not isinstance(size, SupportsIndex):
        return None
    return operator.index(size)


def _mesh_fix(name: str, kind: AxisKind) -> str:
    if kind is AxisKind.ENSEMBLE:
        return f"members are spread over devices too: add an axis `{name}` to the mesh, of size 1 if need be"
    return f"add an axis `{name}` to the mesh, of size 1 if nothing is replicated along it"


def _unknown(plan: Plan, name: str) -> Diagnostic:
    known = [axis.name for axis in plan.axes]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"its axes are: {', '.join(known) or 'none'}"
    return _problem(plan, "CP0709", f"plan `{plan.name}` has no axis `{name}`", None, hint)


def _stage_rules(plan: Plan, axes: tuple[Axis, ...], stage: Stage) -> list[Diagnostic]:
    """Rules of stages that need numbers. The checker has seen them where the numbers were written."""
    sizes = {axis.name: axis.size for axis in axes}
    match stage:
        case Load():
            found = _load(stage, sizes)
        case Broadcast():
            found = _root(stage, sizes)
        case Share() | Exchange():
            found = _workers(stage, sizes)
        case Elastic():
            found = _overshoots(stage, sizes)
        case _:
            found = None
    return [] if found is None else [_problem(plan, "CP0710", found[0], stage.span, *found[1:])]


def _load(stage: Load, sizes: Mapping[str, int]) -> Broken:
    """Each member on its own clock has a batch size; batches are split evenly."""
    if stage.clock is not None and len(stage.batch) != sizes[stage.clock]:
        given = f"{len(stage.batch)} batch size{'s' * (len(stage.batch) != 1)}"
        members = f"{sizes[stage.clock]} member{'s' * (sizes[stage.clock] != 1)}"
        return (
            f"{given} for the {members} of `{stage.clock}`",
            "each member has one, in member order",
        )
    ways = _ranks(stage.split, sizes)
    uneven = next((batch for batch in stage.batch if batch % ways), None)
    if uneven is None:
        return None
    lower, upper = uneven // ways * ways, (uneven // ways + 1) * ways
    where = f"the {ways} ranks of {_named(stage.split, sizes)}"
    return (
        f"a batch of {uneven} records cannot be split evenly over {where}",
        f"the nearest that can are {lower} and {upper}" if lower else f"the smallest that can is {upper}",
    )


def _root(stage: Broadcast, sizes: Mapping[str, int]) -> Broken:
    """The root of a broadcast is one of its ranks."""
    ranks = _ranks(stage.over, sizes)
    if stage.root < ranks:
        return None
    major = ", row-major, the first axis named major" if len(stage.over) > 1 else ""
    there = f"{'has' if len(stage.over) == 1 else 'have'} {ranks} {'rank' if ranks == 1 else 'ranks'}"
    return (
        f"the root {stage.root} is out of range: {_named(stage.over, sizes)} {there}",
        f"ranks count from 0{major}",
    )


def _workers(stage: Share | Exchange, sizes: Mapping[str, int]) -> Broken:
    """Readers are members, and owners are workers: no more than there are."""
    who, of = ("readers", "members") if isinstance(stage, Share) else ("owners", "workers")
    asked = stage.via.get(who) if stage.via is not None else None
    there = _ranks(stage.over, sizes)
    if asked is None or 1 <= int(asked) <= there:
        return None
    return (
        f"{asked} {who} are more than the {there} {of} of {_named(stage.over, sizes)}",
        f"{who} are {of}: at least 1, at most all of them",
    )


def _overshoots(stage: Elastic, sizes: Mapping[str, int]) -> Broken:
    """Literal coefficients move the centre by less than all of the way: p * eta * rho < 1.

    The bound is that of Zhang, Choromanska and LeCun 2015 (Deep learning with elastic averaging
    SGD); a server that meets one worker at a time has p = 1.
    """
    if not isinstance(stage.eta, float) or not isinstance(stage.rho, float):
        return None
    workers = _ranks(stage.over, sizes) if stage.mode == "sync" else 1
    moved = Fraction(str(stage.eta)) * Fraction(str(stage.rho)) * workers  # as it was written
    if moved < 1:
        return None
    sync = stage.mode == "sync"
    return (
        f"`{stage.mode}` is unstable: eta * rho{' * p' * sync} = {float(moved):.6g}, and it must be below 1"
        + f", with p = {workers} workers" * sync,
        f"the centre would keep {float(1 - moved):.6g} of itself at every exchange",
        "the bound is that of Zhang, Choromanska and LeCun (2015), beta = p * eta * rho < 1",
    )


def _ranks(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in axes)


def _named(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    return " and ".join(f"`{name} = {sizes[name]}`" for name in axes)


def _problem(plan: Plan, code: str, message: str, span: Span | None, *notes: str) -> Diagnostic:
    return Diagnostic(code, message, span, tuple(Note(note) for note in notes), file=plan.file)
