"""The limits of a wait for other ranks or processes: `watchdog_s`, `busy_s` and `on_hang`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from commplan.diagnostics import fail
from commplan.wait import check_seconds

BUSY_S = 600.0  # default of `busy_s`, in seconds
OnHang = Literal["report", "abort"]


class HangLimits(NamedTuple):
    """The limits after which a rank that blocks others is reported.

    Attributes:
        watchdog_s: Seconds without progress before a rank is reported; None disables the watchdog.
        busy_s: Seconds to wait for a rank that is alive and busy with other work.
        on_hang: `abort`: operations that wait for the rank fail. `report`: its name is printed, and they
            continue to wait.
    """

    watchdog_s: float | None = None
    busy_s: float = BUSY_S
    on_hang: OnHang = "abort"

    def check(self, code: str, call: str, file: str = "") -> None:
        """Raise a `CommplanError` if a value is invalid.

        Args:
            code: the code of the error.
            call: a format of the call that takes the options, such as `program.bind(comm, {})`. The error
                suggests it with a valid option in place of `{}`.
            file: the plan's file; empty if there is none.
        """

        def fix(option: str) -> str:
            return f"such as {call.format(option)}"

        forever = f"{fix('watchdog_s=60')}; None waits forever"
        check_seconds(code, "watchdog_s", self.watchdog_s, forever, file=file, also_allowed=(None,))
        check_seconds(code, "busy_s", self.busy_s, fix("busy_s=600"), file=file)
        if self.on_hang not in ("report", "abort"):
            message = f"on_hang is {self.on_hang!r}: expected 'report' or 'abort'"
            fail(code, message, fix("on_hang='report'"), file=file)


UNWATCHED = HangLimits()  # no watchdog


def most_patient(limits: Sequence[HangLimits]) -> HangLimits:
    """The limits of a job, from the limits of its ranks, at least one.

    The longest times apply. The watchdog is disabled if one rank disables it, and operations fail only if all
    ranks have `on_hang="abort"`.
    """
    watchdogs = [rank_limits.watchdog_s for rank_limits in limits if rank_limits.watchdog_s is not None]
    watchdog_s = max(watchdogs) if len(watchdogs) == len(limits) else None
    aborts = all(rank_limits.on_hang == "abort" for rank_limits in limits)
    busy_s = max(rank_limits.busy_s for rank_limits in limits)
    return HangLimits(watchdog_s, busy_s, "abort" if aborts else "report")
