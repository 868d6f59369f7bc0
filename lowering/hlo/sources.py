"""Locations in the user's code for HLO instructions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

_PACKAGE = str(Path(__file__).parents[2]) + os.sep  # frames of commplan
_WRITTEN = re.compile(r'source_file="([^"]+)"(?: source_line=(\d+))?')


class Frames(msgspec.Struct, frozen=True):
    """The stack frame tables at the start of a module."""

    files: Mapping[str, str]
    locations: Mapping[str, str]
    frames: Mapping[str, str]

    def source_of(self, attributes: str) -> str:
        """`file:line` of the innermost frame outside of commplan; empty if unknown."""
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
    match = re.search(rf"^{title}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
    rows = (line.partition(" ") for line in match[1].splitlines()) if match else ()
    return {key: row for key, _, row in rows}


def _number(text: str, key: str) -> str:
    match = re.search(rf"\b{key}=(\d+)", text)
    return match[1] if match else ""


def _relative(file: str, line: str) -> str:
    """The path relative to the working directory if the file is below it, otherwise unchanged."""
    below = file.removeprefix(str(Path.cwd()) + os.sep)
    return f"{below}:{line}" if line else below
