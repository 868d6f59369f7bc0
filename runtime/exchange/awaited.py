"""A state that is set again waits for every worker: it says for whom, and not for ever."""

from __future__ import annotations

import time

from commplan.diagnostics import fail
from commplan.runtime.exchange.driver import Driver

_LOOK_S = 1.0  # seconds between two looks
_SAY_S = 30.0  # and until workers that are waited for are named


class Awaited:
    """timeout: seconds that a put may wait. Workers that left or died are not waited for."""

    def __init__(self, driver: Driver, timeout: float) -> None:
        self._driver, self._timeout = driver, timeout
        self._looked = time.monotonic()
        self._since: dict[tuple[int, tuple[int, ...]], float] = {}
        self._said = False

    def word(self) -> str:
        """What to say now, mostly nothing. Raises CP0981 where it has been too long."""
        now = time.monotonic()
        if now - self._looked < min(_LOOK_S, self._timeout):
            return ""
        self._looked = now
        found = self._driver.machine.awaited()
        if found is None:
            self._since.clear()
            return ""
        site, workers = found
        key = (site.number, tuple(workers))
        if key not in self._since:
            self._since, self._said = {key: now}, False
        waited, file = now - self._since[key], self._driver.desks.schedule.file
        named = f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
        if waited >= self._timeout:
            fail(
                "CP0981",
                f"`{site.states[0]}` is set again, and {named} did not come to that line in {waited:.0f} s",
                "all workers call the phase that sets it as often as the first one; spare ones leave with"
                " run.close()",
                "run.serve(timeout=SECONDS) waits longer",
                span=site.span,
                file=file,
            )
        if waited < _SAY_S or self._said:
            return ""
        self._said = True
        return f"line {site.span.line} of {file or 'the plan'} sets `{site.states[0]}`, and waits for {named}"
