"""Permutes between processes equal the oracle bitwise."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
from support import interpreter, programs_processes
from support.oracle import Oracle
from support.ports import free_port

import commplan


def test_rounds_between_processes_agree_with_the_oracle(tmp_path: Path):
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [*interpreter.words(environment), programs_processes.__file__, port]
    started = [
        subprocess.Popen(
            [*command, str(index), "2", str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    ends = [(process.communicate(timeout=240)[1], process.returncode) for process in started]
    assert [code for _, code in ends] == [0, 0], ends[0][0] + ends[1][0]
    program = commplan.loads(programs_processes.PLAN).compile(
        axes={"node": 2, "gpu": 2}, shapes={"x": programs_processes.like()}
    )
    expected, _ = Oracle(program.schedule).phase("step", {}, {"x": programs_processes.inputs()})
    for index in range(2):
        part = np.load(tmp_path / f"{index}.npz")
        assert len(part.files) == 12
        for key in part.files:
            name, leaf = key.split()
            if name == "mine" and leaf == "f":  # the first additions of a native level are up to XLA
                np.testing.assert_allclose(part[key], expected[name][leaf], rtol=1e-5, atol=1e-5)
            else:
                assert part[key].tobytes() == np.asarray(expected[name][leaf]).tobytes(), key
