"""The states of ranks, from which `recorder.verdict.blame` finds those that block others.

`recorder.blame` makes them from records, `sidecar.states` from the records of running processes. Sidecars
also send them to other hosts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, Self

# The condition of a rank:
# - alive: its process runs, or nothing else is known.
# - silent: the sidecar of its host does not answer.
# - stopped: a signal or a debugger has stopped it.
# - stuck in the kernel: it waits for a disk or a file system.
# - dead: it has died, or no such process exists.
# - aborted: its runtime is ending it.
# - ended: its program has ended, or has left.
# - unknown: it is on another machine.
Condition = Literal[
    "alive", "silent", "stopped", "stuck in the kernel", "dead", "aborted", "ended", "unknown"
]
STUCK: Final = "stuck in the kernel"


class Need(NamedTuple):
    """The condition that ranks begin a call.

    Attributes:
        spans: The ranks, as arguments (start, stop, step) of `range`, which keep states of large jobs short.
        sequence: The name of a sequence of calls that each of these ranks counts, see `RankState.begun`.
        number: The number of the call in this sequence, from 1.
    """

    spans: tuple[tuple[int, int, int], ...]
    sequence: str
    number: int

    @classmethod
    def begin(cls, ranks: Iterable[int], sequence: str, number: int) -> Self:
        """The condition that these ranks, in any order, begin the call."""
        spans = list[tuple[int, int, int]]()
        for rank in sorted({*ranks}):
            first, stop, step = spans[-1] if spans else (rank, 0, 0)
            if spans and rank - stop + 1 == step:  # `stop - 1` is the last rank of the span
                spans[-1] = first, rank + 1, step
            elif spans and stop == first + 1:  # a single rank, so far
                spans[-1] = first, rank + 1, rank - first
            else:
                spans.append((rank, rank + 1, 1))
        return cls(tuple(spans), sequence, number)

    @property
    def ranks(self) -> Iterator[int]:
        """The ranks, in the order of `spans`."""
        return itertools.chain.from_iterable(range(*span) for span in self.spans)


class Wait(NamedTuple):
    """An operation that has begun and not ended.

    Attributes:
        where: The operation, such as `line 7 of x.plan`.
        seconds: The seconds since it began.
        needs: The conditions without which it cannot end.
        missing: The action that awaited ranks have not performed, such as `reached line 7`, for a message.
        runs: How often the operation has begun on this rank; 0 if not counted.
        progress: Its progress, for a message; empty if unknown.
    """

    where: str
    seconds: float = 0.0
    needs: tuple[Need, ...] = ()
    missing: str = ""
    runs: int = 0
    progress: str = ""


# The bytes that a record keeps of `rank`, `name`, `message`, `fix` and `place` of a comparison. The end of
# the place matters most. They and four line breaks are at most 3,524 bytes. `file.CALL` has room for 3,574.
_CUTS = slice(64), slice(256), slice(2048), slice(256), slice(-896, None)


class Comparison(NamedTuple):
    """A step that a rank compares with the other ranks before it runs it. The fields are texts for messages.

    Attributes:
        rank: The rank, such as `process 1`; empty if it does not wait for a comparison.
        name: The name of the step.
        message: How its arguments differ from those of a step with this name that all ranks have compared.
            `{}` stands for the other rank. Empty if there is no such step.
        fix: The rule that is violated according to `message`; empty without a message.
        place: The line of the program that calls it; empty if unknown.
    """

    rank: str
    name: str
    message: str = ""
    fix: str = ""
    place: str = ""

    def text(self) -> str:
        """Return the recorded form: a line for each field, truncated to its part of `_CUTS`."""
        parts = [
            part.replace("\n", " ").encode(errors="replace")[cut]
            for part, cut in zip(self, _CUTS, strict=True)
        ]
        return "\n".join(part.decode(errors="ignore") for part in parts)

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the comparison in a result of `self.text`.

        Raises:
            TypeError: If `text` has fewer than two lines or more than five.
        """
        return cls(*text.split("\n"))


class Joint(NamedTuple):
    """The progress of a rank in steps that all ranks compare before they first run them.

    Attributes:
        number: A number that grows with its progress, see `recorder.live.position`.
        is_running: Whether it has begun its last step, and compares no other step.
        waits_s: Seconds for which it has waited for other ranks to compare; 0 if it does not wait.
        comparison: The compared step, if it waits; else only the name of its last step is set.
    """

    number: int = 0
    is_running: bool = False
    waits_s: float = 0.0
    comparison: Comparison = Comparison("", "")


class RankState(NamedTuple):
    """The known state of a rank.

    Attributes:
        rank: The rank.
        condition: See `Condition`.
        how: The predicate of a message about its condition; empty if it is alive.
        notes: Notes of that message.
        waits: Its unfinished operations, a collective first.
        begun: By sequence of calls, the number of calls that it has begun.
        recent: By sequence whose order must be the same on all ranks: the number of a call, and the names of
            this call and those after it.
        order: Its last operations in order of their begin, each with its number of runs.
        idle_s: Seconds since an operation last began, moved bytes or ended; 0 if unknown.
        is_excused: Whether it has announced that it is late, or waits with a timeout of its own.
        process: Its process for messages, such as `process 4711 on node3`.
        last: The name of the operation that it last finished; empty if there is none.
        runs: How often `last` has run.
        stack: The Python stack of its main thread in one line; empty if unknown.
        joint: By sequence of steps that ranks compare, its progress.
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
        """The end of a sentence with the operation that it last finished; empty if there is none."""
        return f"; it last finished {self.last}, {self.runs} times so far" if self.last else ""


States = Mapping[int, RankState]  # by rank
