"""The actions of a process before it ends its job."""

from __future__ import annotations

import os

from commplan.runtime.observe.abort_hook import unread


def test_what_lies_in_a_pipe_is_seen_by_who_writes() -> None:
    reader, writer = os.pipe()
    try:
        assert unread(writer) == 0
        os.write(writer, b"ValueError")
        assert unread(writer) == 10
        os.read(reader, 4)
        assert unread(writer) == 6
    finally:
        os.close(reader)
        os.close(writer)
    assert unread(writer) == 0  # closed


def test_a_file_is_no_pipe() -> None:
    with open(os.devnull, "wb") as file:  # noqa: PTH123  its descriptor is what counts
        assert unread(file.fileno()) == 0
