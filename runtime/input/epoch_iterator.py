"""Epochs, position and lifetime, common to all iterators over the batches of a phase."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from commplan.diagnostics import CommplanError, fail
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.restarts import Pass

if TYPE_CHECKING:
    from commplan.runtime.machines.pinned import Pinning

_Item = TypeVar("_Item")


class EpochIterator(Iterator[HostBatch]):
    """Iterator over the batches of a phase, one epoch per `iter()`.

    Valid until closed, in the process that made it. Several threads may call `next`: each batch goes to one
    of them. A position counts the batches since the start of epoch 0. `_formed` has the items formed ahead of
    the caller, by position. A subclass calls `_start` and sets `_closing`.

    Args:
        phase: the name of the phase.

    Attributes:
        on_devices: the number of batches that may be formed ahead of the caller, for copies to devices.
        pinning: registers the memory of batches with devices; None if no batch is copied ahead.
        restart: detects earlier iterators over the same batches; None without this check.
    """

    on_devices: int = 0
    pinning: Pinning | None = None
    restart: Pass | None = None
    _closing: weakref.finalize[..., Any]  # alive until closed
    _checked_until = 0  # batches before this position need no check of the epoch or of `close`
    _patient: tuple[str, ...] = ()  # codes of errors after which iteration may continue

    def __init__(self, phase: str) -> None:
        self._phase, self._process = phase, os.getpid()
        self._turn = threading.RLock()  # held while a caller takes a batch
        self._due: HostBatch | None = None  # the batch at `_front`, once available
        self._formed: dict[int, Any] = {}

    def _start(self, epoch: int, step: int, steps: int, order: int) -> None:
        """Set the position of the first batch.

        Args:
            epoch: the epoch of the batch.
            step: its step, 0 <= step < steps.
            steps: the number of steps of an epoch.
            order: a checksum of the order of records.
        """
        self._steps, self._order, self._epoch_begun = steps, order, epoch
        # Batches since the start of epoch 0: a single number, so that Ctrl-C cannot split its update.
        self._position = self._first = epoch * steps + step

    def __iter__(self) -> Self:
        self._epoch_begun = self._position // self._steps
        return self

    def __next__(self) -> HostBatch:
        return self.take(_unchanged)

    def take(
        self,
        form: Callable[[HostBatch], _Item],
        ahead: int = 0,
        settle: Callable[[_Item], object] | None = None,
    ) -> _Item:
        """Apply `form` to the next batch and advance. If `form` fails or is interrupted, do not advance.

        Args:
            form: makes an item of a batch.
            ahead: the number of batches after the next one that `form` is applied to now, if they are ready
                and of the same epoch. An error for one of them is raised when the caller reaches it.
            settle: called with the item before it is returned, if `ahead` is not 0.

        Returns:
            The item.

        Raises:
            StopIteration: after the last batch of the epoch.
            Exception: the error of the batch, or of `form` or `settle`. Most errors of batches close the
                iterator.
            CommplanError: CP0916 if the iterator is closed or this process was forked from its process.
        """
        if os.getpid() != self._process:
            self._refuse_forked()
        with self._turn:  # callers in several threads are served one at a time
            position = self._position
            if position >= self._checked_until:
                self._prepare(position)
            if self.restart is not None and position == self._first + 1:
                self.restart.use()
            if ahead:
                return self._take_with_ahead(form, ahead, settle)
            item = form(self._due_batch(position))
            self._release_before(position + 1)
            # If interrupted before this line, the iterator does not advance.
            self._due, self._position = None, position + 1
            return item

    def _prepare(self, position: int) -> None:
        """Raise StopIteration after the epoch, and an error if the iterator is closed."""
        if not self._closing.alive:
            self._refuse_closed()
        if position // self._steps > self._epoch_begun:
            if self.restart is not None:
                self.restart.end()
            raise StopIteration

    def _take_with_ahead(
        self, form: Callable[[HostBatch], _Item], ahead: int, settle: Callable[[_Item], object] | None
    ) -> _Item:
        """As `take`, for `ahead` of at least 1."""
        for position in [key for key in self._formed if key < self._position]:
            del self._formed[position]
        if not self._formed:
            self._form(form, self._position, self._due_batch(self._position))
        end = min(self._position + ahead, (self._epoch_begun + 1) * self._steps - 1)
        while (front := self._front) <= end and self._is_ready(front):
            try:
                self._form(form, front, self._await_due(front))
            except Exception:  # noqa: BLE001  raised when the caller reaches that batch
                break
        item = self._formed[self._position]
        if settle is not None:
            settle(item)
        # The item stays in `_formed` until the next call: if interrupted before this line, it is returned
        # again.
        self._position += 1
        return item

    def _form(self, form: Callable[[HostBatch], _Item], position: int, batch: HostBatch) -> None:
        """Store the item of `batch`, and release its slot and earlier ones."""
        self._formed[position] = form(batch)
        self._release_before(position + 1)
        self._due = None

    @property
    def _front(self) -> int:
        """The position after the last formed item."""
        return max(self._position, 1 + max(self._formed)) if self._formed else self._position

    def _due_batch(self, position: int) -> HostBatch:
        """The batch at `position`. An error closes the iterator."""
        try:
            return self._await_due(position)
        except ClosedError:
            self._refuse_closed()
        except Exception as error:
            self._close_after(error)
            raise

    def _close_after(self, error: Exception) -> None:
        """Close the iterator unless it can continue after `error`.

        `state` is still the position of the failed batch.
        """
        if not isinstance(error, CommplanError) or error.diagnostics[0].code not in self._patient:
            self.close()

    def _await_due(self, position: int) -> HostBatch:
        """Wait for the batch at `position`, keep it in `_due`, and count it by the visit check."""
        raise NotImplementedError

    def _is_ready(self, position: int) -> bool:
        """Whether the batch at `position` is available without waiting."""
        del position
        return False

    def _release_before(self, position: int) -> None:
        """Release the memory of the batches before `position`, when the caller no longer uses it."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Batches of one epoch; the same for every rank, design and restart."""
        return self._steps

    def state(self) -> dict[str, int]:
        """The position of the next batch, as integers that JSON can hold; independent of the number of ranks.

        Returns:
            `epoch`; `step`, counted from 0 in each epoch; `order`, a checksum of the inputs of the order of
            records (see `phase_order.fingerprint`).
        """
        epoch, step = divmod(self._position, self._steps)
        return {"epoch": epoch, "step": step, "order": self._order}

    def close(self) -> None:
        """Stop all work for this iterator. Later calls of `next` raise CP0916. May be called twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_forked(self) -> NoReturn:
        fail(
            "CP0916", f"the batches of phase `{self._phase}` belong to process {self._process}",
            "this process was forked from it and has none of its threads: create new batches here",
        )  # fmt: skip

    def _refuse_closed(self) -> NoReturn:
        fail("CP0916", f"the batches of phase `{self._phase}` were closed", "create new ones")


def _unchanged(batch: HostBatch) -> HostBatch:
    return batch
