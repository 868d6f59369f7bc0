"""What the members of a feed must have alike, and how it is told where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from commplan.diagnostics import fail
from commplan.runtime.input.feeds.maker import UnitMaker
from commplan.runtime.input.feeds.memory import Facts
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.sources.adapters import Source
from commplan.runtime.input.sources.content_keys import source_digest, source_key


def facts_of(
    name: str, plan: ClockPlan, unit: int, maker: UnitMaker,
    sources: Mapping[str, Source], given: Mapping[str, object], functions: Mapping[str, Callable[..., Any]],
) -> Facts:  # fmt: skip
    """Of what makes the units: what members do for themselves is no part of it. given: sources as they were
    given, which may have a `key`."""
    schedule = plan.schedule
    reads = sorted({read.source for flow in maker.program.flows for read in flow.reads})
    called = sorted(fn.name for fn in schedule.fns if fn.name in maker.called)
    return Facts(
        name, schedule.plan, schedule.plan_digest, plan.phase, unit,
        {source: (len(sources[source]), source_key(source, given.get(source))) for source in reads},
        {fn: source_digest(functions[fn]) for fn in called},
    )  # fmt: skip


def refuse_unlike(mine: Facts, theirs: Facts, plan: ClockPlan) -> None:
    """Raise CP0922 where `mine`, what this process brings, is not what the feed was begun with."""
    if mine == theirs:
        return
    notes: list[str] = []
    if mine.digest != theirs.digest:
        texts = [f"{facts.plan} {facts.digest[:12]}" for facts in (mine, theirs)]
        notes.append(f"the plan: {texts[0]} here, {texts[1]} there")
    if (mine.phase, mine.unit) != (theirs.phase, theirs.unit):
        texts = [f"`{facts.phase}` in units of {facts.unit} records" for facts in (mine, theirs)]
        notes.append(f"phase {texts[0]} here, {texts[1]} there")
    notes += _unlike(
        "source",
        mine.sources,
        theirs.sources,
        lambda s: f"{s[0]} records" + (f", key {s[1]}" if s[1] else ""),
    )
    notes += _unlike("function", mine.functions, theirs.functions, lambda digest: f"source {digest}")
    _refuse(mine.name, notes, plan)


def _unlike(
    kind: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], text: Callable[[Any], str]
) -> list[str]:
    return [
        f"{kind} `{name}`: {text(mine[name])} here, {text(theirs[name])} there"
        for name in sorted(mine.keys() & theirs.keys())
        if mine[name] != theirs[name]
    ]


def _refuse(name: str, notes: list[str], plan: ClockPlan) -> NoReturn:
    fail(
        "CP0922",
        f"feed {name!r} was begun with something else than this process brings",
        *notes,
        "give it what the others have, or a name of its own",
        span=plan.schedule.phase(plan.phase).span,
        file=plan.schedule.file,
    )
