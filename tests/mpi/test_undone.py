"""Errors of the engine, recovered from the text of a JAX exception."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from support import mpirun

from commplan.diagnostics import Span
from commplan.ir.plan import Algorithm
from commplan.lowering.mpi.job.engine_errors import once, reason, waiting_line

mpirun.needs_mpi()

from commplan.lowering.mpi.collectives import _label  # noqa: E402  # pyright: ignore[reportPrivateUsage]
from commplan.lowering.mpi.tuning import Spec  # noqa: E402

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
    shown = reason(RuntimeError(f"INTERNAL: {2 * AGAIN}{TEXT}"), [Span(1, 1, 1, 2), span], "a.plan")
    assert shown is not None
    assert (shown.code, shown.span, shown.file) == ("CP0834", span, "a.plan")
    assert shown.message == SAID.splitlines()[0]
    assert [note.text for note in shown.notes] == ["line 22 of a.plan waits for it", "a replay ends"]


@pytest.mark.parametrize(
    "text",
    ["error[CP0854]: rank 1 compares", "error[CP0834]: an earlier operation failed: CP0854: rank 1 compares"],
)
def test_the_reason_has_the_code_of_a_verdict(text: str) -> None:
    shown = reason(RuntimeError(f"INTERNAL: commplan: {text}\nnote: a fix; line 22 of a.plan waits for it"))
    assert shown is not None and (shown.code, shown.message) == ("CP0854", "rank 1 compares")


@pytest.mark.parametrize("file", ["a.plan", "", "line 3 of b waits for it; c\n.plan"])
def test_a_waiting_line_is_recovered_from_the_text(file: str) -> None:
    text = waiting_line(22, file)
    shown = reason(RuntimeError(f"commplan: rank 2 has died; {text}"), [Span(3, 1, 3, 2), Span(22, 1, 22, 2)])
    assert shown is not None and shown.span == Span(22, 1, 22, 2)
    assert (shown.message, [note.text for note in shown.notes]) == ("rank 2 has died", [text])


def test_labels_of_messages_depend_on_the_collective_and_not_on_files_or_records() -> None:
    spec = Spec("all_reduce", ("data",), algorithm=Algorithm("ring"), line=7, file="/a/line 8.plan")
    same = [spec, dataclasses.replace(spec, file="/b/x.plan"), dataclasses.replace(spec, opens="step")]
    assert len({_label(each, 100, np.dtype("float32")) for each in same}) == 1
    variants = [dataclasses.replace(spec, line=8), dataclasses.replace(spec, op="max"), spec]
    assert len({_label(each, 100, np.dtype("float32")) for each in variants}) == 3
    assert _label(spec, 101, np.dtype("float32")) != _label(spec, 100, np.dtype("float32"))
