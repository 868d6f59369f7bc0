"""What the compiler makes of each stage, asked of another process: typing never waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from commplan.lsp.document import Document

TIMEOUT_S = 60.0
Stages = Mapping[int, Sequence[str]]


class Explainer:
    """Compiles one version of a text at a time; a newer one ends the compilation of the older.

    flags: those of `commplan explain`, such as `--topology T.toml --shapes S.json`. Without shapes a plan
    with trees does not compile, and its stages are not explained.
    """

    def __init__(self, flags: Sequence[str] = ()) -> None:
        self.flags = tuple(flags)
        self._tasks: dict[str, tuple[str, asyncio.Task[Stages]]] = {}

    def ask(self, uri: str, document: Document) -> asyncio.Task[Stages]:
        """The lines of each stage, when they are known; the process is started once for each text."""
        text, task = self._tasks.get(uri, ("", None))
        if task is not None and text == document.text:
            return task
        self.forget(uri)
        task = asyncio.create_task(self._explain(document))
        self._tasks[uri] = (document.text, task)
        return task

    def forget(self, uri: str) -> None:
        """End what is compiled for a document."""
        _, task = self._tasks.pop(uri, ("", None))
        if task is not None:
            task.cancel()

    async def _explain(self, document: Document) -> Stages:
        if document.analysis.plan is None:
            return {}
        # -P: what stands in the folder that the server was started in is no part of the command.
        flags = [*_machine(document), *self.flags]
        command = [sys.executable, "-P", "-m", "commplan", "explain", "-", "--format", "json", *flags]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            out, _ = await asyncio.wait_for(process.communicate(document.text.encode()), TIMEOUT_S)
        except TimeoutError:
            return {}
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        return stages(out) if process.returncode == 0 else {}


def _machine(document: Document) -> list[str]:
    """The topology that the plan declares, as a flag: the command reads the text without its place."""
    plan = document.analysis.plan
    declared = plan.topology if plan is not None else None
    return ["--topology", str(Path(document.file).parent / declared.path)] if declared is not None else []


def stages(document: bytes) -> Stages:
    """The lines of each stage in the JSON that `explain` writes, by the line of the plan."""
    phases = json.loads(document)["phases"]
    return {line["line"]: line["text"] for phase in phases for line in phase["lines"]}
