"""Counterexamples to chunk programs, as data that can be replayed."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from commplan.diagnostics import Diagnostic, Note, Span

# Failure modes and their error codes.
CODES = {
    "range": "CP0742",  # a rank or chunk that does not exist
    "mismatch": "CP0742",  # a send meets a receive of other chunks
    "hang": "CP0742",  # a rank waits for a message that its peer never posts
    "deadlock": "CP0743",  # ranks wait for each other in a circle
    "race": "CP0744",  # two messages into one slot in one round
    "unset": "CP0745",  # a slot is sent or added to before it holds anything
    "double": "CP0741",  # a contribution is added twice
    "wrong": "CP0740",  # the final contents of a slot violate the postcondition
    "order": "CP0749",  # ranks that must agree bit by bit have added in different orders
    "redundant": "CP0746",  # a message changes no result
    "calls": "CP0747",  # ranks of a communicator call different collectives
    "creation": "CP0747",  # ranks create communicators in different orders
}


class Counterexample(msgspec.Struct, frozen=True):
    """A failure that occurs when the ranks execute a program.

    Attributes:
        failure: a key of `CODES`.
        ranks: the ranks involved; in a deadlock each waits for the next, the last for the first. Empty if the
            failure is not one of ranks.
        rounds: the rounds of the failure, counted from 0, in the order of `ranks`. It may be shorter than
            `ranks`, or empty.
        chunk: the chunk involved, or None.
        expected: description of the expected result, which `replay` reproduces.
        found: description of the actual result, which `replay` reproduces.
        message: description of the failure.
        span: the plan line, or None if unknown.
        related: further plan lines involved.
    """

    failure: str
    ranks: tuple[int, ...]
    rounds: tuple[int, ...]
    chunk: int | None
    expected: str
    found: str
    message: str
    span: Span | None = None
    related: tuple[Note, ...] = ()

    @property
    def code(self) -> str:
        """The error code of the failure."""
        return CODES[self.failure]

    def diagnostic(self, subject: str = "", *, span: Span | None = None, file: str = "") -> Diagnostic:
        """Convert to a diagnostic.

        Args:
            subject: the program, as a prefix of the message.
            span: the plan line, used if the counterexample has none.
            file: the plan file.
        """
        message = f"{subject}: {self.message}" if subject else self.message
        notes = (*self.related, Note(f"expected {self.expected}"), Note(f"found {self.found}"))
        return Diagnostic(self.code, message, self.span or span, notes, file=file)


def ranges_text(numbers: Iterable[int], most: int = 12) -> str:
    """Format numbers as runs, for example `0-3, 5`; at most `most` runs are shown."""
    parts: list[str] = []
    run: list[int] = []
    for number in [*sorted(numbers), None]:
        if run and (number is None or number != run[-1] + 1):
            parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
            run = []
        if number is not None:
            run.append(number)
    cut = [f"and {len(parts) - most} runs more"] if len(parts) > most else []
    return ", ".join([*parts[:most], *cut])


def terms(counts: dict[int, int]) -> str:
    """Describe the contributions of a slot, from a map of ranks to multiplicities of at least 1.

    Ranks that contribute more than once are listed singly, the first 12 only. Without ranks: `nothing`.
    """
    once = sorted(rank for rank, count in counts.items() if count == 1)
    more = sorted((rank, count) for rank, count in counts.items() if count > 1)
    words = [f"rank{'s' if len(once) > 1 else ''} {ranges_text(once)}"] if once else []
    words += [f"rank {rank} {'twice' if count == 2 else f'{count} times'}" for rank, count in more[:12]]
    return ", ".join(words) or "nothing"
