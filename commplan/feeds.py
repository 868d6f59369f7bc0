"""`commplan.join`: programs that were started by themselves share the input of one host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commplan import io
from commplan.diagnostics import fail
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Schedule
from commplan.runtime.input.feeds import compiled
from commplan.runtime.input.feeds.attachment import MEMBERS
from commplan.runtime.input.feeds.feed import Feed
from commplan.runtime.input.multirate.schedule import ClockPlan, clock_plan, taken_apart
from commplan.runtime.input.observe.wait_log import PATIENCE_S
from commplan.runtime.input.restarts import Restarts
from commplan.runtime.input.ring.meeting import check_name
from commplan.tracebacks import ends_at_caller

if TYPE_CHECKING:
    from commplan.api import Plan, Program


_RESTARTS = Restarts()


@ends_at_caller
def join(
    name: str,
    plan: str | Path | Plan | Program,
    *,
    sources: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]] | None = None,
    member: int | None = None,
    state: Mapping[str, int] | None = None,
    phase: str = "step",
    batch: int | None = None,
    timeout: float = PATIENCE_S,
) -> Feed:
    """Take part in the feed `name` of this host and user: read and decode each record once for all its
    members.

    Any process, at any time; without JAX, MPI or a launcher. The first one begins the feed, and others must
    bring the same plan, sources and functions. Iterate over what is returned, an epoch at a time: each
    batch is a mapping from names to NumPy arrays that show the shared memory, read-only and without a copy.

    name: letters, digits, `-`, `_` and `.`. plan: the path of a plan, or one that is loaded or compiled;
    its ensemble is who comes. sources, functions: by the plan's names; sources are compared by length, and
    by their attribute `key` where they have one, functions by name and source. member: which member of the
    ensemble this one is, by default the first that is free: what is `per` member, such as random functions,
    depends on it. state: what `feed.state()` returned, to go on there. Without it one who comes late begins
    with the next epoch that nobody has begun, or at once where all loads are `at_least_once`. phase: of the
    plan. batch: records of a step of this member, a multiple of the plan's. timeout: seconds to wait for
    another member, or for who makes a unit, before that is an error that names it.

    Errors: CP0900 and CP0908 for sources and functions that are not given by name; CP0922 for a plan, sources
    or functions that are not those of the feed; CP0928 for a name, CP0929 for a member that is there already,
    CP0930 where there is nothing to share, CP0931 for a batch that is no multiple, CP0932 for what a device
    would make; CP09xx as for other batches. CP0947 by `next`, where another member was waited for too long;
    it may be caught, and `next` called again.
    """
    check_name(name)
    by_name: list[tuple[str, str, object]] = [
        ("CP0900", "sources", sources),
        ("CP0908", "functions", functions or {}),
    ]
    for code, kind, given in by_name:
        if not isinstance(given, Mapping):
            fail(
                code,
                f"{kind} are given by the plan's names, not as a {type(given).__name__}",
                f"{kind}={{NAME: ..}}",
            )

    def joined(schedule: Schedule) -> Feed:
        taken_by = _clock_plan(schedule, phase)
        feed = Feed(
            name, taken_by, sources, dict(functions or {}), member=member, state=state, batch=batch,
            timeout=timeout,
        )  # fmt: skip
        if state is None:
            key = (name, feed.member, schedule.plan_digest, phase, *feed.state().values())
            feed.restart = _RESTARTS.begin(
                f"the batches of feed `{name}`", f'commplan.join("{name}", ..)', key
            )
        return feed

    text = _text(plan) if isinstance(plan, str | Path) else None
    if text is None:
        return joined(_compiled(plan))
    key = compiled.key_of(text.encode())
    with compiled.kept(name, key, str(plan)) as schedule:
        feed = joined(schedule or _compiled(plan, text))
        feed.keep_compiled(key)
        return feed


def _clock_plan(schedule: Schedule, phase: str) -> ClockPlan:
    """How the members go through `phase`. Errors: CP0930 where they share nothing."""
    shared = schedule.phase(phase)
    if taken_apart(schedule, shared) is None:
        fail(
            "CP0930",
            f"phase `{phase}` shares nothing between members",
            "a feed shares what is the same for all members of an ensemble: `ensemble member = ?`",
            span=shared.span,
            file=schedule.file,
        )
    return clock_plan(schedule, phase)


def _text(path: str | Path) -> str | None:
    """The plan in the file at `path`; None where it cannot be read, which compiling it says."""
    try:
        return io.read(path).decode("utf-8")
    except (OSError, ValueError):
        return None


def _compiled(plan: object, text: str | None = None) -> Schedule:
    """The schedule of a plan with as many members as may come, where it does not say, and else one of
    everything. text: what the file `plan` holds, where it has been read."""
    from commplan.api import Plan, Program, load, loads  # noqa: PLC0415  the compiler is loaded only here

    if isinstance(plan, Program):
        return plan.schedule
    if isinstance(plan, str | Path):
        plan = load(plan) if text is None else loads(text, str(plan))
    if not isinstance(plan, Plan):
        fail("CP0928", f"a plan is a path, or what commplan.load returns, not a {type(plan).__name__}")
    ensembles = [axis.name for axis in plan.graph.axes if axis.kind is AxisKind.ENSEMBLE]
    axes = {
        axis.name: (MEMBERS if axis.name in ensembles[:1] else 1)
        for axis in plan.graph.axes
        if axis.size is None
    }
    return plan.compile(axes=axes).schedule
