"""Who has to do with a batch: what is made, who works on it, and the other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from commplan.runtime.data import notes

Task = Callable[[], None]
Made_co = TypeVar("Made_co", covariant=True)


class Making(Protocol[Made_co]):
    """One batch in the making."""

    def first(self) -> Sequence[Task]:
        """Tasks that may start as soon as there is room; none is fine."""
        ...

    def publish(self, error: BaseException | None) -> None:
        """The first stage is over; `error` is what went wrong in it."""
        ...

    def second(self) -> Sequence[Task]:
        """Tasks that may start once every process has published."""
        ...

    def finish(self) -> Made_co:
        """All tasks are done: the batch."""
        ...


class Peers(Protocol):
    """The waits on other processes. Each raises where it cannot go on; `stop` makes both return False."""

    def owes(self) -> bool:
        """Whether even a batch that failed here is waited for, because others wait for this process."""
        ...

    def writable(self, number: int) -> bool: ...

    def readable(self, number: int) -> bool: ...

    def fills(self) -> int | None:
        """The first batch of which this process fills a part; None where it fills none."""
        ...

    def passes(self, number: int) -> bool:
        """Whether batch `number` is made without this process; asked in order."""
        ...

    def fail(self, number: int, error: BaseException) -> None:
        """Nothing from batch `number` on can be made here: `readable` raises `error`."""
        ...

    def ahead(self, number: int) -> int:
        """Batches from `number` on that all have filled."""
        ...

    def stop(self) -> None: ...

    def leave(self) -> None: ...


class Workers(Protocol):
    """What threads wait for that must end with them."""

    def stop(self) -> None:
        """Make every such wait return."""
        ...

    def leave(self) -> None:
        """The calling thread ends."""
        ...

    def close(self) -> None:
        """All threads have ended."""
        ...


class Works(Protocol):
    """What a ring asks of the one who makes the batches."""

    def place(self, number: int) -> notes.Place:
        """Where batch `number` stands."""
        ...

    def rows(self, number: int) -> Mapping[int, int]:
        """The rows of batch `number`, for each flow by its place in the program."""
        ...

    def remake(self, number: int, process: int) -> None:
        """Fill the parts of `process` in batch `number`, in this thread."""
        ...
