"""A slice of the campaign of broken schedules; its judge detects exactly the differences."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace
from support import schedule_bases
from support.campaign import parameters
from support.random_case import make_case
from support.random_machine import make_machine
from support.random_stages import Spec
from support.schedule_fields import joint_edit
from support.schedule_judge import Judge
from support.schedule_mutation import in_phase, op_edits, rewired, with_op
from support.schedule_repair import repaired

import commplan
from bench.mutants import __main__ as mutants
from bench.mutants import schedules as campaign
from commplan.diagnostics import CommplanError
from commplan.ir import schedule as ir
from commplan.ir.serialization.canonical_json import decode, encode
from commplan.ir.types import DType
from commplan.verify import verify

pytestmark = pytest.mark.usefixtures("short_search")
TEXT = """
plan known
axis a = 2
axis b = 4
input g : tree partial a, b
input p : tree per a, b
input e : f32
state c : tree
fn keep(tree) -> tree on device elementwise
at start {
    c = broadcast p over a, b from 3
}
each step {
    s    = reduce g over a, b by mean
    m    = reduce p over a by max
    t    = scatter g over b by sum
    t    = reduce t over a by sum
    t    = map keep(t)
    t    = gather t over b
    d, c = elastic p with c over a, b by sync(eta = e, rho = 0.5)
    output s, m, t, d
}
"""


def known(passes: str | None = None) -> ir.Schedule:
    """A schedule with most ops; leaves that no number of ranks divides. `wire`: a mean is sent as bf16."""
    tree = {"b": Spec((5,), "float32"), "w": Spec((3, 2), "float32")}
    shapes = dict.fromkeys(("g", "p", "c", "s", "m", "t", "d"), tree)
    text = TEXT.replace("by mean\n", "by mean { wire = bf16, accumulate = f32 }\n", 1)
    plan = commplan.loads(text if "wire" in (passes or "") else TEXT, "known.plan")
    named = {value.name for value in plan.graph.values}
    return plan.compile(
        shapes={name: form for name, form in shapes.items() if name in named}, passes=passes, backend="jax"
    ).schedule


def changed(find: Callable[[ir.Op], bool], **fields: object) -> Callable[[ir.Schedule], ir.Schedule]:
    """The first op that `find` finds, with other fields."""

    def make(schedule: ir.Schedule) -> ir.Schedule:
        number, at = place(schedule, find)
        phase = schedule.phases[number]
        return in_phase(schedule, number, with_op(phase, at, replace(phase.ops[at], **fields)))

    return make


def cut_out(find: Callable[[ir.Op], bool]) -> Callable[[ir.Schedule], ir.Schedule]:
    """Its readers read its operand."""

    def make(schedule: ir.Schedule) -> ir.Schedule:
        number, at = place(schedule, find)
        phase = schedule.phases[number]
        op = phase.ops[at]
        return in_phase(schedule, number, rewired(phase, at, ir.results(op)[0], ir.operands(op)[0]))

    return make


def place(schedule: ir.Schedule, find: Callable[[ir.Op], bool]) -> tuple[int, int]:
    return next(
        (number, at)
        for number, phase in enumerate(schedule.phases)
        for at, op in enumerate(phase.ops)
        if find(op)
    )


def collective(kind: str, op: str | None = None) -> Callable[[ir.Op], bool]:
    return lambda each: isinstance(each, ir.Collective) and each.kind == kind and each.op == op


def a(kind: type, **fields: object) -> Callable[[ir.Op], bool]:
    return lambda op: isinstance(op, kind) and all(getattr(op, k) == v for k, v in fields.items())


KNOWN: dict[str, tuple[str, str, Callable[[ir.Schedule], ir.Schedule]]] = {  # pipeline, output, change
    "an all-reduce cut out": ("bucket", "s", cut_out(collective("all_reduce", "sum"))),
    "a maximum for a sum": ("bucket", "s", changed(collective("all_reduce", "sum"), op="max")),
    "a minimum for a maximum": ("bucket", "m", changed(collective("all_reduce", "max"), op="min")),
    "one of two axes": ("bucket", "s", changed(collective("all_reduce", "sum"), axes=("a",))),
    "divided by 2": ("", "s", changed(a(ir.Scale), by=2.0)),
    "multiplied": ("", "s", changed(a(ir.Scale), how="mul")),
    "not divided": ("", "s", cut_out(a(ir.Scale))),
    "another root": ("", "c", changed(collective("broadcast"), root=2)),
    "a broadcast cut out": ("bucket", "c", cut_out(collective("broadcast"))),
    "another wire": ("wire", "s", changed(a(ir.Cast, dtype=DType.BF16), dtype=DType.F16)),
    "sums in the type of the wire": ("decompose,wire", "s", cut_out(a(ir.Cast, dtype=DType.F32))),
    "another eta": ("", "c", changed(a(ir.Elastic), eta=0.25)),
    "another rho": ("", "c", changed(a(ir.Elastic), rho=0.25)),
    "the update twice as far": ("", "c", changed(a(ir.Update), operand="p.0")),
    "the pull towards nothing": ("", "d", changed(a(ir.Elastic), center="p.0")),
    "a gather in another order": ("", "t", changed(collective("all_gather"), axes=("a",))),
    "a scatter of maxima": ("", "t", changed(collective("reduce_scatter", "sum"), op="max")),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_oracle_tells_known_edits_apart(name: str) -> None:
    pipeline, output, change = KNOWN[name]
    sound = known(pipeline)
    broken = repaired(change(sound), "types", sound)
    verdict = Judge(sound, ()).compare(decode(encode(broken)))
    assert verdict.level == "differs"
    assert output in verdict.names or "error" in verdict.where


@pytest.mark.parametrize("name", KNOWN)
def test_known_edits_are_refused_with_a_counterexample(name: str) -> None:
    pytest.importorskip("commplan.verify.equivalence")
    pipeline, output, change = KNOWN[name]
    sound = known(pipeline)
    problems = verify(decode(encode(repaired(change(sound), "types", sound))))
    assert problems
    messages = " ".join(
        text for problem in problems for text in (problem.message, *(note.text for note in problem.notes))
    )
    assert f"`{output}`" in messages or not campaign.MEANING & {problem.code for problem in problems}


def test_what_leaves_out_a_permitted_rounding_is_told_apart_from_what_adds_one() -> None:
    rounded, plain = known("decompose,wire"), known("decompose")
    assert Judge(rounded, ()).compare(plain).level == "rounds less"
    assert Judge(plain, ()).compare(rounded).level == "differs"


def compiled(seed: int, passes: str | None, backend: Literal["jax", "mpi"]) -> ir.Schedule:
    """A random plan for a random machine."""
    case = make_case(seed, schedule_bases.DTYPES)
    plan = commplan.loads(case.text, "same.plan")
    sizes = {axis.name: case.sizes[axis.name] for axis in plan.graph.axes}
    machine = make_machine(seed, list(sizes.values()))
    return plan.compile(
        axes=sizes, shapes=case.shapes, order=case.order, passes=passes, topology=machine, backend=backend
    ).schedule


@pytest.mark.parametrize("seed", range(12))
def test_what_passes_and_backends_make_of_a_plan_is_the_same_to_the_judge(seed: int) -> None:
    plan = commplan.loads(make_case(seed, schedule_bases.DTYPES).text, "same.plan").graph
    judge = Judge(compiled(seed, "wire", "jax"), [fn.name for fn in plan.fns if fn.linear])
    assert not judge.errors
    backends: tuple[Literal["jax", "mpi"], ...] = ("jax", "mpi")
    for passes in (None, "share,bucket{max=32},decompose,wire,select,overlap"):
        for backend in backends:
            assert judge.compare(compiled(seed, passes, backend)).level == "same", (passes, backend)


def test_every_edit_can_be_read_back_and_never_breaks_the_verifier() -> None:
    sound = known()
    count = 0
    for number, phase in enumerate(sound.phases):
        for at in range(0, len(phase.ops), 3):
            for edit in list(op_edits(sound, number, at))[::5]:
                broken = repaired(edit.make(), "types", sound)
                try:
                    verify(decode(encode(broken)))
                except CommplanError as error:  # an invalid schedule, such as one without axes, is not read
                    if error.diagnostics[0].code != "CP1003":
                        raise AssertionError(edit.what) from error
                    continue
                count += 1
    assert count > 100


def test_edits_of_several_fields_are_refused_or_change_nothing() -> None:
    sound, kinds = known("bucket"), Counter[str]()
    judge = Judge(sound, ())
    for seed in range(150):
        edit = joint_edit(sound, random.Random(seed))
        if edit is None or edit.make() == sound:
            continue
        kinds[edit.kind] += 1
        try:
            broken = decode(encode(edit.make()))
        except CommplanError:
            continue
        assert verify(broken) or judge.compare(broken).level == "same", edit.what
    assert min(kinds.values()) > 2
    assert set(kinds) == {"renamed", "compensated", "values exchanged", "replaced everywhere"}


def test_a_case_follows_from_its_number() -> None:
    first, second = (campaign.Campaign(3, 0.05) for _ in range(2))
    for number in (0, 7, 31):
        mutant, again = first.mutant(number), second.mutant(number)
        assert mutant is not None
        assert again is not None
        assert mutant.schedule == again.schedule
        assert first.text(mutant) == second.text(again)
        assert first.record(number, mutant) == second.record(number, again)


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path) -> None:
    done: list[int] = []

    def case(number: int) -> campaign.Record:
        done.append(number)
        return campaign.Record(number, "accepted", "same", "kind")

    state = tmp_path / "state"
    assert len(list(campaign.run_all(case, range(5), 1, state, "head"))) == 5
    state.write_text(state.read_text()[:-20])  # it was ended in the middle of a line
    numbers = sorted(record.number for record in campaign.run_all(case, range(8), 1, state, "head"))
    assert numbers == list(range(8))
    assert sorted(done) == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    with pytest.raises(SystemExit, match="another campaign"):
        list(campaign.run_all(case, range(8), 1, state, "other"))


def test_an_accepted_mutant_that_differs_fails_the_campaign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(campaign, "verify", lambda schedule: ())  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    words = ["--schedules", "--count", "20", "--seed", "1", "--share", "0.05", "--jobs", "1"]
    assert mutants.main([*words, "--keep", str(tmp_path)]) == 1
    assert "FAILED accepted" in capsys.readouterr().out
    assert next(tmp_path.iterdir()).joinpath("mutant.json").exists()


@pytest.mark.parametrize(("seed", "count"), parameters([(0, 40)], [(0, 75), (1, 75)]))
def test_mutants_are_refused_or_change_nothing(
    seed: int, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("commplan.verify.equivalence")
    words = ["--schedules", "--count", str(count), "--seed", str(seed), "--share", "0.1", "--jobs", "1"]
    assert mutants.main(words) == 0, capsys.readouterr().out


@pytest.mark.parametrize("count", parameters([40], [100]))
def test_schedules_of_the_compiler_are_not_refused(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--sound", "--count", str(count), "--seed", "0", "--jobs", "1"]) == 0
    assert f"{count} accepted, 0 refused" in capsys.readouterr().out
