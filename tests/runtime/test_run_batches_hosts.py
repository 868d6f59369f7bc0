"""Input shared between hosts under jax.distributed: every design gives every process the same bits."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import host_processes, interpreter
from support.embedding import mesh_of
from support.ports import free_port


def run(hosts: str, case: str, out: Path, platform: str = "cpu") -> list[dict[str, Any]]:
    environment = {**os.environ, "JAX_PLATFORMS": platform, "JAX_NUM_CPU_DEVICES": "1"}
    environment["SECOND_PORT"] = str(free_port())
    tests = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    count, port = len(hosts.split(",")), str(free_port())
    command = [*interpreter.words(environment), host_processes.__file__, port]
    started = [
        subprocess.Popen(
            [*command, str(i), str(count), hosts, case, out],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    errors = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0] * count, "\n".join(errors)
    return [json.loads((out / f"{i}.json").read_text()) for i in range(count)]


@pytest.mark.parametrize("hosts", ["a,a,b,b", "a,b,c,d"])
def test_every_design_gives_every_process_the_same_bits(hosts: str, tmp_path: Path):
    reports = run(hosts, "everything", tmp_path)
    names = hosts.split(",")
    for report in reports:
        alone = report["duplicate"]["items"]
        assert len(alone) == 6
        for design in host_processes.DESIGNS[1:]:
            assert report[design]["items"] == alone, design
            assert report[design]["hosts"] == [names.index(name) for name in names] or len(set(names)) == 2
    for design, readers in zip(host_processes.DESIGNS, (4, 4, 2, 3), strict=True):
        # Twenty-one records in each of two epochs, made once however many members there are.
        decoded = sorted(record for report in reports for record in report[design]["decoded"])
        once = sorted(host_processes.RECORDS[:, 0].tolist() * 2)
        assert decoded == sorted(once * 4 if design == "duplicate" else once), design
        assert sum(bool(report[design]["decoded"]) for report in reports) == readers, design
        # One program a batch, launched by the first process of each host alone.
        leaders = [names.index(name) == place for place, name in enumerate(names)]
        expected = [6 if leads and design != "duplicate" else 0 for leads in leaders]
        assert [report[design]["launched"] for report in reports] == expected, design


def test_members_of_one_process_get_the_same_bits_as_members_of_many(tmp_path: Path):
    """The many have no CPU among their devices, as under JAX_PLATFORMS=cuda."""
    reports = run("a,b", "everything", tmp_path, "no_cpu")
    alone, _ = host_processes.bound("all_shared", 2, mesh_of(member=2))
    items = host_processes.seen(alone, 2)
    assert json.loads(json.dumps(items)) == reports[0]["all_shared"]["items"]


def test_an_error_on_one_host_reaches_all(tmp_path: Path):
    reports = run("a,a,b", "failing", tmp_path)
    assert {report["code"] for report in reports} == {"CP0906"}, reports
    assert len({report["message"] for report in reports}) == 1
    assert sum(any("process" in note for note in report["notes"]) for report in reports) >= 2
