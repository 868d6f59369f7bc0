"""Functions and sources for the tests of worker processes: at the top of a module, so that they can
travel."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from input_plans import SIDE, decode

Pixels = np.ndarray[Any, Any]


def number(record: bytes, value: int) -> tuple[Pixels, int]:
    return np.zeros((SIDE, SIDE), np.uint8), value


def process(record: bytes) -> tuple[Pixels, int]:
    """The process that works on the record, as its label."""
    time.sleep(0.002)
    return number(record, os.getpid())


def variable(record: bytes, name: str) -> tuple[Pixels, int]:
    """A number in the environment."""
    return number(record, int(os.environ.get(name, "-1")))


def failing(record: bytes, bad: tuple[int, ...]) -> tuple[Pixels, int]:
    if record[0] in bad:
        raise ValueError("truncated")
    return decode(record)


def holding(record: bytes, bad: int, how: str) -> tuple[Pixels, int]:
    """Hold the process up on record `bad`."""
    if record[0] == bad and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif record[0] == bad:
        time.sleep(600)
    return decode(record)


class OddError(Exception):
    """An exception that cannot travel."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__("odd")
        self.held = lambda: (first, second)


def raising_oddly(record: bytes) -> tuple[Pixels, int]:
    raise OddError(1, 2)


def ending(record: bytes, bad: int, how: str, once: str = "") -> tuple[Pixels, int]:
    """End the process on record `bad`; where `once` names a file, only for the first time."""
    if record[0] == bad and not (once and Path(once).exists()):
        if once:
            Path(once).touch()
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segfault":
                ctypes.string_at(0)
            case "exit":
                sys.exit(3)
            case _:
                os._exit(4)
    return decode(record)


class Unready:
    """A host function that ends the process that it is brought to, as long as there are files in `folder`:
    it takes one of them each time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, str]) -> None:
        self.folder = state["folder"]
        for file in Path(self.folder).iterdir():
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, record: bytes) -> tuple[Pixels, int]:
        return decode(record)


def hanging(record: bytes, folder: str) -> tuple[Pixels, int]:
    """Say which process it is, and never return."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(1000)
    return decode(record)


class Reading:
    """A source that logs in a folder which records were read, and by which process."""

    def __init__(self, records: list[bytes], folder: str) -> None:
        self.records, self.folder = records, folder

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> bytes:
        with (Path(self.folder) / str(os.getpid())).open("a") as file:
            file.write(f"{index}\n")
        return self.records[index]


class PairsOnDisk(Reading):
    """The same with (record, label)."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), index


def read(folder: Path) -> list[int]:
    """The records that all processes read."""
    return sorted(int(line) for file in folder.iterdir() for line in file.read_text().split())


def split(record: Pixels) -> tuple[Pixels, np.int32]:
    return record.reshape(2, 3), np.int32(record[0])
