"""Finds the line of the user's code that an HLO instruction comes from.

XLA writes the location either into the attributes of the instruction or, as an id, into tables of stack
frames at the start of the module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

_PACKAGE = str(Path(__file__).parents[2]) + os.sep  # the folder of commplan, whose frames are skipped
_WRITTEN = re.compile(r'source_file="([^"]+)"(?: source_line=(\d+))?')  # a location in the attributes


class Frames(msgspec.Struct, frozen=True):
    """The stack frame tables at the start of a module: the text of each row by its number.

    Attributes:
        files: The name of a file, in quotes.
        locations: A location in a file: `file_name_id`, `line` and others.
        frames: A stack frame: `file_location_id`, and the `parent_frame_id` of its caller.
    """

    files: Mapping[str, str]
    locations: Mapping[str, str]
    frames: Mapping[str, str]

    def source_of(self, attributes: str) -> str:
        """The location of an instruction in the user's code.

        Args:
            attributes: The text of the instruction's attributes.

        Returns:
            `file:line`, or only `file` if the line is unknown: the location in the attributes, otherwise that
            of the innermost frame outside of commplan. Empty if there is none.
        """
        written = _WRITTEN.search(attributes)
        if written:
            return _relative(written[1], written[2] or "")
        return next(
            (
                _relative(*location)
                for location in self._stack(attributes)
                if not location[0].startswith(_PACKAGE)
            ),
            "",
        )

    def _stack(self, attributes: str) -> Iterator[tuple[str, str]]:
        """File and line of each frame, innermost first."""
        frame = _number(attributes, "stack_frame_id")
        # XLA numbers parents too high by one: the first frame, which has no parent, would be its parent.
        shift = int(_number(self.frames.get("1", ""), "parent_frame_id") == "1")
        while frame in self.frames:
            location = self.locations.get(_number(self.frames[frame], "file_location_id"), "")
            yield self.files.get(_number(location, "file_name_id"), "").strip('"'), _number(location, "line")
            frame = str(int(_number(self.frames[frame], "parent_frame_id") or 0) - shift)


def read_frames(text: str) -> Frames:
    """Parse the tables of a module; empty if it has none."""
    return Frames(*(_table(text, title) for title in ("FileNames", "FileLocations", "StackFrames")))


def _table(text: str, title: str) -> dict[str, str]:
    """The rows of a table by their number; empty if the module does not have the table."""
    match = re.search(rf"^{title}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
    rows = (line.partition(" ") for line in match[1].splitlines()) if match else ()
    return {key: row for key, _, row in rows}


def _number(text: str, key: str) -> str:
    """The digits of `key=digits` in a row or in attributes; empty if it is absent."""
    match = re.search(rf"\b{key}=(\d+)", text)
    return match[1] if match else ""


def _relative(file: str, line: str) -> str:
    """The path relative to the working directory if the file is below it, otherwise unchanged."""
    below = file.removeprefix(str(Path.cwd()) + os.sep)
    return f"{below}:{line}" if line else below
