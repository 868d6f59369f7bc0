"""The compiled plan in the memory of a feed, so that later members with the same text need not compile it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import msgspec

from commplan import __version__, io
from commplan.ir.schedule import Schedule
from commplan.runtime.input.ring import meeting
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.sources.content_keys import digest


class _Compiled(msgspec.Struct, frozen=True):
    """A compiled plan.

    Attributes:
        key: the result of `key_of` for the text.
        schedule: the JSON of the schedule without its plan graph, which feeds do not need.
    """

    key: str
    schedule: msgspec.Raw


def key_of(text: bytes) -> str:
    """Return a digest of the text of a plan and the version of commplan."""
    return digest(__version__.encode() + b"\0" + text)


def keep(memory: SharedMemory, key: str, schedule: Schedule) -> None:
    """Store `schedule` in the memory of a feed if it has no plan yet and there is enough space.

    Args:
        memory: the memory of the feed, which this process has joined.
        key: the result of `key_of` for the text of the plan.
        schedule: the compiled plan.
    """
    with memory.locked():
        if memory.plan() is None:
            bare = msgspec.structs.replace(schedule, origin=None)
            memory.keep_plan(msgspec.json.encode(_Compiled(key, msgspec.Raw(msgspec.json.encode(bare)))))


@contextlib.contextmanager
def kept(name: str, key: str, file: str) -> Generator[Schedule | None]:
    """Find the compiled schedule of a feed.

    If there is none, other processes that create this feed wait until the block ends.

    Args:
        name: the name of the feed.
        key: the result of `key_of` for the text of the plan.
        file: the file of the plan in this process, for messages.

    Yields:
        The schedule; None if the feed has none for this key.
    """
    with contextlib.ExitStack() as stack:
        schedule = _find_schedule(name, key, file)
        if schedule is None:
            stack.enter_context(meeting.beginning(name))
            schedule = _find_schedule(name, key, file)
        if schedule is not None:
            stack.close()
        yield schedule


def _find_schedule(name: str, key: str, file: str) -> Schedule | None:
    """The schedule of a running feed `name`, if it was compiled from the same text (see `key_of`)."""
    for candidate in meeting.memory_files(name):
        with meeting.visited(candidate, f"feed {name!r}") as memory:
            data = memory.plan() if memory is not None else None
        if data is None:
            continue
        with contextlib.suppress(ValueError):  # incomplete, or written by another version
            compiled = io.decode_json(data, _Compiled)
            if compiled.key == key:
                schedule = io.decode_json(compiled.schedule, Schedule)
                return msgspec.structs.replace(schedule, file=file)
    return None
