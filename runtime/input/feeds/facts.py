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
    plan: ClockPlan, content: UnitProgram, sources: Mapping[str, Source],
    passed_sources: Mapping[str, object], functions: Mapping[str, Callable[..., Any]],
) -> dict[str, str]:  # fmt: skip
    """Describe everything that determines the units of a feed, without the members' private work.

    Args:
        plan: the schedules of the members.
        content: the program of the units.
        sources: the sources by name.
        passed_sources: the sources as passed by the user, which may have an attribute `key`.
        functions: the functions by name.

    Returns:
        Descriptions by subject, both in words for messages.
    """
    schedule = plan.schedule
    facts = {
        "the plan": f"{schedule.plan} {schedule.plan_digest}",
        "phase": plan.phase,
        "the unit": f"{content.rows} records",
    }
    for name in sorted({read.source for flow in content.program.flows for read in flow.reads}):
        key = source_key(name, passed_sources.get(name))
        facts[f"source `{name}`"] = f"{len(sources[name])} records" + (f", key {key}" if key else "")
    for name in sorted(fn.name for fn in schedule.fns if fn.name in content.called):
        facts[f"function `{name}`"] = f"source {source_digest(functions[name])}"
    return facts


def refuse_unlike(name: str, mine: Mapping[str, str], theirs: Mapping[str, str], plan: ClockPlan) -> None:
    """Check that this process agrees with a feed.

    Args:
        name: the name of the feed.
        mine: the facts of this process.
        theirs: the facts of the feed.
        plan: the schedules of the members.

    Raises:
        CommplanError: CP0922 if the facts differ.
    """
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
