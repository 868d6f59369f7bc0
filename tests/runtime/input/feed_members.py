"""Members of feeds, in this process and in others, and their expected batches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import feed_process
import numpy as np
from feed_process import decode, noise, records, text
from support import interpreter

import commplan
from commplan.runtime.input.iterator import PhaseBatches

FUNCTIONS = {"decode": decode, "noise": noise}
SCRIPT = Path(feed_process.__file__)


class Member:
    """A process that takes part in a feed."""

    started: ClassVar[list[Member]] = []

    def __init__(self, name: str, **orders: Any) -> None:
        words = [*interpreter.words(jax=False), str(SCRIPT), json.dumps({"name": name, **orders})]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the process
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.started.append(self)
        self.lines: list[dict[str, Any]] = []
        self.pid: int = self.until("ready")

    def until(self, key: str) -> Any:
        """The value under `key` in its output, once it is printed."""
        for line in self.process.stdout or ():
            self.lines.append(json.loads(line))
            if key in self.lines[-1]:
                return self.lines[-1][key]
        self.errors.seek(0)
        raise AssertionError(f"it never said {key!r}: {self.errors.read()}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.finish(-signal.SIGKILL)

    def finish(self, expected: int = 0) -> str:
        """Its stderr, after its end."""
        self.lines += [json.loads(line) for line in self.process.stdout or ()]
        self.process.wait(60)
        self.errors.seek(0)
        errors = self.errors.read()
        assert self.process.returncode == expected, errors
        return errors

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(AttributeError, ProcessLookupError):  # not ready yet; just ended
                os.kill(self.pid, signal.SIGKILL)
            self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    @property
    def batches(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "sums" in line]

    def check_epochs(self, epochs: range, count: int = 26) -> None:
        """It received each of `epochs` once, and every record in it once."""
        for epoch in epochs:
            numbers = [number for b in self.batches if b["epoch"] == epoch for number in b["records"]]
            assert sorted(numbers) == list(range(count)), (epoch, numbers)


def joined(name: str, plan: str = "", count: int = 26, **options: Any) -> Any:
    functions = options.pop("functions", FUNCTIONS)
    source = options.pop("source", records(count))
    options = {"timeout": 30.0, **options}
    return commplan.join(
        name, commplan.loads(plan or text()), sources={"numbers": source}, functions=functions, **options
    )


def expected(member: int, batch: int = 4, epochs: int = 1, **options: Any) -> list[dict[str, Any]]:
    """The batches of a member that reads everything itself."""
    plan = commplan.loads(text(batch=batch, **options)).compile(axes={"member": 64}).schedule
    local = {"member": (member,)}
    with PhaseBatches(plan, "step", {"numbers": records(26)}, FUNCTIONS, local=local) as batches:
        names = {b.name: b.value for b in plan.phase("step").outputs}
        items: list[dict[str, Any]] = []
        for _ in range(epochs):
            for item in batches:
                values = {n: item.values[ref] for n, ref in names.items()}
                items.append({n: v[0] if n == "mine" else v for n, v in values.items()})
    return items


def check_same(received: list[Any], whole: list[dict[str, Any]]) -> None:
    for batch, other in zip(received, whole, strict=True):
        assert batch.keys() == other.keys()
        for name, array in other.items():
            np.testing.assert_array_equal(batch[name], array)
