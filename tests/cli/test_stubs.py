"""`commplan stubs`: a face of each plan, what type checkers say of a program with it, and what completes.

pyright looks at `tests/typed` with all the rest (`make types`); here mypy does.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.embedding import bind, mesh_of

import commplan
from commplan.cli import main
from commplan.diagnostics import CommplanError
from commplan.stubs import stubs

ROOT = Path(__file__).resolve().parents[2]
TYPED = ROOT / "tests" / "typed"
EXAMPLES = sorted((ROOT / "examples" / "plans").glob("*.plan"))


def test_the_face_of_a_plan_is_written(tmp_path: Path, capsys: Any, monkeypatch: Any):
    monkeypatch.chdir(TYPED)
    assert main(["stubs", "linear.plan", "-o", str(tmp_path / "plans.pyi")]) == 0
    text = (tmp_path / "plans.pyi").read_text()
    assert text == (TYPED / "plans.pyi").read_text()  # which mypy and pyright look at
    capsys.readouterr()
    assert main(["stubs", "linear.plan"]) == 0
    assert capsys.readouterr().out == text


def test_two_plans_of_one_name():
    plan = commplan.load(TYPED / "linear.plan").graph
    with pytest.raises(CommplanError) as error:
        stubs([plan, plan], "plans")
    assert error.value.diagnostics[0].code == "CP1126"


@pytest.mark.parametrize("first, second", [("a_b", "aB"), ("total", "total_state")])
def test_two_phases_of_one_class(first: str, second: str):
    body = "{\n    g = reduce g over data by sum\n    output g\n}\n"
    head = "plan p\naxis data = 2\ninput g : f32[4] partial data\n"
    plan = commplan.loads(f"{head}phase {first} {body}phase {second} {body}")
    with pytest.raises(CommplanError, match="two classes would be called `P") as error:
        stubs([plan.graph], "plans")
    assert error.value.diagnostics[0].code == "CP1126"


def test_a_face_says_what_its_run_does():
    """For every example: the phases, their arguments and their results."""
    for path in EXAMPLES:
        plan = commplan.load(path)
        tree = ast.parse(stubs([plan.graph], "plans"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        name = "".join(part.capitalize() for part in plan.name.split("_"))
        members = {ast.unparse(line.target) for line in classes[name].body if isinstance(line, ast.AnnAssign)}
        periods = any(phase.kind == "every" for phase in plan.graph.phases)
        phases = {phase.name for phase in plan.graph.phases if phase.kind != "every"}
        assert members == phases | ({"every"} if periods else set())


@pytest.mark.campaign
def test_mypy_knows_the_phases_of_a_plan(tmp_path: Path):
    """A right program has no errors, and each mistake is one: no comment that ignores one is unused."""
    faces = stubs([commplan.load(path).graph for path in EXAMPLES], "all_plans")
    (tmp_path / "all_plans.pyi").write_text(faces)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "program.py", "mistakes.py",
         str(tmp_path / "all_plans.pyi")],
        cwd=TYPED, capture_output=True, text=True, check=False, env={"MYPYPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.stdout == "Success: no issues found in 3 source files\n", done.stdout + done.stderr
    wrong = TYPED / "mistakes.py"
    (tmp_path / "mistakes.py").write_text(wrong.read_text().replace("  # type: ignore[", "  # ignore["))
    (tmp_path / "plans.pyi").write_text((TYPED / "plans.pyi").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(TYPED / "mypy.ini"), "--cache-dir", str(tmp_path),
         "mistakes.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={"MYPYPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    errors = [
        line for line in done.stdout.splitlines() if line.startswith("mistakes.py:") and ": error: " in line
    ]
    assert len(errors) == wrong.read_text().count("# type: ignore[") == 9, done.stdout


def test_the_typed_program_runs():
    spec = importlib.util.spec_from_file_location("typed_program", TYPED / "program.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(mesh_of(data=4), {"w": jnp.ones((4, 3)), "b": jnp.zeros((4,))}) == 3.0


def test_phases_and_outputs_complete():
    text = (TYPED / "linear.plan").read_text()
    tree = {"w": np.zeros(3, np.float32)}
    shapes: dict[str, Any] = dict.fromkeys(("params", "grads", "center"), tree)
    run = bind(text, mesh_of(data=2), shapes)
    assert {"start", "step", "evaluate", "every", "init", "spmd", "batches", "sharding"} <= set(dir(run))
    out, _ = run.start({}, params={"w": jax.numpy.ones((2, 3))})
    assert dir(out) == ["center"]
    assert run.every._ipython_key_completions_() == [4, 16]


@pytest.mark.parametrize(("name", "expected"), [("true", "true_"), ("_", "__"), ("_1", "_1_"), ("a_b", "AB")])
def test_faces_are_named_as_python_can(name: str, expected: str):
    text = (TYPED / "linear.plan").read_text().replace("plan linear", f"plan {name}")
    faces = stubs([commplan.loads(text).graph], "plans")
    assert f"class {expected}:" in faces or f"class {expected}(" in faces
    compile(faces, "plans.pyi", "exec")


def test_a_plan_is_never_written_over(tmp_path: Path):
    plan, link = tmp_path / "linear.plan", tmp_path / "link.pyi"
    plan.write_text((TYPED / "linear.plan").read_text())
    link.symlink_to(plan)
    for output in (plan, link):
        done = subprocess.run(
            [sys.executable, "-m", "commplan", "stubs", str(plan), "-o", str(output)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "CP1101" in done.stderr
    assert plan.read_text() == (TYPED / "linear.plan").read_text()


def test_names_that_are_keywords_are_given_and_read_by_name():
    text = """plan p
axis data = 1
input import : tree partial data
input other : tree partial data
each step {
    None = reduce import over data by mean
    x    = reduce other over data by mean
    output None, x
}
"""
    faces = stubs([commplan.loads(text).graph], "plans")
    compile(faces, "plans.pyi", "exec")
    assert "*, other: Any, **others: Any)" in faces and 'Literal["None"]' in faces and "def None" not in faces
