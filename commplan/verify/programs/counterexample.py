"""Counter-examples: what goes wrong, as data that can be replayed."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from commplan.diagnostics import Diagnostic, Note, Span

# How a program can fail, and the page of the manual on it.
CODES = {
    "range": "CP0742",  # a rank or chunk that does not exist
    "mismatch": "CP0742",  # a send meets a receive of other chunks
    "hang": "CP0742",  # a rank waits for a message that its peer never posts
    "deadlock": "CP0743",  # ranks wait for each other in a circle
    "race": "CP0744",  # two messages into one slot in one round
    "unset": "CP0745",  # a slot is sent or added to before it holds anything
    "double": "CP0741",  # a contribution is added twice
    "wrong": "CP0740",  # at the end a slot does not hold what the collective promises
    "order": "CP0749",  # ranks that must agree bit by bit have added in different orders
    "useless": "CP0746",  # a message changes no result
    "calls": "CP0747",  # ranks of a communicator call different collectives
    "creation": "CP0747",  # ranks create communicators in different orders
}


class Counterexample(msgspec.Struct, frozen=True):
    """One thing that really happens when the ranks run, and must not.

    failure: one of `CODES`. ranks: those concerned; of a deadlock each waits for the next, the last for the
    first. rounds: for each of them the round in which it is, counted from 0. chunk: which slot, where one is
    concerned. expected, found: in words that `replay` finds again. span: the plan line, where there is one.
    """

    failure: str
    ranks: tuple[int, ...]
    rounds: tuple[int, ...]
    chunk: int | None
    expected: str
    found: str
    message: str
    span: Span | None = None
    others: tuple[Note, ...] = ()  # more plan lines that are concerned

    @property
    def code(self) -> str:
        return CODES[self.failure]

    def diagnostic(self, subject: str = "", *, span: Span | None = None, file: str = "") -> Diagnostic:
        """As the command shows it. `subject` says of which program, `span` of which plan line."""
        message = f"{subject}: {self.message}" if subject else self.message
        notes = (*self.others, Note(f"expected {self.expected}"), Note(f"found {self.found}"))
        return Diagnostic(self.code, message, self.span or span, notes, file=file)


def spans(numbers: Iterable[int], most: int = 12) -> str:
    """`0-3, 5` of 0, 1, 2, 3 and 5; at most `most` runs are written out."""
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
    """The contributions in a slot in words: rank -> how often it is in it."""
    once = sorted(rank for rank, count in counts.items() if count == 1)
    more = sorted((rank, count) for rank, count in counts.items() if count > 1)
    words = [f"rank{'s' if len(once) > 1 else ''} {spans(once)}"] if once else []
    words += [f"rank {rank} {'twice' if count == 2 else f'{count} times'}" for rank, count in more[:12]]
    return ", ".join(words) or "nothing"
