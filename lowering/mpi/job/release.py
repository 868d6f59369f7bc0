"""The communicators of channels that nothing refers to any more.

To free one is collective, and collectors run on each rank when they like. So what is dropped is only put on a
list, which is gone through where the next channel is made: a rank says that it has left a channel once its
programs have run, and frees what it has of it once all others have left it, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from commplan.lowering.mpi.job.drain import mark
from commplan.lowering.mpi.job.groups import Groups

_dropped: list[Resources] = []
os.register_at_fork(after_in_child=_dropped.clear)


class Resources:
    """What a channel leaves behind. groups: its communicators. communicators: others that go with them.
    forget: drops what is kept of it elsewhere, when all is freed."""

    def __init__(self, library: Any, channel: int, groups: Groups, forget: Callable[[], None]) -> None:
        self._library, self._channel, self.groups, self._forget = library, channel, groups, forget
        self.communicators: list[Any] = []
        self._mark: Any = None

    def drop(self) -> None:
        """Nothing refers to the channel any more."""
        _dropped.append(self)

    def freed(self) -> bool:
        """Whether all ranks have left it, so that this one has freed its part."""
        if self._mark is None:
            self._mark = mark()
        if not self._mark.is_ready() or self._library.commplan_channel_busy(self._channel):
            return False
        self._library.commplan_channel_close(self._channel)
        if not self._library.commplan_channel_release(self._channel):
            return False
        self._forget()
        for comm in (*self.groups.made(), *self.communicators):
            comm.Free()
        return True


def free_dropped() -> None:
    """Free what all ranks have left. Where a rank has failed it is left as it is."""
    _dropped[:] = [resources for resources in _dropped if not resources.freed()]
