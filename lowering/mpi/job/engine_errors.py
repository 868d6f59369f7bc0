"""Converts failures of the engine to diagnostics. XLA passes their text in an exception of JAX."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from commplan.diagnostics import CommplanError, Diagnostic, Note, Span
from commplan.lowering.mpi.job.interruption import interruption

# An error of the engine (`as_error` of leaving.cpp) within the text of JAX's exception.
_ENGINE_ERROR = re.compile(
    r"commplan: (?:error\[(?P<code>CP\d{4})\]: )?"
    r"(?:an earlier operation failed: (?:(?P<earlier>CP\d{4}): )?)?(?P<what>.*)",
    re.DOTALL,
)
_WHERE = re.compile(r"; (?P<text>line (?P<line>\d+) of .* waits for it)\s*$", re.DOTALL)  # see `waiting_line`
_AGAIN = re.compile(r"(?:Error dispatching computation: )+(?=commplan: )")  # the prefixes that `once` removes
_NOTE = "note: "  # prefix of further lines of an error
IS_REPORTED = "commplan_reported"  # an attribute of errors that all living ranks have received


def waiting_line(line: int, file: str) -> str:
    """The text with the waiting line of the plan that the engine appends to failures; read by `reason`."""
    return f"line {line} of {file or 'the plan'} waits for it"


def reason(error: BaseException, spans: Sequence[Span] = (), file: str = "") -> Diagnostic | None:
    """The engine's message with the line of the plan that waited; None for other errors.

    The code is that of the sidecar's verdict, or CP0834.

    Args:
        error: The exception that JAX raised when a result was used.
        spans: The spans of the plan's ops. The diagnostic has the first one on the waiting line, or none.
        file: The plan's file.
    """
    match = _ENGINE_ERROR.search(str(error)) if isinstance(error, ValueError | RuntimeError) else None
    if match is None:
        return None
    message = match["what"].strip()
    notes: list[Note] = []
    where = _WHERE.search(message)
    span = None
    if where is not None:
        message = message[: where.start()]
        notes.append(Note(where["text"]))
        span = next((candidate for candidate in spans if candidate.line == int(where["line"])), None)
    first, *details = message.splitlines() or ["an operation failed"]
    notes += [Note(line.strip().removeprefix(_NOTE)) for line in details if line.strip()]
    return Diagnostic(match["earlier"] or match["code"] or "CP0834", first, span, tuple(notes), file=file)


def once(error: BaseException) -> None:
    """Remove the prefixes that XLA adds to the engine's error, one for each later step. Changes `error`."""
    text = str(error)
    if isinstance(error, ValueError | RuntimeError) and (shorter := _AGAIN.sub("", text)) != text:
        error.__init__(shorter)  # JAX's exceptions print their constructor argument, whatever `args` is


@contextmanager
def as_diagnostics(spans: Sequence[Span] = (), file: str = "") -> Generator[None]:
    """A context that converts JAX's exceptions for failures of the engine; see `reason` for the arguments.

    Raises:
        CommplanError: The diagnostic of `reason`, for a failure of the engine.
        BaseException: The exception of a signal handler, if it interrupted an operation.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if (cause := interruption(error)) is not None:
            raise cause from None
        diagnostic = reason(error, spans, file)
        if diagnostic is None:
            raise
        raise CommplanError(diagnostic) from error
