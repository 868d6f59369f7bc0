"""What all iterators over batches of a phase have in common: epochs, the place in them, and who may ask."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from commplan.diagnostics import CommplanError, fail
from commplan.runtime.input import this_process
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.observe.visit_check import Checks
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.restarts import Pass

if TYPE_CHECKING:
    from commplan.runtime.machines.pinned import Pinning

_Item = TypeVar("_Item")


class EpochIterator(Iterator[HostBatch]):
    """Batches of a phase, one epoch per `iter()`, for one caller at a time, in the process that made them,
    until they are closed. Several threads may call `next`: each batch goes to one of them. What is made of
    batches ahead of the caller waits in `_formed`, by their places."""

    on_devices: int = 0  # batches that may be taken ahead of the caller
    pinning: Pinning | None = None  # what registers their memory with devices
    restart: Pass | None = None  # notices that other iterators have given the same batches
    _closing: weakref.finalize[..., Any]  # alive until then
    _checks: Checks | None
    _patient: tuple[str, ...] = ()  # errors after which a caller may go on

    def __init__(self, phase: str) -> None:
        self._phase, self._process, self._turn = phase, os.getpid(), threading.RLock()
        self._due: HostBatch | None = None  # the batch at `_front`, once it has come
        self._formed: dict[int, Any] = {}

    def _start(self, epoch: int, step: int, steps: int, order: int) -> None:
        """The first batch stands at `epoch` and `step`. order: a checksum of the order of records."""
        self._steps, self._order, self._armed = steps, order, epoch
        # Batches so far, from the start of epoch 0: one number, so that Ctrl-C finds no half of a step.
        self._place = self._first = epoch * steps + step

    def __iter__(self) -> Self:
        self._armed = self._place // self._steps
        return self

    def __next__(self) -> HostBatch:
        return self.take(lambda batch: batch)

    def take(
        self,
        form: Callable[[HostBatch], _Item],
        ahead: int = 0,
        settle: Callable[[_Item], object] | None = None,
    ) -> _Item:
        """What `form` makes of the next batch, which stays the next where that is interrupted or fails.

        ahead: of so many batches behind it `form` makes it now, too, those of this epoch that lie ready.
        settle: is then called with what is handed out.
        """
        if this_process.pid != self._process:
            self._refuse_forked()
        with self._turn:  # whichever thread asks next gets the next batch
            if not self._closing.alive:
                self._refuse_closed()
            if self._place // self._steps > self._armed:
                self._end_epoch()
            if self.restart is not None and self._place == self._first + 1:
                self.restart.use()
            return self._next_of(form, ahead, settle) if ahead else self._next(form)

    def _end_epoch(self) -> NoReturn:
        if self.restart is not None:
            self.restart.end()
        raise StopIteration

    def _next(self, form: Callable[[HostBatch], _Item]) -> _Item:
        item = form(self._due_batch())
        self._pass_on(self._place + 1)
        # Whoever is interrupted before this line gets the same batch the next time.
        self._due, self._place = None, self._place + 1
        return item

    def _next_of(
        self, form: Callable[[HostBatch], _Item], ahead: int, settle: Callable[[_Item], object] | None
    ) -> _Item:
        for place in [place for place in self._formed if place < self._place]:
            del self._formed[place]
        if not self._formed:
            self._form(form, self._due_batch())
        end = min(self._place + ahead, (self._armed + 1) * self._steps - 1)
        while self._front <= end and self._is_ready(self._front):
            try:
                self._form(form, self._come())
            except Exception:  # noqa: BLE001  it is raised when its turn comes
                break
        item = self._formed[self._place]
        if settle is not None:
            settle(item)
        # What is handed out stays until the next call: interrupted before this line, it is handed out again.
        self._place += 1
        return item

    def _form(self, form: Callable[[HostBatch], _Item], batch: HostBatch) -> None:
        front = self._front
        self._formed[front] = form(batch)
        self._pass_on(front + 1)
        self._due = None

    @property
    def _front(self) -> int:
        """The first place of which nothing has been made yet."""
        return max(self._place, 1 + max(self._formed, default=-1))

    def _come(self) -> HostBatch:
        """The batch at `_front`, whose visits are counted."""
        batch = self._await_due()
        if self._checks is not None:
            self._checks.add(batch)
        return batch

    def _due_batch(self) -> HostBatch:
        """The same, which the caller waits for: what fails ends the batches."""
        try:
            return self._come()
        except ClosedError:
            self._refuse_closed()
        except Exception as error:
            self._close_after(error)
            raise

    def _close_after(self, error: Exception) -> None:
        """Where a caller cannot go on after `error`. The place stays: `.state()` names the batch that
        failed."""
        if not isinstance(error, CommplanError) or error.diagnostics[0].code not in self._patient:
            self.close()

    def _await_due(self) -> HostBatch:
        """The batch at `_front`, which is kept in `_due`."""
        raise NotImplementedError

    def _is_ready(self, place: int) -> bool:
        """Whether the batch at `place` may be taken before its turn: nobody would wait for it."""
        del place
        return False

    def _pass_on(self, place: int) -> None:
        """The batches before `place` have come."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Batches of one epoch; the same for every rank, design and restart."""
        return self._steps

    def state(self) -> dict[str, int]:
        """Where the next batch stands: integers, fit for JSON; the same under any number of ranks.

        `order` is a checksum of what the order depends on: lengths, batch sizes, visits, seeds.
        """
        epoch, step = divmod(self._place, self._steps)
        return {"epoch": epoch, "step": step, "order": self._order}

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_forked(self) -> NoReturn:
        fail(
            "CP0916", f"the batches of phase `{self._phase}` belong to process {self._process}",
            "this one was forked from it, without its threads: make batches here, anew",
        )  # fmt: skip

    def _refuse_closed(self) -> NoReturn:
        fail("CP0916", f"the batches of phase `{self._phase}` were closed", "make them anew")
