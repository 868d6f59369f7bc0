"""The limits of a wait for other ranks or processes: `watchdog_s`, `busy_s` and `on_hang`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from commplan.diagnostics import fail
from commplan.wait import check_seconds

BUSY_S = 600.0
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
        """Raise `code` if a value is invalid.

        Args:
            call: the function that takes the options, such as `program.bind(comm, {})`, for the fix.
            file: the plan's file.
        """

        def fix(option: str) -> str:
            return f"such as {call.format(option)}"

        forever = f"{fix('watchdog_s=60')}; None waits forever"
        check_seconds(code, "watchdog_s", self.watchdog_s, forever, file=file, also_allowed=(None,))
        check_seconds(code, "busy_s", self.busy_s, fix("busy_s=600"), file=file)
        if self.on_hang not in ("report", "abort"):
            message = f"on_hang is {self.on_hang!r}: expected 'report' or 'abort'"
            fail(code, message, fix("on_hang='report'"), file=file)


UNWATCHED = HangLimits()


def most_patient(limits: Sequence[HangLimits]) -> HangLimits:
    """The limits of a job, from those of its ranks.

    The longest times apply. The watchdog is disabled if one rank disables it, and operations fail only if all
    ranks have `on_hang="abort"`.
    """
    bounds = [each.watchdog_s for each in limits if each.watchdog_s is not None]
    bound = max(bounds) if len(bounds) == len(limits) else None
    ends = all(each.on_hang == "abort" for each in limits)
    return HangLimits(bound, max(each.busy_s for each in limits), "abort" if ends else "report")
