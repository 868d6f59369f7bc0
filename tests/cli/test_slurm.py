"""The command under Slurm: a process that is alone on its node has all GPUs of the node."""

from __future__ import annotations

import pytest

from commplan.cli.verbs.calibrate import _gpus_of_node


@pytest.mark.parametrize(
    ("tasks", "gpus", "devices"),
    [("1(x4)", "8", list(range(8))), ("8(x4)", "8", None), ("1", "", None), ("", "", None)],
)
def test_a_process_that_is_alone_on_its_node_has_all_its_gpus(
    monkeypatch: pytest.MonkeyPatch, tasks: str, gpus: str, devices: list[int] | None
) -> None:
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    monkeypatch.delenv("SLURM_TASKS_PER_NODE", raising=False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", gpus)
    assert _gpus_of_node() == devices
