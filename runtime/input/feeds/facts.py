"""What the members of a feed must have alike, and how it is told where they do not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, NoReturn

from commplan.diagnostics import fail, text_of
from commplan.input.order import folded
from commplan.runtime.input.feeds.maker import UnitMaker
from commplan.runtime.input.feeds.memory import Facts
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.sources import pipelines
from commplan.runtime.input.sources.adapters import Source


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
        {source: (len(sources[source]), _key(source, given.get(source))) for source in reads},
        {fn: source_digest(functions[fn]) for fn in called},
    )  # fmt: skip


def _key(name: str, source: object) -> str:
    """What a source says of its content: its `key`, else the fingerprint of a Hugging Face data set, else
    what a pipeline of Grain does. Errors: CP0902 where that raises."""
    for attribute in ("key", "_fingerprint"):
        try:
            key = getattr(source, attribute, None)
        except Exception as error:  # noqa: BLE001  the user's code
            fail(
                "CP0902",
                f"the attribute `{attribute}` of source `{name}` cannot be read: {text_of(error)}",
                "it is a str or an int that tells the content of the source, or is not there",
            )
        if isinstance(key, str | int | bytes) and not isinstance(key, bool):
            return str(key)[:200]
    words = pipelines.content(source, source_digest)
    return "" if words is None else _digest(*words)


def source_digest(function: object) -> str:
    """A digest of what `function` says: of its source, else of its code; with what a partial fixes."""
    if isinstance(function, functools.partial):
        fixed = repr((function.args, sorted(function.keywords.items())))
        return _digest(source_digest(function.func), fixed)
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    subject: Any = function if code is not None or inspect.isbuiltin(function) else type(function)
    try:
        return _digest(inspect.getsource(subject))
    except (OSError, TypeError):
        pass
    if isinstance(code, CodeType):
        return _digest(code.co_code.hex(), repr([c for c in code.co_consts if not isinstance(c, CodeType)]))
    names = [getattr(subject, attribute, "") for attribute in ("__module__", "__qualname__")]
    return _digest(*(str(name) for name in names))


def _digest(*texts: str) -> str:
    return digest("\0".join(texts).encode())


def digest(data: bytes) -> str:
    """64 bits in hex that depend on every byte. Who has the feed's memory could write anything there, so that
    it need not be cryptographic; loading OpenSSL takes more memory than all else of a feed."""
    words = memoryview(data.ljust(-(-len(data) // 8) * 8, b"\0")).cast("Q")
    return f"{folded(len(data), *words):016x}"


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
