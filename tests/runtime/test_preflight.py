"""`run.jit` under `jax.distributed`, and how the steps of many ranks are compared."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import interpreter, preflight_steps
from support.campaign import parameters
from support.embedding import mesh_of
from support.ports import free_port

import commplan
from commplan.api import Program
from commplan.diagnostics import CommplanError
from commplan.hang_limits import UNWATCHED
from commplan.lowering.jax import _jit
from commplan.recorder import live
from commplan.recorder.file import Recording
from commplan.recorder.rank_state import Comparison
from commplan.recorder.reading import read_call
from commplan.runtime.machines.machine import BindRequest, Issue, agree
from commplan.runtime.observe.abort_hook import report_once
from commplan.runtime.observe.joint_calls import JointCalls
from commplan.runtime.observe.watchdog import EXIT_STATUS
from commplan.runtime.preflight.preflight import Preflight, Step, issued_together

F32 = jax.ShapeDtypeStruct((3,), "float32")
REFUSED = {
    "phases": (
        "line 7 of the plan, in phase `step` (number 1 of 3)",
        "line 12 of the plan, in phase `norms`",
    ),
    "batch": ("process 0: argument [2]: f32[8, 6]", "process 1: argument [2]: f32[4, 6]"),
    "accumulated": ("process 1 issues another collective than process 0 as number",),
    "own": ("process 0: nothing more after 3", "process 1: all_reduce(sum) f32[3] over data (number 4 of 4)"),
    "own_order": (
        "process 0: all_reduce(sum) f32[3] over data",
        "process 1: all_reduce(sum) f32[4] over data",
    ),
    "without_jit": ("process 1: jax_disable_jit is set",),
    "constant": (
        "process 1 computes something else than process 0 in `train`",
        "process 0: stablehlo.constant () -> tensor<",  # i32 in JAX 0.12, f32 before
        "preflight_steps.py:",
    ),
}


def ended(cases: str, flags: tuple[str, str] = ("", "")) -> list[tuple[tuple[str, str], int]]:
    """The output and exit status of two processes."""
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    program = [preflight_steps.__file__, "jax", cases, port]
    started = [
        subprocess.Popen(
            [*interpreter.words(environment), *program, str(index)],
            env={**environment, "XLA_FLAGS": flags[index]} if flags[index] else environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    return [(process.communicate(timeout=240), process.returncode) for process in started]


def answers(cases: str, flags: tuple[str, str] = ("", "")) -> dict[str, list[list[str]]]:
    """By case, the outcome of each call on each of two processes."""
    ends = ended(cases, flags)
    assert [code for _, code in ends] == [0, 0], "".join(errors for (_, errors), _ in ends)
    lines = [
        line
        for (output, _), _ in ends
        for line in output.splitlines()
        if line.startswith("[") and '"' in line
    ]
    said: dict[str, list[list[str]]] = {}
    for _, name, words in sorted(map(json.loads, lines)):
        said.setdefault(name, []).append(words)
    return said


@pytest.fixture(scope="module")
def said() -> dict[str, list[list[str]]]:
    return answers(
        ",".join(("same", "later", "prints", *REFUSED, "untraceable", "differs", "checks", "miscounted"))
    )


def test_the_same_step_trains_as_under_jax_jit(said: dict[str, list[list[str]]]):
    # Before and after each compilation, for each shape, and again when parameters come from the devices; and
    # once the values.
    assert said["same"] == [["ran, compared 9 times"]] * 2


def test_a_new_shape_is_compared_again(said: dict[str, list[list[str]]]):
    assert said["later"][0] == said["later"][1]
    first, second, third = said["later"][0]
    assert first == third == "ran"
    assert "process 0: argument [2]: f32[12, 6]" in second and "process 1: argument [2]: f32[16, 6]" in second


def test_one_process_may_print(said: dict[str, list[list[str]]]):
    assert said["prints"] == [["ran", "ran"], ["ran", "ran"]]


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_on_all_processes(said: dict[str, list[list[str]]], case: str):
    assert said[case][0] == said[case][1]
    for answer in said[case][0]:
        assert answer.startswith("error[CP0854]: process 1 ")
        for words in REFUSED[case]:
            assert words in answer


def test_values_that_should_be_the_same_are_compared_before_the_first_step(said: dict[str, list[list[str]]]):
    assert said["differs"][0] == said["differs"][1]
    first, again, unchecked = said["differs"][0]
    assert first == again and unchecked == "ran"
    assert first.startswith("error[CP0861]: leaf `w` of `params` differs between process 0 and process 1\n")
    assert "process 0: float32[6], 1.0, " in first and "process 1: float32[6], 2.0, " in first


def test_a_process_without_a_step_tells_the_others(said: dict[str, list[list[str]]]):
    assert said["untraceable"][1] == ["ZeroDivisionError division by zero"]
    assert "process 1 has no step: ZeroDivisionError division by zero" in said["untraceable"][0][0]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("late_shape", "`train` with argument [2]: f32[12, 6], process 0 with argument [2]: f32[8, 6]"),
        ("late_check", "`run.check_collectives()` while process 0 runs `train`"),
    ],
)
def test_a_process_that_compares_while_the_other_runs_is_refused_on_both(case: str, expected: str):
    for (_, errors), status in ended(case):
        assert status == EXIT_STATUS, errors
        assert f"error[CP0854]: process 1 calls {expected}\n" in errors
        for number in range(2):
            assert re.search(rf"note: process {number} .* at \S+preflight_steps\.py:\d+ in ", errors)


@pytest.mark.parametrize("case", parameters(["ends"], ["ends_later"]))
def test_a_process_that_ends_during_a_comparison_is_named_on_both(case: str):
    for (_, errors), status in ended(case):
        assert status == EXIT_STATUS, errors
        assert "error[CP0834]: the program has ended on process 1\n" in errors


def test_collectives_that_miscount_are_refused_on_all_processes(said: dict[str, list[list[str]]]):
    preflight_steps.assert_miscounts_refused(said["miscounted"])


def test_collectives_are_tried_by_all_processes_or_none(said: dict[str, list[list[str]]]):
    preflight_steps.assert_checks_agreed(said["checks"], "process")


@pytest.mark.parametrize(
    ("case", "here", "away"), parameters([("alone", 0, 1), ("checks_alone", 0, 1)], [("first_away", 1, 0)])
)
def test_a_process_that_does_not_come_is_named_in_time(case: str, here: int, away: int):
    said = answers(case)[case]
    assert said[here][0].startswith(f"error[CP0855]: process {away} did not arrive")
    assert "under run.jit: a step under a bare jax.jit does not take part" in said[here][0]
    assert said[away] == ["away"]


def test_a_process_that_does_not_come_is_printed_once_without_a_watchdog():
    ends = ended("unwatched_alone")
    text = "".join(errors for (_, errors), _ in ends)
    assert re.findall(
        r"commplan: (.*) within \d+ s\nnote: (.*) at \S+preflight_steps\.py:\d+ in .*, and waits", text
    ) == [("process 1 has not arrived", "process 0 calls `train`")]


def test_binding_compares_the_flags_of_xla():
    said = answers("binds", ("--xla_dump_to=", "--xla_cpu_enable_fast_math=true"))["binds"]
    assert said[0] == said[1]
    assert said[0][0].startswith("error[CP0845]: not every process binds with the same XLA_FLAGS: process 1")
    assert "process 0: none" in said[0][0] and "process 1: --xla_cpu_enable_fast_math=true" in said[0][0]


def refused(programs: Sequence[Program]) -> str:
    """The errors of processes that bind these programs."""
    barrier, answers = threading.Barrier(len(programs)), dict[int, Any]()

    def exchange(number: int, mine: Any) -> dict[int, Any]:
        barrier.wait(60)
        answers[number] = mine
        barrier.wait(60)
        return dict(sorted(answers.items()))

    def bind(number: int) -> str:
        program = programs[number]
        binding = BindRequest(program.schedule, program.digest, 0, lambda: None, UNWATCHED, 1.0)
        with pytest.raises(CommplanError) as raised:
            agree("process", binding, functools.partial(exchange, number))
        return str(raised.value)

    with ThreadPoolExecutor(len(programs)) as pool:
        texts = set(pool.map(bind, range(len(programs))))
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_of_three_the_one_that_differs_is_named(odd: int):
    plans = [preflight_steps.PLAN.replace("by mean", "by sum" if n == odd else "by mean") for n in range(3)]
    text = refused([commplan.loads(p).compile(backend="mpi", shapes={"grads": {}}) for p in plans])
    usual = 1 if odd == 0 else 0
    assert f"process {odd} differs from process {usual}\n" in text
    for number, name in ((odd, "sum"), (usual, "mean")):
        assert re.search(
            rf"process {number}: line 7 of the plan, in phase `step`: Reduce\(.*name='{name}'", text
        )


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({"a": F32, "w": jax.ShapeDtypeStruct((4,), "float32")}, "leaf `w` of `grads`: f32[4]"),
        ({"a": F32, "w": jax.ShapeDtypeStruct((3,), "bfloat16")}, "leaf `w` of `grads`: bf16[3]"),
        ({"a": F32, "v": F32}, "leaf `v` of `grads`: f32[3]"),
        (OrderedDict(w=F32, a=F32), "leaf `w` of `grads`: f32[3]"),
        ({"a": F32}, "`loss`: f32[]"),
    ],
)
def test_the_first_leaf_that_differs_is_named_with_path_shape_and_type(odd: Any, expected: str):
    plan = commplan.loads(preflight_steps.PLAN)
    programs = [plan.compile(backend="mpi", shapes={"grads": tree}) for tree in ({"a": F32, "w": F32}, odd)]
    notes = refused([*programs, programs[0]]).splitlines()[1:3]
    usual = "leaf `a` of `grads`: f32[3]" if isinstance(odd, OrderedDict) else "leaf `w` of `grads`: f32[3]"
    assert notes == [f"  note: process 0: {usual}", f"  note: process 1: {expected}"]


def test_one_process_has_nobody_to_compare_with():
    tree = {"w": jax.ShapeDtypeStruct((6,), jnp.float32)}
    program = commplan.loads(preflight_steps.PLAN).compile(mesh := mesh_of(data=2), shapes={"grads": tree})
    run = program.bind(mesh)

    @run.jit(static_argnames="times")
    def double(x: jax.Array, times: int = 2) -> jax.Array:
        return x * times

    assert type(double) is type(jax.jit(double))
    assert double(jnp.ones(2), times=3)[0] == 3


def test_ahead_of_what_the_fast_path_does_not_know():
    seen: list[str] = []

    def ahead(jitted, args, kwargs):
        seen.append(str(jitted.lower(*args, **kwargs).compile().in_avals[0][0].shape))

    def body(x, n=1, *, k=2.0):
        return x * n + k

    step = _jit.jit_ahead(body, ahead, static_argnames="n", donate_argnums=0)
    for size in (3, 3, 4, 3):
        given = jnp.ones(size)
        np.testing.assert_array_equal(step(given), np.full(size, 3.0))
        assert given.is_deleted()
    assert seen == ["(3,)", "(4,)"]
    assert step(jnp.ones(3), n=2, k=1.0)[0] == 3 and seen[2:] == ["(3,)"]
    assert step.lower(jnp.ones(3)).compile()(jnp.ones(3))[0] == 3 and step.__name__ == "body"
    # Within another trace it is a part of that, and nothing is compared.
    assert jax.jit(lambda x: step(x) + 1)(jnp.ones(5))[0] == 4
    assert jax.grad(lambda x: step(x).sum())(jnp.ones(5))[0] == 1
    assert seen[3:] == []
    with jax.disable_jit():
        assert step(jnp.ones(6))[0] == 3
    assert seen[3:] == ["(6,)"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("x: f32[8]",), "with x: f32[8], process 0 with x: f32[6] or x: f32[4]"),
        (("x: bf16[6]",), "with x: bf16[6], process 0 with x: f32[6] or x: f32[4]"),
        (("x: f32[6]", "y: f32[6]"), "with y: f32[6], process 0 with no more arguments or x: f32[4]"),
        (("x: f32[6]",), "with another static argument, sharding or structure than process 0"),
    ],
)
def test_a_call_is_told_from_those_that_were_agreed_on(arguments: tuple[str, ...], expected: str):
    machine = SimpleNamespace(layout="global", process=lambda: (1, 2))
    preflight = Preflight(machine, "x.plan", 1.0)  # pyright: ignore[reportArgumentType]
    for known in ("f32[4]", "f32[6]"):
        preflight._agreed[known] = Step("train", (f"x: {known}",), ())
    preflight._step = Step("train", arguments, ())
    message = preflight.comparison.message.replace("{}", "process 0")
    assert message == f"process 1 calls `train` {expected}"


def test_of_long_arguments_the_part_that_differs_is_shown():
    machine = SimpleNamespace(layout="global", process=lambda: (1, 2))
    preflight = Preflight(machine, "x.plan", 1.0)  # pyright: ignore[reportArgumentType]
    path = f"argument {'[layer]' * 300}"
    preflight._agreed["known"] = Step("train", (f"{path}: f32[4]",), ())
    preflight._step = Step("train", (f"{path}: f32[6]",), ())
    message = preflight.comparison.message
    assert re.fullmatch(
        r"process 1 calls `train` with \.\.\..{1,100}: f32\[6\], \{\} with \.\.\..{1,100}: f32\[4\]", message
    )


def test_a_rank_writes_the_progress_of_its_joint_calls_to_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    recording = Recording("job", "x", 0, 2, {"data": 2})
    calls, step = JointCalls(recording, 1), mock.Mock(comparison=Comparison("rank 0", "train", "{} differs"))

    def progress() -> tuple[int, bool, bool, str]:
        with recording.path.open("rb") as file:
            state = live.read_live(file.fileno())
        call = read_call(recording.path)
        assert state.group == 1 and call is not None
        return state.comparison, state.is_ahead, state.compares > 0, Comparison.read(call.text).message

    calls.begin("train")
    assert progress() == (live.position(1), False, False, "")
    with calls.ahead(step):
        assert progress() == (live.position(1, 0), True, False, "")
        with calls.waiting():
            assert progress() == (live.position(1, 1), True, True, "{} differs")
            calls.look()
    assert progress() == (live.position(1), False, False, "")
    with recording.path.open("r+b") as file:
        live.write_verdict(file.fileno(), "CP0854: rank 0 differs\nnote: a fix", "", 0.001, abandoned=False)
    with pytest.raises(CommplanError) as caught, report_once("rank", 1, 0):
        calls.look()
    assert str(caught.value) == "error[CP0854]: rank 0 differs\n  note: a fix"
    assert not hasattr(caught.value, "commplan_repeats")  # no other rank raises it


def test_the_end_of_a_comparison_is_recorded_before_a_c_call_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The thread that records calls cannot run then; a process that seems to compare a step is refused."""
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    recording = Recording("job", "x", 0, 2)
    calls, step = JointCalls(recording, is_put=True), mock.Mock(comparison=Comparison("process 0", "train"))

    def progress() -> tuple[int, bool]:
        with recording.path.open("rb") as file:
            state = live.read_live(file.fileno())
        return state.comparison, state.compares > 0

    with calls.ahead(step), calls.waiting():
        assert progress() == (live.position(1, 1), True)
    assert progress() == (live.position(0), False)
    calls.begin("train")
    assert progress() == (live.position(0), False), "a call costs a microsecond"
    calls.put()
    assert progress() == (live.position(1), False)


def test_groups_of_ranks_share_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    recording, names = Recording("job", "x", 0, 2, {"data": 2}), list[str]()
    groups = {name: JointCalls(recording, 1) for name in ("member", "whole")}
    for name in ("member", "whole", "member"):
        groups[name].begin(name)
        call = read_call(recording.path)
        assert call is not None
        names.append(Comparison.read(call.text).name)
    assert names == ["member", "whole", "member"]


def test_ranks_issue_what_all_of_its_ranks_issue():
    """On a grid of 2 x 2; an order that differs between sets of ranks alone goes round in a circle."""
    rows = [Issue("a", "", (0, 1)), Issue("a", "", (2, 3))]
    columns = [Issue("b", "", (0, 2)), Issue("b", "", (1, 3))]

    def steps(orders: str) -> dict[int, Step]:
        issues = [{"r": rows[rank // 2], "c": columns[rank % 2]} for rank in range(4)]
        return {
            rank: Step("train", (), tuple(issues[rank][letter] for letter in order))
            for rank, order in enumerate(orders.split())
        }

    assert issued_together(steps("rc rc rc rc")) == dict.fromkeys(range(4), 2)
    assert issued_together(steps("rc rc cr cr")) == dict.fromkeys(
        range(4), 2
    )  # the rows do not wait for others
    assert issued_together(steps("rc cr cr rc")) == dict.fromkeys(range(4), 0)
    assert issued_together(steps("r r rr rr")) == {0: 1, 1: 1, 2: 2, 3: 2}
    assert issued_together(steps("r r r rr")) == {0: 1, 1: 1, 2: 1, 3: 1}
