"""The example in the manual equals the output of the command."""

from __future__ import annotations

import re
from pathlib import Path

import commplan
from commplan.cost import Predictor, predict
from commplan.explain.report import explain_plan
from commplan.topology import parse_topology

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "choices.md"
SHAPES = {"embedding": {"shape": [4000, 256], "dtype": "f32"}, "head": {"shape": [256, 100], "dtype": "f32"}}


def test_the_printed_example() -> None:
    section = PAGE.read_text(encoding="utf-8")
    plan_text, topology, printed = re.findall(r"```(?:text|toml)\n(.*?)```", section, re.DOTALL)[:3]
    plan = commplan.loads(plan_text)
    machine = parse_topology(topology)
    schedule = plan.compile(shapes={"grads": SHAPES}, topology=machine, backend="mpi").schedule
    predictor = Predictor(machine, schedule.axes, backend="mpi")
    text = explain_plan(plan.graph, schedule, predictor, None, predict(schedule, predictor)).text()
    assert text == printed
