"""The known states of ranks, from which `recorder.verdict.blame` finds those that block others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, Self

Condition = Literal[
    "alive", "silent", "stopped", "stuck in the kernel", "dead", "aborted", "ended", "unknown"
]
STUCK: Final = "stuck in the kernel"


class Need(NamedTuple):
    """The condition that ranks begin call `number` of `sequence`.

    Attributes:
        spans: The ranks, as arguments of `range`: states of large jobs stay short.
    """

    spans: tuple[tuple[int, int, int], ...]
    sequence: str
    number: int

    @classmethod
    def begin(cls, ranks: Iterable[int], sequence: str, number: int) -> Self:
        """The condition that these ranks begin the call."""
        spans = list[tuple[int, int, int]]()
        for rank in sorted({*ranks}):
            first, stop, step = spans[-1] if spans else (rank, 0, 0)
            if spans and rank - stop + 1 == step:
                spans[-1] = first, rank + 1, step
            elif spans and stop == first + 1:  # a single rank, so far
                spans[-1] = first, rank + 1, rank - first
            else:
                spans.append((rank, rank + 1, 1))
        return cls(tuple(spans), sequence, number)

    @property
    def ranks(self) -> Iterator[int]:
        return itertools.chain.from_iterable(range(*span) for span in self.spans)


class Wait(NamedTuple):
    """An operation that has begun and not ended.

    Attributes:
        where: The operation, such as `line 7 of x.plan`.
        seconds: The time since it began.
        needs: The conditions that it waits for.
        missing: The action that awaited ranks have not performed, such as `reached line 7`.
        runs: How often the operation has begun.
        progress: Its progress, for a message.
    """

    where: str
    seconds: float = 0.0
    needs: tuple[Need, ...] = ()
    missing: str = ""
    runs: int = 0
    progress: str = ""


# The bytes of each part of a comparison that a record keeps, 3,520 in all. It has room for 3,574.
_CUTS = slice(64), slice(256), slice(2048), slice(256), slice(-896, None)


class Comparison(NamedTuple):
    """A step that a rank compares with the others before it runs it, for messages.

    Attributes:
        rank: Such as `process 1`.
        message: How its arguments differ from those of a step with this name that all have compared; `{}` is
            the other rank. Empty if there is no such step.
        fix: The rule that `message` violates.
        place: The line of the program that calls it.
    """

    rank: str
    name: str
    message: str = ""
    fix: str = ""
    place: str = ""

    def text(self) -> str:
        """As it is recorded: a line for each part."""
        parts = [
            part.replace("\n", " ").encode(errors="replace")[cut]
            for part, cut in zip(self, _CUTS, strict=True)
        ]
        return "\n".join(part.decode(errors="ignore") for part in parts)

    @classmethod
    def read(cls, text: str) -> Self:
        """The comparison in `text`. Raises TypeError if it is not complete."""
        return cls(*text.split("\n"))


class Joint(NamedTuple):
    """The progress of a rank in steps that all ranks compare before they first run them.

    Attributes:
        number: Its progress, see `recorder.live.position`.
        is_running: Whether it has begun its last step, and compares none.
        waits_s: Seconds for which it has waited for others to compare; 0 if it does not wait.
        comparison: The compared step, if it waits; else only the name of its last step.
    """

    number: int = 0
    is_running: bool = False
    waits_s: float = 0.0
    comparison: Comparison = Comparison("", "")


class RankState(NamedTuple):
    """The known state of a rank.

    Attributes:
        how, notes: Its condition for a message, if it is not alive.
        waits: Its unfinished operations, a collective first.
        begun: By sequence of calls, the number of calls that it has begun.
        recent: By sequence whose order is the same on all ranks, the number of a call, and the names of this
            call and those after it.
        order: Its last operations in order of their begin, each with its run.
        idle_s: Seconds since an operation last began or ended.
        is_excused: Whether it has announced that it is late.
        process: Its process, such as `process 4711 on node3`.
        last, runs: The operation that it last finished, and how often that has run.
        stack: The Python stack of its main thread.
        joint: By sequence, its progress in steps that are compared.
    """

    rank: int
    condition: Condition = "alive"
    how: str = ""
    notes: tuple[str, ...] = ()
    waits: tuple[Wait, ...] = ()
    begun: Mapping[str, int] = {}
    recent: Mapping[str, tuple[int, tuple[str, ...]]] = {}
    order: tuple[tuple[str, int], ...] = ()
    idle_s: float = 0.0
    is_excused: bool = False
    process: str = ""
    last: str = ""
    runs: int = 0
    stack: str = ""
    joint: Mapping[str, Joint] = {}

    @property
    def finished(self) -> str:
        """The operation that it last finished, for a message; empty if there is none."""
        return f"; it last finished {self.last}, {self.runs} times so far" if self.last else ""


States = Mapping[int, RankState]
