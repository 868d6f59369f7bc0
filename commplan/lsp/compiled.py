"""Compile plans in a separate process and describe their stages, without blocking the editor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from commplan.lsp.document import PlanDocument

TIMEOUT_S = 60.0  # longest time of a compilation, in seconds
Stages = Mapping[int, Sequence[str]]  # lines of text that describe the stage on each plan line


class Explainer:
    """Compiles one version of each text at a time; a newer version cancels the older one.

    Attributes:
        flags: flags of `commplan explain`, such as `--topology T.toml --shapes S.json`. Without shapes a plan
            with trees does not compile, and its stages are not explained.
    """

    def __init__(self) -> None:
        self.flags: Sequence[str] = ()
        self._tasks: dict[str, tuple[str, asyncio.Task[Stages]]] = {}

    def explain(self, uri: str, document: PlanDocument) -> asyncio.Task[Stages]:
        """Start compiling a document, once for each text; returns the task with the result.

        The result is empty for a plan that does not compile.
        """
        text, task = self._tasks.get(uri, ("", None))
        if task is not None and text == document.text:
            return task
        self.forget(uri)
        task = asyncio.create_task(self._explain(document))
        self._tasks[uri] = (document.text, task)
        return task

    def forget(self, uri: str) -> None:
        """Cancel the compilation of a document."""
        _, task = self._tasks.pop(uri, ("", None))
        if task is not None:
            task.cancel()

    async def _explain(self, document: PlanDocument) -> Stages:
        """Run `commplan explain` on a document. A cancellation ends the process."""
        if document.analysis.plan is None:
            return {}
        # -P: do not import modules from the working directory.
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


def _machine(document: PlanDocument) -> list[str]:
    """The plan's topology as a flag: the command reads stdin, and cannot resolve a relative path."""
    plan = document.analysis.plan
    declared = plan.topology if plan is not None else None
    return ["--topology", str(Path(document.file).parent / declared.path)] if declared is not None else []


def stages(document: bytes) -> Stages:
    """The lines of each stage in the JSON output of `explain`, by plan line."""
    phases = json.loads(document)["phases"]
    return {line["line"]: line["text"] for phase in phases for line in phase["lines"]}
