"""`bench.compiled --keep`: a stored step is read only for the same text, options and version of JAX."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from bench.compiled import steps
from commplan.lowering.audit import target


class LoweredText:
    """A lowered step that counts its compilations."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.compilations = 0

    def as_text(self) -> str:
        return self.text

    def compile(self, **_: Any) -> Any:
        self.compilations += 1
        memory = SimpleNamespace(temp_size_in_bytes=1)
        return SimpleNamespace(as_text=lambda: "compiled", memory_analysis=lambda: memory)


def test_changed_steps_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, changed = LoweredText("first"), LoweredText("changed")
    lowered = first
    monkeypatch.setattr(steps, "_lowered", lambda *_: lowered)
    monkeypatch.setattr(steps, "row", lambda names, text, memory, rates: (names, text, memory))

    def row(**options: str) -> Any:
        return steps.Compiler(tmp_path).row("model", target("h100:1x8"), steps.PLAN, options)

    assert row() == row() == (("model", "h100:1x8", steps.PLAN), "compiled", 1)
    assert first.compilations == 1
    row(xla_option="1")
    assert first.compilations == 2
    lowered = changed
    row()
    assert changed.compilations == 1
    monkeypatch.setattr(jax, "__version__", "0.0.0")
    row()
    assert changed.compilations == 2
