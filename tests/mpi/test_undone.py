"""Errors of the engine, recovered from the text of a JAX exception."""

from __future__ import annotations

import jax
import pytest

from commplan.diagnostics import Span
from commplan.lowering.mpi.job.engine_errors import once, reason

SAID = "server 0 of `hub` (rank 2) gave up: error[CP0977]: worker 0 goes on\n  note: a replay ends"
TEXT = f"commplan: error[CP0834]: {SAID}; line 22 of a.plan waits for it"
AGAIN = "Error dispatching computation: "


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, jax.errors.JaxRuntimeError])
def test_it_is_said_once_however_many_steps_were_begun(kind: type[Exception]) -> None:
    error = kind(f"INTERNAL: {3 * AGAIN}{TEXT}")
    once(error)
    assert str(error) == f"INTERNAL: {TEXT}"
    once(error)
    assert str(error) == f"INTERNAL: {TEXT}"


def test_errors_of_others_stay_as_they_are() -> None:
    for error in (RuntimeError(f"{AGAIN}out of memory"), ValueError(), OSError(2, f"{AGAIN}commplan: x")):
        before = error.args
        once(error)
        assert error.args == before
    assert reason(RuntimeError("out of memory")) is None


def test_the_reason_has_the_line_that_waited() -> None:
    span = Span(22, 5, 22, 9)
    found = reason(RuntimeError(f"INTERNAL: {2 * AGAIN}{TEXT}"), [Span(1, 1, 1, 2), span], "a.plan")
    assert found is not None
    assert (found.code, found.span, found.file) == ("CP0834", span, "a.plan")
    assert found.message == SAID.splitlines()[0]
    assert [note.text for note in found.notes] == ["line 22 of a.plan waits for it", "a replay ends"]
