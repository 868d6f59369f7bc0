"""Processes of one run, which share memory; nothing of it stays."""

from __future__ import annotations

import contextlib
import json
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from support import interpreter

SHARED = Path("/dev/shm")
INPUT = Path(__file__).resolve().parent.parent / "runtime" / "input"


class Processes:
    """Processes of `script`, in the folder of tests of the input, each with separate instructions."""

    def __init__(self, script: str) -> None:
        self.script, self.run = INPUT / script, f"test-{uuid.uuid4().hex[:12]}"
        self.processes: list[subprocess.Popen[str]] = []

    def begin(self, orders: Iterable[Mapping[str, Any]]) -> None:
        self.processes = []
        for order in orders:
            self.one(order)

    def one(self, orders: Mapping[str, Any]) -> subprocess.Popen[str]:
        """One more process."""
        words = [*interpreter.words(jax=False), str(self.script), json.dumps({"run": self.run, **orders})]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def ended(self) -> list[tuple[int, list[str]]]:
        """The return code of each, and the lines that it wrote; none of them complains."""
        ends: list[tuple[int, list[str]]] = []
        for process in self.processes:
            out, err = process.communicate(timeout=120)
            assert err == "", err
            ends.append((process.returncode, out.splitlines()))
        return ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            assert not list(SHARED.glob(f"commplan-*{self.run}*")), "nothing stays in shared memory"
        finally:
            for process in self.processes:
                process.kill()
                with contextlib.suppress(ValueError):  # its output has been read
                    process.communicate()
