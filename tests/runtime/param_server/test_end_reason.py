"""The errors of workers after the end of their server."""

from __future__ import annotations

import pytest

from commplan.diagnostics import CommplanError, Diagnostic
from commplan.runtime.param_server.serve import end_reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("out of luck"), "ValueError: out of luck"),
        (SystemExit(0), "its program ended, by sys.exit(0)"),
        (SystemExit(), "its program ended, by sys.exit()"),
        (CommplanError(Diagnostic("CP0981", "worker 2 did not come")), "worker 2 did not come"),
    ],
)
def test_the_servers_end_is_said_in_words(error: BaseException, reason: str):
    assert reason in end_reason(error)
    assert "_Exit" not in end_reason(error)
