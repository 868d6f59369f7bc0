# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""A type checker's findings in uses of a stub: an unnecessary comment is an error as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plans


def output(out: plans.LinearStartOutputs) -> object:
    return out.centre  # type: ignore[attr-defined]


def output_by_name(out: plans.LinearStartOutputs) -> object:
    return out["centre"]  # type: ignore[index]


def period(run: plans.Linear) -> object:
    return run.every[5]  # type: ignore[call-overload]


def phase(run: plans.Linear) -> object:
    return run.evalute  # type: ignore[attr-defined]


def missing_input(run: plans.Linear, state: plans.LinearState) -> object:
    return run.step(state)  # type: ignore[call-arg]


def unknown_input(run: plans.Linear, state: plans.LinearState) -> object:
    return run.start(state, params=1, grad=1)  # type: ignore[call-arg]


def missing_state(run: plans.Linear) -> object:
    return run.evaluate({})  # type: ignore[typeddict-item]


def state(held: plans.LinearState) -> object:
    return held["centre"]  # type: ignore[typeddict-item]


def value(run: plans.Linear) -> object:
    return run.sharding("centre")  # type: ignore[arg-type]
