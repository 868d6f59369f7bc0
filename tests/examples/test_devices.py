"""`--device` of the examples: the devices that it chooses, and that no example pins a platform."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import devices  # noqa: E402  # pyright: ignore[reportMissingImports]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """JAX's options that are set, which are kept from JAX."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(jax, "config", SimpleNamespace(update=options.__setitem__))
    return options


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, cpus: int) -> None:
    """JAX finds so many devices of each kind, and prefers GPUs."""
    kinds = {kind: [SimpleNamespace(platform=kind)] * n for kind, n in (("gpu", gpus), ("cpu", cpus))}

    def found(platform: str | None = None) -> list[Any]:
        listed = kinds[platform or ("gpu" if gpus else "cpu")]
        if not listed:
            raise RuntimeError(f"Unknown backend {platform}")
        return listed

    monkeypatch.setattr(jax, "devices", found)


@pytest.mark.parametrize(
    ("device", "gpus", "chosen"),
    [
        (None, 0, "cpu"), (None, 3, "cpu"), (None, 4, "gpu"), (None, 8, "gpu"), ("gpu", 4, "gpu"),
        ("cpu", 8, "cpu"),
    ],
)  # fmt: skip
def test_there_is_a_device_for_each_place(
    device: str | None, gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch, configured: dict[str, Any]
) -> None:
    machine(monkeypatch, gpus, 4)
    assert [each.platform for each in devices.choose(device, 4)] == [chosen] * 4
    assert configured["jax_num_cpu_devices"] == 4
    assert configured.get("jax_platforms") == ("cpu" if device == "cpu" else None)
    assert ("jax_default_device" in configured) is (device is None and chosen == "cpu" and gpus > 0)


@pytest.mark.parametrize(
    ("device", "gpus", "cpus", "words"),
    [
        ("gpu", 0, 4, "JAX says: Unknown backend gpu"), ("gpu", 2, 4, "finds 2 of kind GPU"),
        (None, 2, 0, "JAX says"),
    ],
)  # fmt: skip
def test_too_few_devices_end_the_program_with_advice(
    device: str | None, gpus: int, cpus: int, words: str, monkeypatch: pytest.MonkeyPatch,
    configured: dict[str, Any],
) -> None:  # fmt: skip
    machine(monkeypatch, gpus, cpus)
    with pytest.raises(SystemExit, match=words) as error:
        devices.choose(device, 4)
    assert "4 devices are needed" in str(error.value) and "--device cpu" in str(error.value)


def test_ranks_of_mpi_have_no_choice() -> None:
    parser = argparse.ArgumentParser()
    devices.add_option_of_ranks(parser)
    assert parser.parse_args([]).device == "cpu"
    with pytest.raises(SystemExit):
        parser.parse_args(["--device", "gpu"])


def test_every_program_takes_the_option() -> None:
    programs = [path for path in EXAMPLES.glob("*.py") if "def main(argv" in path.read_text()]
    assert len(programs) == 9
    for path in programs:
        assert "devices.add_option" in path.read_text(), path
