"""Each difference of a compiled step has its cause: of real steps on eight CPU devices, and of HLO text."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
import steps
from jax.sharding import AxisType
from msgspec.structs import replace

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Schedule
from commplan.lowering.audit import Audit, Machine, StepText, audit, target
from commplan.lowering.audit.causes import compiled_otherwise
from commplan.lowering.jax import aot
from commplan.topology import Level, Topology

HERE = "tests/audit/steps.py"


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def audited(mesh: Any, compiling: dict[str, Any] | None = None, **how: Any) -> Audit:
    run = steps.bound(mesh, **(compiling or {}))
    step, arguments = steps.stepped(run, mesh, **how)
    return steps.bound(mesh).program.audit(step, *arguments)


def causes(report: Audit) -> list[tuple[str, str]]:
    return [(difference.kind, difference.cause) for difference in report.differences]


def line_of(text: str) -> int:
    lines = Path(steps.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_step_as_planned(mesh: Any) -> None:
    report = audited(mesh)
    assert report.ok and report.skipped == ("every_2",)
    assert [(row.count, row.line, row.cause) for row in report.rows] == [(2, 8, "")]
    assert str(report).startswith("plan audited: 2 collectives as planned\n")


def test_a_step_that_is_not_jitted(mesh: Any) -> None:
    run = steps.bound(mesh)
    step, arguments = steps.stepped(run, mesh)
    assert run.program.audit(partial(step), *arguments, mesh=mesh).ok


def test_what_the_steps_own_code_asks_for_is_named(mesh: Any) -> None:
    report = audited(mesh, extra=True)
    (difference,) = report.differences
    assert (difference.cause, difference.is_additional) == ("own", True)
    where = f"{HERE}:{line_of('lax.pmax')}"
    assert difference.reason == f"issued by the step's own code: `pmax` at {where}"
    assert "own: all_reduce(max) f32[] over 1 x 8 ranks" in str(report)


def test_a_sum_by_autodiff_is_named(mesh: Any) -> None:
    (difference,) = audited(mesh, varying=False).differences
    assert (difference.cause, difference.is_additional) == ("autodiff", False)
    assert difference.reason.startswith("summed by autodiff: 4 x `psum` at tests/audit/steps.py:")
    assert "run.varying(params)" in difference.reason


def test_buckets_that_nothing_holds_apart_are_combined(mesh: Any) -> None:
    report = audited(mesh, {"passes": "bucket"})
    assert causes(report) == [("merged", "combined")]
    assert report.differences[0].reason == "XLA combined 2 collectives of line 8"


def test_a_phase_called_twice(mesh: Any) -> None:
    report = audited(mesh, calls=2)
    assert causes(report) == [("extra", "repeated")]
    assert "the step requests it more than once: it calls phase `step` again" in report.differences[0].reason


def test_a_step_of_another_program(mesh: Any) -> None:
    assert {cause for _, cause in causes(audited(mesh, {"passes": "overlap"}))} == {"recompiled"}


SLOW, FAST = (
    Topology(name, (Level("gpu", 8, 1e-5, rate),)) for name, rate in (("slow", 1e8), ("fast", 1e11))
)


@pytest.mark.parametrize(
    ("compiling", "audited", "reason"),
    [
        ({"passes": "overlap"}, {}, "by the passes"),
        (
            {"passes": "overlap", "topology": SLOW},
            {"topology": FAST},
            "for topology `slow`, and the schedule of this audit for topology `fast`",
        ),
        (
            {"passes": "overlap", "topology": SLOW},
            {},
            "for topology `slow`, and the schedule of this audit for no topology",
        ),
    ],
)
def test_how_the_program_of_the_step_was_compiled_otherwise(
    mesh: Any, compiling: dict[str, Any], audited: dict[str, Any], reason: str
) -> None:
    step, arguments = steps.stepped(steps.bound(mesh, **compiling), mesh)
    report = steps.bound(mesh, **audited).program.audit(step, *arguments)
    assert {cause for _, cause in causes(report)} == {"recompiled"}
    assert {f"was compiled {reason}" in each.reason for each in report.differences} == {True}
    again = steps.bound(mesh, **audited).program.audit(step, *arguments)  # JAX does not trace the step again
    assert "from another plan, for another topology, or for other shapes" in again.differences[0].reason


def test_the_first_reason_is_named() -> None:
    def compiled(plan: str = steps.PLAN, width: int = 32, **more: Any) -> Schedule:
        return (
            commplan.loads(plan)
            .compile(axes={"data": 8}, shapes={"grads": steps.shapes(width)}, **more)
            .schedule
        )

    ours = compiled(topology=FAST)
    other = compiled(steps.PLAN.replace("by mean", "by sum"), topology=SLOW)
    wide, slow = compiled(width=64, topology=SLOW), compiled(topology=SLOW, passes="overlap")
    renamed = compiled(steps.PLAN.replace("audited", "elsewhere"))
    twin = compiled(topology=replace(FAST, cores=3), passes="overlap")
    assert compiled_otherwise(ours, []) is None
    assert compiled_otherwise(ours, [renamed]) is None
    assert compiled_otherwise(ours, [slow, ours]) is None, "the step's program may be this one"
    assert compiled_otherwise(ours, [renamed, other]) == "from another plan called `audited`"
    assert "for other shapes" in (compiled_otherwise(ours, [wide]) or "")
    text = compiled_otherwise(ours, [twin]) or ""
    assert re.fullmatch(
        r"for topology `fast` \(\w{8}\), and the schedule .* for topology `fast` \(\w{8}\)", text
    )


def test_a_phase_that_the_step_does_not_call(mesh: Any) -> None:
    run = steps.bound(mesh)
    step, arguments = steps.stepped(run, mesh)
    report = run.program.audit(step, *arguments, phases=["every_2"])
    assert set(causes(report)) == {("missing", "absent")}
    with pytest.raises(CommplanError) as caught:
        run.program.audit(step, *arguments, phases=["train"])
    assert caught.value.diagnostics[0].code == "CP1151"


def test_a_mesh_with_more_axes_than_the_plan() -> None:
    wide = jax.make_mesh((2, 4), ("other", "data"), axis_types=(AxisType.Auto,) * 2)
    plan = commplan.loads(steps.PLAN.replace("data = 8", "data = 4"))
    run = plan.compile(wide, {"grads": steps.shapes()}).bind(wide)
    step, arguments = steps.stepped(run, wide)
    report = run.program.audit(step, *arguments)
    # On CPUs JAX 0.10 combines two leaves: no element of one is on all devices to tie the other to.
    assert {each.reason for each in report.differences} <= {"XLA combined 2 collectives of line 8"}
    assert "2 x 4 ranks" in report.rows[0].found


HEAD = """\
HloModule jit_step, is_scheduled=true, num_partitions=4, frontend_attributes={xla.sdy.meshes={mesh = #sdy.mesh<["data"=4]>}}

FileNames
1 "/home/someone/train.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

"""  # noqa: E501
OWN = 'metadata={op_name="jit(step)/commplan/step/line5/psum"}'
SUM = "channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum"
ASKED = f"%one = f32[8]{{0}} all-reduce(%x), {SUM}, {OWN}"


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    text = """\
plan small
axis data = 4
input grads : tree partial data
each step {
    grads = reduce grads over data by sum
    output grads
}
"""
    shapes = {"grads": {"w": {"shape": [8], "dtype": "f32"}}}
    return commplan.loads(text).compile(axes={}, shapes=shapes).schedule


def text(*instructions: str) -> str:
    lines = [f"  {line}\n" for line in ("%x = f32[8]{0} parameter(0)", *instructions)]
    return (
        f"{HEAD}ENTRY %main (x: f32[8]) -> f32[8] {{\n{''.join(lines)}  ROOT %r = f32[8]{{0}} copy(%x)\n}}\n"
    )


LOOP = f"""\
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %x = f32[8]{{0}} get-tuple-element(%s), index=1
  {ASKED}
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%s, %one)
}}

"""
LOOPED = text("%w = (s32[], f32[8]{0}) while(%x), condition=%c, body=%body").replace("ENTRY", f"{LOOP}ENTRY")
SCATTERED = f"%rs = f32[2]{{0}} reduce-scatter(%x), {SUM}, {OWN}"
GATHERED = "%ag = f32[8]{0} all-gather(%rs), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}"
BF16 = ASKED.replace("f32[8]", "bf16[8]").replace("%x", "%n")
NARROW = "%n = bf16[8]{0} convert(%x)"
HALF = ASKED.replace("{{0,1,2,3}}", "{{0,1},{2,3}}")
AGAIN = ASKED.replace("%one", "%two")
INSERTED = (
    "%g = f32[32]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0},"
    ' metadata={op_name="jit(step)/dot_general" stack_frame_id=1}'
)
WRITTEN = 'metadata={op_name="jit(step)/psum" source_file="a.py" source_line=3}'
OLD_STYLE = f"%o = f32[] all-reduce(%x), {SUM}, {WRITTEN}"
GRADIENT = f'%g = f32[8]{{0}} all-reduce(%x), {SUM}, metadata={{op_name="transpose(jvp())/psum_invariant"}}'
ELSEWHERE = GRADIENT.replace("{{0,1,2,3}}", "{{0,1},{2,3}}")
NINE = "%y = f32[9]{0} concatenate(%x, %x), dimensions={0}"
NAMELESS = f"%m = f32[9]{{0}} all-reduce(%y), {SUM}"
ZERO = "%z = f32[] constant(0)"
LISTED = f'{NAMELESS}, metadata={{op_name="jit(step)/(commplan/step/line5/psum:psum)" stack_frame_id=9}}'
LOSS = f'%l = f32[] all-reduce(%z), {SUM}, metadata={{op_name="psum" stack_frame_id=1}}'


@pytest.mark.parametrize(
    ("compiled", "traced", "cause", "reason"),
    [
        (text(), text(ASKED), "folded", "XLA removed it"),
        (text(), text(), "absent", "phase `step` is not called"),
        (text(SCATTERED, GATHERED), text(ASKED), "split", "XLA made reduce_scatter, all_gather of it"),
        (text(NARROW, BF16), text(ASKED), "retyped", "XLA moves bf16, the plan moves f32"),
        (text(NARROW, BF16), text(NARROW, BF16), "recompiled", "was compiled from another plan"),
        (text(HALF), text(ASKED), "regrouped", "other ranks participate"),
        (LOOPED, text(ASKED), "loop", "XLA moved it into a loop"),
        (text(ASKED), LOOPED, "loop", "XLA moved it out of its loop"),
        (text(ASKED, AGAIN), text(ASKED), "copied", "it unrolled or peeled a loop"),
        (text(ASKED, INSERTED), text(ASKED), "partitioner", "`dot_general` at /home/someone/train.py:7"),
        (text(ASKED, OLD_STYLE), text(ASKED), "own", "`psum` at a.py:3"),
        (text(ASKED, ELSEWHERE), text(ASKED), "own", "the derivative of the step's own code: `psum`"),
        (text(ASKED, GRADIENT), text(ASKED), "autodiff", "summed by autodiff: `psum`"),
        (text(ASKED, NINE, NAMELESS), text(ASKED), "unknown", "the HLO text does not name its origin"),
        (text(NINE, NAMELESS), text(ASKED, ZERO, LOSS), "combined", "of line 5 with the step's own `psum`"),
        (text(NINE, LISTED), text(ASKED, ZERO, LOSS), "combined", "own `psum` at /home/someone/train.py:7"),
        (text(NINE, LISTED), text(ASKED), "combined", "of line 5 with the step's own `psum`"),
    ],
)  # fmt: skip
def test_each_cause(schedule: Schedule, compiled: str, traced: str, cause: str, reason: str) -> None:
    report = audit(schedule, StepText(compiled, traced))
    (difference,) = report.differences
    assert difference.cause == cause
    assert reason in difference.reason
    assert cause in str(report)
    assert report.data()["differences"][0]["cause"] == cause


def test_what_is_issued_in_another_order() -> None:
    plan = commplan.loads(
        """plan two
axis data = 4
input a : tree partial data
input b : tree partial data
each step {
    a = reduce a over data by sum { overlap = backward }
    b = reduce b over data by sum { overlap = backward }
    output a
    output b
}
"""
    )
    sizes = {name: {"w": {"shape": [n], "dtype": "f32"}} for name, n in (("a", 8), ("b", 9))}
    two = plan.compile(axes={}, shapes=sizes, passes="overlap").schedule
    second = f"%second = f32[9]{{0}} all-reduce(%y), {SUM}, {OWN.replace('line5', 'line7')}"
    first = ASKED.replace("line5", "line6")
    issued = text(NINE, first, second)
    assert audit(two, StepText(issued, issued)).ok
    (difference,) = audit(two, StepText(text(NINE, second, first), issued)).differences
    assert (difference.kind, difference.cause) == ("moved", "reordered")


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "chain"])
def test_slices_of_a_chunk_program_have_no_order_of_their_own(algorithm: str, mesh: Any) -> None:
    options = f"via {algorithm} {{ chunk = 2 KiB }}"
    changed = steps.PLAN.replace("{ bucket = 8 KiB, overlap = backward }", options)
    run = commplan.loads(changed).compile(mesh, {"grads": steps.shapes()}).bind(mesh)
    step, arguments = steps.stepped(run, mesh)
    report = run.program.audit(step, *arguments)
    assert report.ok, str(report)
    assert sum(row.count for row in report.rows) >= 6


def test_exposed_communication_is_estimated(schedule: Schedule) -> None:
    rates = Machine(flops=1e3, memory=1e3, bus=1e3, start=1)
    report = audit(schedule, StepText(text(ASKED), text(ASKED)), machine=rates)
    (row,) = report.rows
    assert row.seconds == row.exposed == pytest.approx(1.048)
    assert "the compiled order waits 1.05 s for collectives that take 1.05 s one by one" in str(report)


def test_targets_know_their_rates() -> None:
    for name in ("a100", "h100", "h200", "b200"):
        machine = target(f"{name}:2x8").machine
        assert 1e14 < machine.flops < 2e15 and 1e12 < machine.memory < 1e13 < machine.bus * 1e3
    assert str(target("b200:2x8")) == "b200:2x8"


def test_a_target_has_one_device_for_each_rank() -> None:
    with pytest.raises(CommplanError) as caught:
        aot.mesh_on(target("h100:1x4"), {"data": 8})
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "CP1152"
    assert diagnostic.message == "target h100:1x4 has 4 devices, the plan has 8 ranks (data = 8)"
