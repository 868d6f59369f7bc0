"""Targets of ahead-of-time compilation, and the errors if they are missing."""

from __future__ import annotations

import importlib.util

import pytest

from commplan.diagnostics import CommplanError
from commplan.lowering.audit import target
from commplan.lowering.gpu.targets import rates
from commplan.lowering.jax import aot


def test_a_target_is_a_kind_and_a_count() -> None:
    four = target("h100:4x8")
    assert (four.name, four.hosts, four.per_host, four.topology) == ("h100", 4, 8, "4x1x8")
    assert "cuda_compute_capability { major: 9 minor: 0 }" in four.config
    assert target(" A100 ").topology == "1x1x1"
    assert "major: 8" in target("a100").config


@pytest.mark.parametrize(
    "text", ["", "h100:", "h100:4", "h100:0x8", "b9000:4x8", "h100:4x8x2", "h100:4x99999999"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(CommplanError) as caught:
        target(text)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "CP1150"
    assert diagnostic.message == f"`{text}` is not a target"


def test_rates_are_a_target_or_a_machine() -> None:
    machine = target("h100:4x8").machine
    assert rates("h100:4x8") == rates(machine) == machine
    assert rates(None) is None
    with pytest.raises(CommplanError, match=r"CP1150.*cannot estimate for a Target"):
        rates(target("h100"))  # pyright: ignore[reportArgumentType]


def test_without_the_compiler_for_gpus_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(CommplanError) as caught:
        aot.devices(target("h100:1x2"))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "CP0850"
    assert "pip install --no-deps jax-cuda12-plugin" in diagnostic.notes[0].text
