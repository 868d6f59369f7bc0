"""`commplan.join`: independently started programs on one host share their input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from commplan import io
from commplan.diagnostics import fail, type_of
from commplan.ir.plan import AxisKind
from commplan.ir.schedule import Schedule
from commplan.runtime.input.feeds import compiled
from commplan.runtime.input.feeds.feed import Feed
from commplan.runtime.input.feeds.joining import MEMBERS
from commplan.runtime.input.multirate.schedule import ClockPlan, clock_plan, shared_stream_axis
from commplan.runtime.input.observe.wait_log import PATIENCE_S
from commplan.runtime.input.restarts import Restarts
from commplan.runtime.input.ring.meeting import check_name
from commplan.tracebacks import ends_at_caller

if TYPE_CHECKING:
    from commplan.api import Plan, Program


_RESTARTS = Restarts()  # warns if this process repeats an epoch of a feed


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
    epochs: Literal["shared", "own"] = "shared",
) -> Feed:
    """Join a feed. Its members on this host share the reading and decoding of records.

    A process may join at any time, without JAX, MPI or a launcher. The first process creates the feed; others
    must have the same plan, sources and functions. Iterate over the result, one epoch at a time: each batch
    is a mapping from names to read-only NumPy arrays in shared memory.

    Args:
        name: name of the feed, unique for host and user; letters, digits, `-`, `_` and `.`.
        plan: the path of a plan, or a loaded or compiled one. Its ensemble consists of the processes that
            join.
        sources: data, by the plan's names. They are compared by length, and by their attribute `key` if
            present.
        functions: functions, by the plan's names. They are compared by name and source code.
        member: index of this member, by default the first free one. Values `per` member, such as results of
            random functions, depend on it.
        state: a result of `feed.state()` to resume from. Without it, a late member begins with the next epoch
            that no member has begun, or immediately if all loads are `at_least_once`; see `epochs`.
        phase: the phase of the plan.
        batch: records per step of this member, a multiple of the plan's batch.
        timeout: seconds to wait for another member or for a producer before raising an error that names it.
        epochs: if `own`, a late member without a state begins with epoch 0, and all members with the same
            `batch` get the same batches, epoch by epoch. Until it has caught up, it reads its input
            separately, and the others do not wait for it.

    Returns:
        The feed.

    Raises:
        CommplanError: CP0900 and CP0908 for sources and functions that are not mappings; CP0922 if the plan,
            sources or functions differ from those of the feed; CP0928 for an invalid name or `epochs`; CP0929
            for a member that has joined already; CP0930 if the plan shares nothing; CP0931 for an invalid
            batch; CP0932 for functions on devices; CP09xx as for other batches. `next` raises CP0947 on a
            timeout, and may be called again.
    """
    check_name(name)
    mappings: list[tuple[str, str, object]] = [
        ("CP0900", "sources", sources),
        ("CP0908", "functions", functions or {}),
    ]
    for code, argument, mapping in mappings:
        if not isinstance(mapping, Mapping):
            fail(
                code,
                f"{argument} are passed by the plan's names, not as {type_of(mapping)}",
                f"{argument}={{NAME: ..}}",
            )

    def open_feed(schedule: Schedule) -> Feed:
        """Join, or create, the feed of a compiled plan."""
        clocks = _clock_plan(schedule, phase)
        feed = Feed(
            name, clocks, sources, dict(functions or {}), member=member, state=state, batch=batch,
            timeout=timeout, epochs=epochs,
        )  # fmt: skip
        if state is None and epochs == "shared":  # trials of one process have the same batches on purpose
            key = (name, feed.member, schedule.plan_digest, phase, *feed.state().values())
            feed.restart = _RESTARTS.begin(
                f"the batches of feed `{name}`", f'commplan.join("{name}", ..)', key
            )
        return feed

    text = _text(plan) if isinstance(plan, str | Path) else None
    if text is None:
        return open_feed(_compiled(plan))
    # The feed keeps the schedule, so that later members with the same text need not compile it.
    key = compiled.key_of(text.encode())
    with compiled.kept(name, key, str(plan)) as schedule:
        feed = open_feed(schedule or _compiled(plan, text))
        feed.keep_compiled(key)
        return feed


def _clock_plan(schedule: Schedule, phase: str) -> ClockPlan:
    """The progress of members through `phase`. Raises CP0930 if they share nothing."""
    feed_phase = schedule.phase(phase)
    if shared_stream_axis(schedule, feed_phase) is None:
        fail(
            "CP0930",
            f"phase `{phase}` shares nothing between members",
            "a feed shares values that are the same for all members of an ensemble: `ensemble member = ?`",
            span=feed_phase.span,
            file=schedule.file,
        )
    return clock_plan(schedule, phase)


def _text(path: str | Path) -> str | None:
    """The text of the file at `path`; None if it cannot be read, which `_compiled` reports as an error."""
    try:
        return io.read(path).decode("utf-8")
    except (OSError, ValueError):
        return None


def _compiled(plan: object, text: str | None = None) -> Schedule:
    """The schedule of a plan. Its ensemble has `MEMBERS` members if open; other open axes have size 1.

    Args:
        plan: the argument of `join`.
        text: the content of the file `plan`, if it has been read.

    Raises:
        CommplanError: CP0928 for another type of plan, or an error of loading or compiling it.
    """
    from commplan.api import Plan, Program, load, loads  # noqa: PLC0415  the compiler is loaded only here

    if isinstance(plan, Program):
        return plan.schedule
    if isinstance(plan, str | Path):
        plan = load(plan) if text is None else loads(text, str(plan))
    if not isinstance(plan, Plan):
        fail("CP0928", f"the plan is {type_of(plan)}: expected a path, or a result of commplan.load")
    ensembles = [axis.name for axis in plan.graph.axes if axis.kind is AxisKind.ENSEMBLE]
    axes = {
        axis.name: (MEMBERS if axis.name in ensembles[:1] else 1)
        for axis in plan.graph.axes
        if axis.size is None
    }
    return plan.compile(axes=axes).schedule
