"""`topology "FILE"` in a plan: the default machine of the compilation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import commplan
from commplan import dsl
from commplan.cli import main
from commplan.diagnostics import CommplanError, Diagnostic
from commplan.lint import LintInputs, lint
from commplan.lsp.document import PlanDocument
from commplan.topology import parse_topology

MACHINE = """name = "{name}"
[[level]]
name = "gpu"
count = {count}
latency = "3us"
bandwidth = "450GB/s"
[[level]]
name = "node"
count = 2
latency = "6us"
bandwidth = "50GB/s"
"""
PLAN = """plan p

axis data = 8

topology "machines/cluster.toml"

input grads : f32[1024] partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan next to a folder of two machines, one of them too small."""
    (tmp_path / "machines").mkdir()
    for name, count in (("cluster", 4), ("small", 2)):
        (tmp_path / "machines" / f"{name}.toml").write_text(MACHINE.format(name=name, count=count))
    (tmp_path / "p.plan").write_text(PLAN)
    return tmp_path / "p.plan"


def problem(plan: Path, **options: Any) -> Diagnostic:
    """The error of the compiled plan; the checker and the language server report the same."""
    with pytest.raises(CommplanError) as caught:
        commplan.load(plan).compile(**options)
    (diagnostic,) = caught.value.diagnostics
    text = plan.read_text()
    with pytest.raises(CommplanError) as caught:
        lint(dsl.analyze(text, str(plan)))
    assert caught.value.diagnostics == PlanDocument(text, str(plan)).diagnostics == (diagnostic,)
    return diagnostic


def test_a_plan_is_compiled_for_its_topology(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    program = commplan.load(plan).compile()
    assert program.schedule.topology is not None
    assert program.schedule.topology.name == "cluster"
    assert [spread.level for spread in program.schedule.axes[0].levels] == ["gpu", "node"]
    lines = lint(dsl.analyze(PLAN, str(plan)), LintInputs(sizes={"data": 8}))
    assert lines == ()


def test_a_topology_that_is_given_has_precedence(plan: Path) -> None:
    larger = parse_topology(MACHINE.format(name="larger", count=64))
    program = commplan.load(plan).compile(topology=larger)
    assert program.schedule.topology is not None
    assert (program.schedule.topology.name, program.schedule.topology.digest) == ("larger", larger.digest)
    (plan.parent / "machines" / "cluster.toml").unlink()
    assert commplan.load(plan).compile(topology=larger) == program


def test_the_topology_is_no_part_of_what_a_plan_says(plan: Path) -> None:
    plain = commplan.loads(PLAN.replace('topology "machines/cluster.toml"', ""))
    assert commplan.load(plan).digest == plain.digest
    machine = commplan.load_topology(plan.parent / "machines" / "cluster.toml")
    assert plain.compile(topology=machine).digest == commplan.load(plan).compile().digest
    saved = commplan.load(plan).compile().save(plan.parent)
    assert commplan.Program.load(saved, plain).schedule.topology is not None


def test_a_missing_file_is_reported_at_the_line_with_near_names(plan: Path) -> None:
    plan.write_text(PLAN.replace("cluster.toml", "clster.toml"))
    diagnostic = problem(plan)
    assert (diagnostic.code, diagnostic.file) == ("CP0712", str(plan))
    assert (diagnostic.span.line, diagnostic.span.column) == (5, 1) if diagnostic.span else False
    assert "clster.toml cannot be read: No such file" in diagnostic.message
    assert [note.text for note in diagnostic.notes] == ["did you mean `cluster.toml`?"]
    plan.write_text(PLAN.replace("machines/", "nowhere/"))
    assert problem(plan).notes == ()


def test_a_malformed_file_is_reported_at_the_line(plan: Path) -> None:
    (plan.parent / "machines" / "cluster.toml").write_text(
        MACHINE.format(name="x", count=4).replace("3us", "3")
    )
    diagnostic = problem(plan)
    assert (diagnostic.code, diagnostic.file, diagnostic.span and diagnostic.span.line) == (
        "CP0712",
        str(plan),
        5,
    )
    assert "the latency of level `gpu` is '3'" in diagnostic.message
    assert diagnostic.notes[-1].text == f"in {plan.parent / 'machines' / 'cluster.toml'}"


def test_axes_that_do_not_fit_are_reported_at_the_line(plan: Path) -> None:
    plan.write_text(PLAN.replace("cluster.toml", "small.toml"))
    diagnostic = problem(plan)
    assert (diagnostic.code, diagnostic.file, diagnostic.span and diagnostic.span.line) == (
        "CP0713",
        str(plan),
        5,
    )
    assert "8 ranks do not fit on topology `small`, which has 4 places" in diagnostic.message
    small = plan.parent / "machines" / "small.toml"
    with pytest.raises(CommplanError) as caught:
        commplan.load(plan).compile(topology=small)
    assert caught.value.diagnostics[0].span is None, "the plan does not name the topology that is given"


@pytest.mark.parametrize("override", [False, True])
def test_the_commands_take_it(plan: Path, capsys: pytest.CaptureFixture[str], override: bool) -> None:
    machine = plan.parent / "machines" / "other.toml"
    machine.write_text(MACHINE.format(name="other", count=8))
    flags = ["--topology", str(machine)] if override else []
    name = "other" if override else "cluster"

    def printed(*words: str) -> str:
        assert main([*words, *flags]) == 0
        return capsys.readouterr().out

    assert json.loads(printed("simulate", str(plan), "--format", "json"))["topology"] == name
    assert f"  topology: {name}\n" in printed("explain", str(plan))
    scaled = json.loads(printed("simulate", str(plan), "--scale", "node=1/4", "--format", "json"))["machines"]
    assert [machine["topology"] for machine in scaled] == [name, f"{name}, node x 1/4"]
    printed("diff", str(plan), str(plan), "--fail-on", "slower:1%")
    printed("check", str(plan))
