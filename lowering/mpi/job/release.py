"""Frees the communicators of channels that are no longer referenced.

Freeing a communicator is collective, but the garbage collector runs at different times on each rank. A
dropped channel is only appended to a list. Whenever a channel is created, this rank leaves the dropped
channels whose programs have run, and frees those that all ranks have left.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from commplan.lowering.mpi.job.drain import mark
from commplan.lowering.mpi.job.groups import Groups

_dropped: list[Freeable] = []  # a list, because appending to it takes no lock
os.register_at_fork(after_in_child=_dropped.clear)


class Freeable(Protocol):
    """Resources that several ranks share."""

    def try_free(self) -> bool:
        """Free the resources if all ranks have left them. Returns whether this succeeded."""
        ...


class Resources:
    """The resources of a dropped channel.

    Args:
        library: The engine.
        channel: The engine's handle of the channel.
        groups: The communicators of the channel.
        forget: Called when all ranks have left the channel, before its communicators are freed.

    Attributes:
        communicators: Further communicators, which are freed with those of the channel.
    """

    def __init__(self, library: Any, channel: int, groups: Groups, forget: Callable[[], None]) -> None:
        self._library, self._channel, self.groups, self._forget = library, channel, groups, forget
        self.communicators: list[Any] = []
        self._mark: Any = None

    def try_free(self) -> bool:
        """See `Freeable`. Closes the channel once all programs that may use it have run."""
        if self._mark is None:
            self._mark = mark()
        if not self._mark.is_ready() or self._library.commplan_channel_busy(self._channel):
            return False
        self._library.commplan_channel_close(self._channel)
        if not self._library.commplan_channel_release(self._channel):
            return False
        self._forget()
        for comm in (*self.groups.communicators(), *self.communicators):
            comm.Free()
        return True


def drop(resources: Freeable) -> None:
    """Schedule resources for release. Any thread may call this."""
    _dropped.append(resources)


def free_dropped() -> None:
    """Free the resources that all ranks have left. Those of failed ranks are kept."""
    for resources in [_dropped.pop(0) for _ in _dropped.copy()]:
        if not resources.try_free():
            drop(resources)
