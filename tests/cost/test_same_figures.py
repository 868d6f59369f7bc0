"""Every tool prints what `predict` returns, to the last digit.

All 200 cases: python -m pytest -m "campaign or not campaign" tests/cost/test_same_figures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.campaign import parameters
from support.reports import document

import commplan
from bench.choice_cases import case
from commplan.cli import main
from commplan.cost import Predictor, predict
from commplan.explain.times import phase_times
from commplan.ir.types import timed
from commplan.topology import load_topology

pytestmark = pytest.mark.usefixtures("short_search")
Figures = dict[str, tuple[float, float, float]]  # alone, computation and exposed seconds of a phase


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def figures(phases: list[dict[str, Any]]) -> Figures:
    return {each["name"]: (each["alone"], each["computation"], each["exposed"]) for each in phases}


@pytest.mark.parametrize("seed", parameters((2, 502, 503), range(3, 200)))
def test_all_tools_print_the_same_figures(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generated = case(seed)
    plan, shapes, topology = tmp_path / "a.plan", tmp_path / "shapes.json", tmp_path / "machine.toml"
    for file, text in (
        (plan, generated.text()),
        (shapes, json.dumps(generated.shapes)),
        (topology, generated.topology),
    ):
        file.write_text(text)
    words = ["--shapes", str(shapes), "--topology", str(topology), "--backend", generated.backend]
    compiled = commplan.load(plan).compile(
        shapes=generated.shapes, topology=topology, backend=generated.backend
    ).schedule  # fmt: skip
    predicted = predict(
        compiled, Predictor(load_topology(topology), compiled.axes, backend=generated.backend)
    )
    (phase,) = predicted.phases
    expected = {phase.name: (phase.alone, phase.computation, phase.exposed)}

    simulated = shown(capsys, "simulate", str(plan), *words)
    assert figures(simulated["phases"]) == expected
    explained = shown(capsys, "explain", str(plan), *words)
    assert figures([{"name": each["name"], **each["times"]} for each in explained["phases"]]) == expected
    pinned = tmp_path / "pinned.plan"
    pinned.write_text(generated.text(0, option="bucket = 1 MiB"))
    changes = shown(capsys, "diff", str(plan), str(pinned), *words)["changes"]
    before = {each["measure"]: each["before"] for each in changes if not each["subject"]}
    assert (before["alone"], before["exposed"]) == (phase.alone, phase.exposed)
    assert main(["report", str(plan), "-o", str(tmp_path / "r.html"), *words]) == 0
    capsys.readouterr()
    (reported,) = document(tmp_path / "r.html")["phases"]
    assert figures([{**reported, "name": phase.name}]) == expected
    assert simulated["phases"][0]["times"] == reported["times"] == phase_times(phase)
    alone = [
        [op["alone"] for op in ops]
        for ops in (simulated["phases"][0]["ops"], explained["phases"][0]["times"]["ops"])
    ]
    assert alone[0] == alone[1] == [op.alone for op in phase.ops]

    pinned.write_text(generated.text(0, "ring"))
    slower = (
        commplan.load(pinned)
        .compile(shapes=generated.shapes, topology=topology, backend=generated.backend)
        .schedule
    )
    exposed = (
        predict(slower, Predictor(load_topology(topology), slower.axes, backend=generated.backend))
        .phases[0]
        .exposed
    )
    for warning in shown(capsys, "check", str(pinned), *words)["diagnostics"]:
        if warning["message"].startswith("`via ring` leaves"):
            text = f"leaves {timed(exposed)} of the phase exposed; without it {timed(phase.exposed)}"
            assert warning["message"] == f"`via ring` {text}"
