"""The stored state of an existing lab, so that a later process finds it and can remove it.

One file for each lab, under /run, which is empty after a restart of the machine, like the list of namespaces.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from commplan.diagnostics import fail

FOLDER = Path("/run/commplan-netlab")


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a lab.

    Attributes:
        hosts: hosts in each rack.
        rate: of the links of hosts, per direction, as `tc` writes it (200mbit).
        uplink: of a rack's link to the others; empty: like a host's.
        interleave: ranks alternate between racks (rack 1, rack 2, rack 1, ...) instead of filling one after
            the other.
    """

    hosts: int = 4
    racks: int = 1
    rate: str = "200mbit"
    uplink: str = ""
    interleave: bool = False

    @property
    def ranks(self) -> int:
        return self.hosts * self.racks


class Owner(msgspec.Struct, frozen=True):
    """A process, identified by number and start time (in clock ticks)."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return _started(self.pid) == self.started


class State(msgspec.Struct, frozen=True):
    """An existing lab; `owner` is the process that it ends with, None if it exists until `down`."""

    name: str
    shape: Shape
    owner: Owner | None = None

    @property
    def left_behind(self) -> bool:
        """Whether the process that should have removed it has ended."""
        return self.owner is not None and not self.owner.alive


def this_process() -> Owner:
    return Owner(os.getpid(), _started(os.getpid()) or 0)


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return None if fields[0] == "Z" else int(fields[19])


def path(name: str) -> Path:
    return FOLDER / f"{name}.json"


def claim(state: State) -> bool:
    """Write `state` down unless a lab of that name is on record already; whether it was written."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        with path(state.name).open("xb") as file:
            file.write(msgspec.json.encode(state))
    except FileExistsError:
        return False
    return True


def disown(state: State) -> None:
    """Let the lab exist until `down`, independent of the process that built it."""
    fresh = path(state.name).with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(msgspec.structs.replace(state, owner=None)))
    fresh.replace(path(state.name))


def load(name: str) -> State | None:
    """The stored lab `name`. Raises CP1122 if its record cannot be read."""
    try:
        return msgspec.json.decode(path(name).read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        fail(
            "CP1122", f"the record of lab `{name}` cannot be read: {error}", f"`down --name {name}` clears it"
        )


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def forget(name: str) -> None:
    path(name).unlink(missing_ok=True)
