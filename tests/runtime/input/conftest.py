"""Shared code of the tests of the input."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator

import pytest
from feed_members import Member
from ring_process import SHAPE
from rings import UNITS

from commplan.runtime.input.ring import meeting
from commplan.runtime.input.ring.memory import SharedMemory


@pytest.fixture(scope="module")
def small_heap() -> None:
    """Tests of this module that collect garbage at their end search only their objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def feed_name(small_heap: None) -> Iterator[str]:
    """A feed that no other test has; nothing of it is left in the end."""
    name = f"test-{uuid.uuid4().hex}"
    yield name
    while Member.started:
        Member.started.pop().close()
    gc.collect()
    assert [feed for feed in meeting.memory_files(name) if meeting.opened(feed, name)] == []


@pytest.fixture(name="memory")
def _memory() -> Iterator[SharedMemory]:
    memory = meeting.created("test-ring", "the ring", SHAPE, {}, cores=2, makers=4, epoch=UNITS, unit=1)
    yield memory
    memory.close()
