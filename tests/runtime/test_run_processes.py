"""A run over several processes gives what one process gives, and each record is decoded once per host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from support import two_processes
from support.embedding import mesh_of
from support.ports import free_port


def test_two_processes_agree_with_one(tmp_path: Path):
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-W", "error", two_processes.__file__, port]
    started = [
        subprocess.Popen(
            [*command, str(index), "2", str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    ends = [(one.communicate(timeout=240)[1], one.returncode) for one in started]
    assert [code for _, code in ends] == [0, 0], ends[0][0] + ends[1][0]
    alone = two_processes.train(mesh_of(member=2, data=2))
    parts = [np.load(tmp_path / f"{index}.npz") for index in range(2)]
    for member, part in enumerate(parts):
        np.testing.assert_array_equal(part["batch"], alone["batch"][:, member : member + 1])
        np.testing.assert_allclose(part["grads"], alone["grads"][:, member : member + 1], rtol=1e-6)
        np.testing.assert_allclose(part["best"], alone["best"], rtol=1e-6)
    # Ten records and two of padding, twice: what one process decodes alone, two share.
    decoded = sorted(np.concatenate([part["decoded"] for part in parts]))
    assert decoded == sorted(alone["decoded"])
    assert all(0 < len(part["decoded"]) < len(decoded) for part in parts)
