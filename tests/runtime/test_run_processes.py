"""A run over several processes equals one in a single process, and each record is decoded once per host."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from support import interpreter, two_processes
from support.embedding import mesh_of
from support.ports import free_port

import commplan.orbax


def played(case: str, place: Path) -> None:
    """Two processes; they must end well."""
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [*interpreter.words(environment), two_processes.__file__, port]
    started = [
        subprocess.Popen(
            [*command, str(index), "2", case, str(place)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    ends = [(process.communicate(timeout=240)[1], process.returncode) for process in started]
    assert [code for _, code in ends] == [0, 0], ends[0][0] + ends[1][0]


def test_two_processes_agree_with_one(tmp_path: Path):
    played("trained", tmp_path)
    alone = two_processes.train(mesh_of(member=2, data=2))
    parts = [np.load(tmp_path / f"{index}.npz") for index in range(2)]
    for member, part in enumerate(parts):
        np.testing.assert_array_equal(part["batch"], alone["batch"][:, member : member + 1])
        np.testing.assert_allclose(part["grads"], alone["grads"][:, member : member + 1], rtol=1e-6)
        np.testing.assert_allclose(part["best"], alone["best"], rtol=1e-6)
        np.testing.assert_allclose(part["center"][0], alone["center"][0, member : member + 1], rtol=1e-6)
    # One process restores what both have saved.
    mesh = mesh_of(member=2, data=2)
    run = two_processes.bound(mesh, list)
    with ocp.Checkpointer(commplan.orbax.PlanCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            tmp_path / "checkpoint", args=commplan.orbax.Checkpoint(run).restore()
        )
    center = np.concatenate([part["center"][0] for part in parts])
    np.testing.assert_array_equal(restored["state"]["center"]["w"], center)
    assert restored["batches"]["epoch"] == 2
    # Ten records and two of padding, twice: one process decodes them alone, or two share them.
    decoded = sorted(np.concatenate([part["decoded"] for part in parts]))
    assert decoded == sorted(alone["decoded"])
    assert all(0 < len(part["decoded"]) < len(decoded) for part in parts)


def test_all_processes_are_told_where_they_bind_different_programs(tmp_path: Path):
    played("apart", tmp_path)
    reports = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]
    for report in reports:
        assert (
            "error[CP0845]: not every process binds the same program: process 1 differs from process 0"
            in (report["different"])
        )
        for index, name in enumerate(("sum", "mean")):
            reduction = rf"process {index}: line 5 of the plan, in phase `step`: Reduce\(.*name='{name}'"
            assert re.search(reduction, report["different"])
            assert f"process {index}: seed {7 + index}" in report["seeds"]
        assert "error[CP0845]: not every process binds with the same seed" in report["seeds"]
    assert "error[CP0845]: not every process binds on the same mesh" in reports[0]["meshes"]
    order = r"process 1: member = 2 \(Auto\), data = 2 \(Auto\); devices \d+, \d+, 0, 1\n"
    assert re.search(order, reports[0]["meshes"])
    assert "error[CP0801]: the mesh has no axis `data`" in reports[1]["axes"]
    assert "process 1 cannot bind the program: CP0801" in reports[0]["axes"]
    assert "error[CP0845]: process 1 cannot bind the program" in reports[0]["unknown"]
    assert "CP0803 the plan has no source `s`" in reports[0]["unknown"]
    assert "error[CP0803]: the plan has no source `s`" in reports[1]["unknown"]
    assert "error[CP0849]: not all of processes 0, 1 bind `p`: one did not arrive" in reports[0]["alone"]


def test_a_process_that_does_not_open_shared_batches_is_missed(tmp_path: Path):
    played("opened", tmp_path)
    text = json.loads((tmp_path / "0.json").read_text())
    assert (
        "error[CP0849]: not all of processes 0, 1 share the data that they load: one did not arrive" in text
    )
    assert "run.batches(timeout=SECONDS) waits longer" in text


@pytest.mark.parametrize("case", ["paced", "members"])
def test_members_find_one_another_across_processes(case: str, tmp_path: Path):
    played(case, tmp_path)
    ends = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]
    assert [end["rows"] for end in ends] == [8, 8]
    assert sorted(ends[0]["decoded"] + ends[1]["decoded"]) == list(range(0, 48, 6))
