"""Tracebacks of embedded errors end at the user's line, and other exceptions keep all of theirs."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from support.embedding import bind, mesh_of

import commplan
from commplan import tracebacks
from commplan.diagnostics import CommplanError, fail
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.joint_calls import JointCalls

PLAN = """plan p
axis data = 2
source images : f32[3]
fn decode(f32[3]) -> f32[3] on host
input grads : tree partial data
each step {
    raw = load images batch 2 split data visit exactly_once seed 0
    batch = map decode(raw)
    grads = reduce grads over data by sum
    output batch, grads
}
"""


def broken(record: Any) -> Any:
    raise RuntimeError("no such picture")


def run_of() -> Any:
    sources, functions = {"images": np.zeros((4, 3), np.float32)}, {"decode": broken}
    shapes = {"grads": {"w": np.zeros(3, np.float32)}}
    return bind(PLAN, mesh_of(data=2), shapes, sources=sources, functions=functions)


def lines(error: BaseException) -> list[str]:
    """The functions of the traceback of a caught error, this module's marked."""
    return [
        frame.name if frame.filename == __file__ else f"{frame.filename}:{frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]


def raised(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(CommplanError) as error:
        call()
    assert error.value.__suppress_context__ or error.value.__context__ is None
    return lines(error.value)[1:]  # without this function


def test_calls_of_the_public_face_are_the_last_line():
    run = run_of()
    plan = commplan.loads(PLAN)
    ours = {
        "loads": lambda: commplan.loads("plan p\nnonsense"),
        "load": lambda: commplan.load("/no/such/file.plan"),
        "folder": lambda: commplan.folder("/no/such/folder"),
        "join": lambda: commplan.join("tracebacks", plan, sources={}, phase="no such phase"),
        "topology": lambda: commplan.load_topology("/no/such/file.toml"),
        "compile": lambda: plan.compile(axes={"dta": 3}),
        "program": lambda: commplan.Program.load("/no/such/program.json"),
        "bind": lambda: run.program.bind(run.mesh),
        "phase": lambda: run.step({}, grads={"w": np.zeros((2, 3), np.float32)}),
        "unknown": lambda: run.nothing,
        "every": lambda: run.every[3],
        "spmd": lambda: run.spmd(x="nowhere"),
        "parameters": lambda: run.spmd(x="same")(lambda state: state),
        "batches": lambda: run.batches("nothing"),
        "member": lambda: run.member(0),
        "inherited": lambda: run.layers(None, [], 0),
        "sharding": lambda: run.sharding("nothing"),
    }
    for name, call in ours.items():
        assert raised(call) == ["<lambda>"], name


@pytest.mark.parametrize("jit", [jax.jit, lambda step: step], ids=["jit", "alone"])
def test_the_users_step_is_shown(jit: Any):
    run = run_of()

    @jit
    @run.spmd(x="per data")
    def train(state, x):
        return run.step(state, grads={"w": 3})

    def program() -> None:
        train({}, np.zeros(2, np.float32))

    assert raised(program) == ["program", "train"]


@pytest.mark.parametrize(
    "counted",
    [
        lambda step: JointCalls().counted(step, mock.Mock(communicates=True)),
        lambda step: Calls((0, 1), None).counted(step, "train")[0],
    ],
    ids=["joint", "recorded"],
)
def test_steps_that_processes_call_together_are_called_by_the_last_line(counted: Any):
    """An error before a step runs is reported at the line that calls it."""

    def train() -> None:
        fail("CP0854", "rank 1 calls another step")

    vars(train).update(dict.fromkeys(("lower", "trace", "eval_shape", "clear_cache")))
    step = counted(train)

    def program() -> None:
        step()

    assert raised(program) == ["program", "train"]


def test_what_a_users_function_raised_is_its_cause():
    batches = run_of().batches()

    def program() -> None:
        next(batches)

    with pytest.raises(CommplanError) as error:
        program()
    assert lines(error.value)[1:] == ["program"]
    assert "no such picture" in "".join(traceback.format_exception(error.value))
    batches.close()


def test_other_exceptions_keep_their_frames(monkeypatch: Any):
    """A mistake of commplan itself is not hidden."""
    run = run_of()
    monkeypatch.setattr(type(run.step), "check_names", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError) as error:
        run.step({}, grads={"w": np.zeros((2, 3), np.float32)})
    assert any("runtime/phases.py:__call__" in frame for frame in lines(error.value))


def test_all_frames_are_there_where_they_are_asked_for(monkeypatch: Any):
    monkeypatch.setenv("COMMPLAN_TRACEBACK", "1")
    assert len(raised(lambda: commplan.loads("plan p\nnonsense"))) > 1


def test_frames_of_the_user_between_ours_stay():
    @tracebacks.ends_at_caller
    def inner() -> None:
        fail("CP0811", "inside")

    def callback() -> None:
        inner()

    outer = tracebacks.ends_at_caller(lambda call: call())
    assert raised(lambda: outer(callback)) == ["<lambda>", "<lambda>", "callback", "inner"]


def test_a_program_ends_with_the_users_line(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text("import commplan\n\n\ndef main():\n    commplan.loads('nonsense')\n\n\nmain()\n")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    shown = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert [line.rpartition(", in ")[2] for line in shown] == ["<module>", "main"]
    assert "commplan.diagnostics.CommplanError: " in done.stderr
