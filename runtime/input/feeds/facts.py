"""The facts that all members of a feed must agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from commplan.diagnostics import fail
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.ring.units import UnitProgram
from commplan.runtime.input.sources.adapters import Source
from commplan.runtime.input.sources.content_keys import source_digest, source_key


def facts_of(
    plan: ClockPlan, content: UnitProgram, sources: Mapping[str, Source], given: Mapping[str, object],
    functions: Mapping[str, Callable[..., Any]],
) -> dict[str, str]:  # fmt: skip
    """What the units depend on, by words for messages; the members' own work is no part of it. given: sources
    as they were passed, which may have a `key`."""
    schedule = plan.schedule
    facts = {
        "the plan": f"{schedule.plan} {schedule.plan_digest}",
        "phase": plan.phase,
        "the unit": f"{content.rows} records",
    }
    for name in sorted({read.source for flow in content.program.flows for read in flow.reads}):
        key = source_key(name, given.get(name))
        facts[f"source `{name}`"] = f"{len(sources[name])} records" + (f", key {key}" if key else "")
    for name in sorted(fn.name for fn in schedule.fns if fn.name in content.called):
        facts[f"function `{name}`"] = f"source {source_digest(functions[name])}"
    return facts


def refuse_unlike(name: str, mine: Mapping[str, str], theirs: Mapping[str, str], plan: ClockPlan) -> None:
    """Raise CP0922 if `mine`, the facts of this process, differ from `theirs`, those of feed `name`."""
    if mine == theirs:
        return
    fail(
        "CP0922",
        f"feed {name!r} was begun with something else than this process brings",
        *(
            f"{subject}: {mine[subject]} here, {theirs[subject]} there"
            for subject in mine
            if theirs.get(subject, mine[subject]) != mine[subject]
        ),
        "give it what the others have, or a name of its own",
        span=plan.schedule.phase(plan.phase).span,
        file=plan.schedule.file,
    )
