"""Failures of the engine as diagnostics. XLA passes on their text in an exception of JAX."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from commplan.diagnostics import CommplanError, Diagnostic, Note, Span
from commplan.lowering.mpi.job.interruption import interruption

_SAID = re.compile(
    r"commplan: (?:error\[CP0834\]: )?(?:an earlier operation failed: )?(?P<what>.*)", re.DOTALL
)
_WHERE = re.compile(r"; (?P<text>line (?P<line>\d+) of .* waits for it)\s*$", re.DOTALL)
_AGAIN = re.compile(r"(?:Error dispatching computation: )+(?=commplan: )")
_NOTE = "note: "
TOLD = "commplan_told"  # an attribute of errors that all ranks that live have been told of


def reason(error: BaseException, spans: Sequence[Span] = (), file: str = "") -> Diagnostic | None:
    """CP0834 with what the engine said, and the place of the line that waited; None for errors of others.

    error: what JAX raised when a result was asked for. spans: those of the plan's ops.
    """
    match = _SAID.search(str(error)) if isinstance(error, ValueError | RuntimeError) else None
    if match is None:
        return None
    message, notes = match["what"].strip(), list[Note]()
    where = _WHERE.search(message)
    span = None
    if where is not None:
        message = message[: where.start()]
        notes.append(Note(where["text"]))
        span = next((candidate for candidate in spans if candidate.line == int(where["line"])), None)
    first, *others = message.splitlines() or ["an operation failed"]
    notes += [Note(line.strip().removeprefix(_NOTE)) for line in others if line.strip()]
    return Diagnostic("CP0834", first, span, tuple(notes), file=file)


def once(error: BaseException) -> None:
    """Drop the prefixes of an engine's error, which XLA adds once for every step started meanwhile."""
    text = str(error)
    if isinstance(error, ValueError | RuntimeError) and (shorter := _AGAIN.sub("", text)) != text:
        error.__init__(shorter)  # JAX's says what it was made with, whatever its `args` are


@contextmanager
def as_diagnostics(spans: Sequence[Span] = (), file: str = "") -> Generator[None]:
    """Raises CP0834 in place of the JAX exception for a failure of the engine."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if (cause := interruption(error)) is not None:
            raise cause from None
        diagnostic = reason(error, spans, file)
        if diagnostic is None:
            raise
        raise CommplanError(diagnostic) from error
