"""What stages ask of the sizes of axes: rules that can be checked only once every axis has a number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from commplan.diagnostics import Diagnostic, Note
from commplan.ir.plan import Broadcast, Elastic, Exchange, Load, Plan, Share, Stage
from commplan.ir.schedule import Axis

Broken = tuple[str, ...] | None  # a message and its notes, where a rule is broken


def stage_rules(plan: Plan, axes: tuple[Axis, ...], stage: Stage) -> list[Diagnostic]:
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
    return [] if found is None else [_problem(plan, stage, found)]


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
    ranks = _ranks(stage.axes, sizes)
    if stage.root < ranks:
        return None
    major = ", row-major, the first axis named major" if len(stage.axes) > 1 else ""
    there = f"{'has' if len(stage.axes) == 1 else 'have'} {ranks} {'rank' if ranks == 1 else 'ranks'}"
    return (
        f"the root {stage.root} is out of range: {_named(stage.axes, sizes)} {there}",
        f"ranks count from 0{major}",
    )


def _workers(stage: Share | Exchange, sizes: Mapping[str, int]) -> Broken:
    """Readers are members, and owners are workers: no more than there are."""
    who, of = ("readers", "members") if isinstance(stage, Share) else ("owners", "workers")
    asked = stage.via.get(who) if stage.via is not None else None
    there = _ranks(stage.axes, sizes)
    if asked is None or 1 <= int(asked) <= there:
        return None
    return (
        f"{asked} {who} are more than the {there} {of} of {_named(stage.axes, sizes)}",
        f"{who} are {of}: at least 1, at most all of them",
    )


def _overshoots(stage: Elastic, sizes: Mapping[str, int]) -> Broken:
    """Literal coefficients move the centre by less than all of the way: p * eta * rho < 1.

    The bound is that of Zhang, Choromanska and LeCun 2015 (Deep learning with elastic averaging
    SGD); a server that meets one worker at a time has p = 1.
    """
    if not isinstance(stage.eta, float) or not isinstance(stage.rho, float):
        return None
    workers = _ranks(stage.axes, sizes) if stage.mode == "sync" else 1
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


def _problem(plan: Plan, stage: Stage, broken: tuple[str, ...]) -> Diagnostic:
    return Diagnostic("CP0710", broken[0], stage.span, tuple(map(Note, broken[1:])), file=plan.file)
