"""The plan of a feed as its first member compiled it, in the feed's memory: who brings the same text takes it
from there, without the compiler."""

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
    """key: of the text that it was compiled from. schedule: without its plan graph, which feeds do not
    need."""

    key: str
    schedule: msgspec.Raw


def key_of(text: bytes) -> str:
    """What tells a plan's text from others, and from the same one under another version of commplan."""
    return digest(__version__.encode() + b"\0" + text)


def keep(memory: SharedMemory, key: str, schedule: Schedule) -> None:
    """Store `schedule` in the memory of a feed, if it has none and there is room."""
    with memory.locked():
        if memory.plan() is None:
            bare = msgspec.structs.replace(schedule, origin=None)
            memory.keep_plan(msgspec.json.encode(_Compiled(key, msgspec.Raw(msgspec.json.encode(bare)))))


@contextlib.contextmanager
def kept(name: str, key: str, file: str) -> Generator[Schedule | None]:
    """The schedule of feed `name`, if it lies there and was compiled from the text of `key`; where it does
    not, others that come meanwhile wait for this process to begin the feed. file: where it has that text."""
    with contextlib.ExitStack() as stack:
        schedule = _kept(name, key, file)
        if schedule is None:
            stack.enter_context(meeting.beginning(name))
            schedule = _kept(name, key, file)
        if schedule is not None:
            stack.close()
        yield schedule


def _kept(name: str, key: str, file: str) -> Schedule | None:
    for candidate in meeting.found(name):
        with meeting.visited(candidate, f"feed {name!r}") as memory:
            data = memory.plan() if memory is not None else None
        if data is None:
            continue
        with contextlib.suppress(ValueError):  # of a member that ended while it wrote, or another version's
            compiled = io.decode_json(data, _Compiled)
            if compiled.key == key:
                schedule = io.decode_json(compiled.schedule, Schedule)
                return msgspec.structs.replace(schedule, file=file)
    return None
