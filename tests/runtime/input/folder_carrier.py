"""A transport between pretended hosts: each reads the data of the others from files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from commplan.diagnostics import fail
from commplan.input.work_partition import Division
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.transport.transport import RowSlices


@dataclass
class FolderCarrier:
    """See `carrier.Carrier`.

    dies_at: the batch whose `carry` kills this process.
    carried, counted: the numbers and counts that `carry` was called with.
    """

    folder: Path
    host: int
    division: Division
    by_caller: bool = False
    silence_s: float = 30.0
    dies_at: int = -1
    carried: list[int] = field(default_factory=list[int])
    counted: list[int] = field(default_factory=list[int])
    closed: int = 0
    _stopped: bool = False

    def carry(
        self, number: int, row_slices: Sequence[RowSlices], before: Sequence[RowSlices] = (), count: int = 1,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        assert bool(before) == (number > 0)
        self.carried.append(number)
        self.counted.append(count)
        if number == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for at, move in enumerate(self.division.moves()):
            if self.host not in move.hosts:
                continue
            for place, run in enumerate(move.runs):
                owner = move.hosts[move.root if move.kind == "broadcast" else place]
                path = self.folder / f"{number}-{at}-{place}.npz"
                if owner == self.host:
                    self._write(path, row_slices, run)
                else:
                    self._read(path, row_slices, run, is_wanted)

    def _write(self, path: Path, row_slices: Sequence[RowSlices], run: tuple[int, int]) -> None:
        arrays = [p.cells[:, p.bounds[run[0]] : p.bounds[run[1]]] for p in row_slices]
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, *arrays)
        path.with_suffix(".part").rename(path)

    def _read(
        self, path: Path, row_slices: Sequence[RowSlices], run: tuple[int, int], is_wanted: Callable[[], bool]
    ) -> None:
        waited = 0.0
        while not path.exists():
            if self._stopped:
                raise ClosedError
            if waited > self.silence_s:
                fail("CP0937", f"another host was silent for {self.silence_s:g} s")
            time.sleep(0.002)
            waited += 0.002 * is_wanted()
        with np.load(path) as found:
            for slices, name in zip(row_slices, found.files, strict=True):
                slices.cells[:, slices.bounds[run[0]] : slices.bounds[run[1]]] = found[name]

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self.closed += 1
