"""A schedule with another effect than its plan is refused, with the plan line and both terms."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

import commplan
from bench.compile_time import elastic
from commplan.cli import main
from commplan.ir import schedule as ir
from commplan.ir.hints import Hints
from commplan.ir.serialization.canonical_json import encode
from commplan.ir.symbolic.compare import TermComparison
from commplan.ir.symbolic.rounding import accepts, allowed_event, cast
from commplan.ir.symbolic.symbols import rank
from commplan.ir.symbolic.terms import Algebra, Argument
from commplan.ir.types import DType
from commplan.verify import load_schedule, verify

PLANS = Path(__file__).resolve().parents[2] / "examples" / "plans"
TREE: Any = {
    "a": {"b": {"shape": [3], "dtype": "f32"}, "w": {"shape": [5, 7], "dtype": "f32"}},
    "s": {"shape": [], "dtype": "f32"},
}
Ops = list[Any]
REDUCE = """plan reductions
axis node = 2
axis gpu = 4
fn step(tree, tree) -> tree on device elementwise
fn both(tree, tree) -> tree on device elementwise
input grads : tree partial node, gpu
input other : tree partial node, gpu
input own : tree per node, gpu
input n : f32 per node, gpu
input g2 : tree partial gpu
state w : tree

at start {
    w = broadcast own over node, gpu from 5
}

each step {
    g = reduce grads over node, gpu by mean
    h = reduce other over node, gpu by mean(weight = n)
    largest = reduce own over node, gpu by max
    shard = scatter g2 over gpu by sum
    w = map step(w, g)
    seen = map both(w, h)
    output g, h, largest, shard, seen, w
}
"""
WIRE = """plan narrow
axis data = 4
input grads : tree partial data
input other : tree partial data
each step {
    grads = reduce grads over data by mean { wire = bf16, accumulate = f32 }
    other = reduce other over data by sum
    output grads, other
}
"""
ELASTIC = """plan elastic_sync
axis worker = 4
input own : tree per worker
state center : tree
at start { center = broadcast own over worker from 0 }
each step {
    pull, center = elastic own with center over worker by sync(eta = 0.25, rho = 0.5)
    output pull, center
}
"""


def compiled(text: str, passes: str | None = None) -> ir.Schedule:
    plan = commplan.loads(text, "tested.plan")
    trees = {value.name for value in plan.graph.values if str(value.type) == "tree"}
    return plan.compile(shapes=dict.fromkeys(trees, TREE), passes=passes).schedule


def edited(
    schedule: ir.Schedule, change: Callable[[Ops], Sequence[Any] | None], phase: str = "step"
) -> ir.Schedule:
    """`schedule` with the ops of a phase changed; values that nothing makes any more are left out."""
    old_phase = schedule.phase(phase)
    ops = list(old_phase.ops)
    ops = list(change(ops) or ops)
    defined = {ref for op in ops for ref in ir.results(op)}
    new = msgspec.structs.replace(
        old_phase, ops=tuple(ops), values=tuple(v for v in old_phase.values if v.id in defined)
    )
    phases = tuple(new if each is old_phase else each for each in schedule.phases)
    return msgspec.structs.replace(schedule, phases=phases)


def of(type_: type, /, **fields: Any) -> Callable[[Any], bool]:
    return lambda op: isinstance(op, type_) and all(getattr(op, key) == item for key, item in fields.items())


def replaced(which: Callable[[Any], bool], **fields: Any) -> Callable[[Ops], None]:
    """The first op that satisfies `which`, with other fields."""

    def change(ops: Ops) -> None:
        at = next(index for index, op in enumerate(ops) if which(op))
        ops[at] = msgspec.structs.replace(ops[at], **fields)

    return change


def cut_out(which: Callable[[Any], bool]) -> Callable[[Ops], Ops]:
    """The first such op removed; readers of its result read its operand."""

    def change(ops: Ops) -> Ops:
        at = next(index for index, op in enumerate(ops) if which(op))
        removed = ops.pop(at)
        return [ir.substitute(op, {removed.result: removed.operand}) for op in ops]

    return change


def exchanged(which: Callable[[Any], bool]) -> Callable[[Ops], None]:
    """The operands of the first two such ops exchanged."""

    def change(ops: Ops) -> None:
        low, high = [index for index, op in enumerate(ops) if which(op)][:2]
        first, second = ops[low], ops[high]
        ops[low] = msgspec.structs.replace(first, operand=second.operand)
        ops[high] = msgspec.structs.replace(second, operand=first.operand)

    return change


REDUCES = of(ir.Collective, kind="all_reduce", op="sum")


def narrowed(ops: Ops) -> Ops:
    """The second reduction in 16 bits, which only the first is allowed."""
    at = [index for index, op in enumerate(ops) if REDUCES(op)][-1]
    op = ops[at]
    narrow, back = f"{op.result}/bf16", f"{op.result}/back"
    ops[at : at + 1] = [
        ir.Cast(narrow, op.operand, DType.BF16, op.span),
        ir.Cast(back, narrow, DType.F32, op.span),
        msgspec.structs.replace(op, operand=back),
    ]
    return ops


DIVIDES, BACK = of(ir.Scale, how="div"), of(ir.Cast, dtype=DType.F32)


def divided_late(ops: Ops) -> Ops:
    """The sum is sent in 16 bits, and the mean is computed from the received values."""
    (scale,) = filter(DIVIDES, ops)
    ops = cut_out(DIVIDES)(ops)
    at = [index for index, op in enumerate(ops) if BACK(op)][-1]
    ops[at : at + 1] = [
        msgspec.structs.replace(ops[at], result="whole"),
        msgspec.structs.replace(scale, result=ops[at].result, operand="whole"),
    ]
    return ops


def divided_early(ops: Ops) -> Ops:
    """The terms are divided, and then rounded."""
    (scale,) = filter(DIVIDES, ops)
    ops = cut_out(DIVIDES)(ops)
    at = next(index for index, op in enumerate(ops) if isinstance(op, ir.Cast))
    ops[at : at + 1] = [
        msgspec.structs.replace(scale, result="part", operand=ops[at].operand),
        msgspec.structs.replace(ops[at], operand="part"),
    ]
    return ops


EDITS: dict[str, tuple[str, str, Callable[[Ops], Any], str, str]] = {
    # name: plan, passes, change, phase, a part of the message
    "no all-reduce": (REDUCE, "bucket", cut_out(REDUCES), "step", "the plan says"),
    "max for sum": (REDUCE, "bucket", replaced(REDUCES, op="max"), "step", "the max over gpu, node of"),
    "min for max": (
        REDUCE,
        "bucket",
        replaced(of(ir.Collective, op="max"), op="min"),
        "step",
        "the min over",
    ),
    "sum for max": (
        REDUCE,
        "bucket",
        replaced(of(ir.Collective, op="max"), op="sum"),
        "step",
        "the sum over",
    ),
    "one of two axes": (REDUCE, "bucket", replaced(REDUCES, axes=("gpu",)), "step", "the sum over gpu"),
    "halves for eighths": (REDUCE, "", replaced(of(ir.Scale, how="div"), by=2.0), "step", "1/2 x"),
    "times for over": (REDUCE, "", replaced(of(ir.Scale, how="div"), how="mul"), "step", "8 x"),
    "another root": (
        REDUCE,
        "",
        replaced(of(ir.Collective, kind="broadcast"), root=4),
        "start",
        "rank 0 along gpu",
    ),
    "no weight": (REDUCE, "", cut_out(of(ir.Scale, how="mul")), "step", "the sum over gpu, node of `other`"),
    "another function": (REDUCE, "", replaced(of(ir.Map, fn="step"), fn="both"), "step", "both("),
    "operands exchanged": (
        REDUCE,
        "",
        replaced(of(ir.Map, fn="both"), operands=("h.1", "w.2")),
        "step",
        "both(div(",
    ),
    "old weights": (REDUCE, "", replaced(of(ir.Map, fn="both"), operands=("w.0", "h.1")), "step", "both(`w`"),
    "other gradients": (REDUCE, "", replaced(REDUCES, operand="other.0"), "step", "`other`"),
    "gradients exchanged": (REDUCE, "", exchanged(REDUCES), "step", "the plan says"),
    "broadcast for reduce": (
        REDUCE,
        "",
        replaced(REDUCES, kind="broadcast", op=None, root=0),
        "step",
        "rank 0 along gpu",
    ),
    "no cast before the sum": (
        WIRE,
        "bucket,wire",
        replaced(of(ir.Cast, dtype=DType.F32), dtype=DType.BF16),
        "step",
        "",
    ),
    "divided after the sum has traveled": (WIRE, "bucket,wire", divided_late, "step", ""),
    "divided before it is added": (WIRE, "bucket,wire", divided_early, "step", ""),
    "never divided": (WIRE, "bucket,wire", cut_out(DIVIDES), "step", "the sum over data"),
    "wire where none is asked": (WIRE, "bucket,wire", narrowed, "step", "as bf16"),
    "the pull left out": (
        ELASTIC,
        "",
        cut_out(of(ir.Collective, kind="all_reduce")),
        "step",
        "the plan says",
    ),
    "another eta": (ELASTIC, "", replaced(of(ir.Elastic), eta=0.5), "step", "1/4 x `own`"),
    "another rho": (ELASTIC, "", replaced(of(ir.Elastic), rho=0.25), "step", "eta 0.25 and rho 0.25"),
    "the pull of another": (
        ELASTIC,
        "",
        replaced(of(ir.Elastic), operand="center.0", center="own.0"),
        "step",
        "",
    ),
}


def said(schedule: ir.Schedule) -> list[tuple[str, str, int]]:
    return [(p.code, p.message, p.span.line if p.span else 0) for p in verify(schedule)]


def with_values(schedule: ir.Schedule) -> ir.Schedule:
    """Values declared for the results that an edit has added, with the shape of their operands."""
    phases: list[ir.Phase] = []
    for phase in schedule.phases:
        values = {value.id: value for value in (*schedule.entry, *phase.values)}
        for op in phase.ops:
            if isinstance(op, ir.Cast | ir.Scale) and op.result not in values:
                leaves = values[op.operand].leaves
                if isinstance(op, ir.Cast):
                    leaves = tuple(msgspec.structs.replace(x, dtype=op.dtype) for x in leaves)
                values[op.result] = msgspec.structs.replace(values[op.operand], id=op.result, leaves=leaves)
        defined = tuple(values[ref] for op in phase.ops for ref in ir.results(op))
        phases.append(msgspec.structs.replace(phase, values=defined))
    return msgspec.structs.replace(schedule, phases=tuple(phases))


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_that_changes_what_a_schedule_does_is_refused(name: str) -> None:
    text, passes, change, phase, piece = EDITS[name]
    schedule = compiled(text, passes)
    assert said(schedule) == []
    problems = said(with_values(edited(schedule, change, phase)))
    assert problems
    meant = [(message, line) for code, message, line in problems if code == "CP0766"]
    if not meant:  # its form is wrong already
        assert {code for code, _, _ in problems} <= {
            "CP0730",
            "CP0731",
            "CP0732",
            "CP0733",
            "CP0734",
            "CP0735",
        }
        return
    message, line = meant[0]
    assert "the plan says" in message and "; the schedule makes" in message and line > 0
    assert piece in message.partition("; the schedule makes")[2] or any(piece in each for each, _ in meant)


def test_most_of_these_edits_are_refused_for_what_they_mean() -> None:
    meant = 0
    for text, passes, change, phase, _ in EDITS.values():
        problems = said(with_values(edited(compiled(text, passes), change, phase)))
        meant += any(code == "CP0766" for code, _, _ in problems)
    assert meant >= 12


def test_leaves_that_are_no_floats_are_those_of_the_plan() -> None:
    text = """plan mixed
axis data = 4
input g : tree partial data
each step {
    most = reduce g over data by mean { integers = max }
    first = reduce g over data by mean { integers = first }
    output most, first
}
"""
    tree = {"step": {"shape": [2], "dtype": "i32"}, "w": {"shape": [3], "dtype": "f32"}}
    schedule = commplan.loads(text, "tested.plan").compile(shapes={"g": tree}).schedule
    assert said(schedule) == []
    for change in (
        replaced(of(ir.Collective, op="max"), op="min"),
        replaced(of(ir.Collective, op="max"), op="sum"),
        replaced(of(ir.Collective, kind="broadcast"), root=1),
        replaced(of(ir.Collective, op="sum"), divisor=2),  # which no backend does
    ):
        assert {code for code, _, _ in said(edited(schedule, change))} == {"CP0766"}


def test_outputs_and_states_exchanged_or_left_out_are_refused() -> None:
    schedule = compiled(REDUCE, "")
    step = schedule.phase("step")
    g, h = step.outputs[0], step.outputs[1]
    for outputs in (
        (
            msgspec.structs.replace(g, value=h.value),
            msgspec.structs.replace(h, value=g.value),
            *step.outputs[2:],
        ),
        step.outputs[1:],
    ):
        new = msgspec.structs.replace(step, outputs=outputs)
        phases = tuple(new if phase is step else phase for phase in schedule.phases)
        assert "CP0766" in {code for code, *_ in said(msgspec.structs.replace(schedule, phases=phases))}


def test_the_plan_that_a_file_carries_is_the_one_that_it_names() -> None:
    schedule, other = compiled(REDUCE, ""), compiled(WIRE, "wire")
    wrong = msgspec.structs.replace(schedule, origin=other.origin)
    assert [code for code, *_ in said(wrong)] == ["CP0766"]
    assert load_schedule(encode(schedule)) == schedule


def test_the_command_shows_both_terms_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(encode(edited(compiled(REDUCE, "bucket"), replaced(REDUCES, op="max"))))
    said_of_it = io.StringIO()
    with contextlib.redirect_stderr(said_of_it):
        assert main(["verify", str(path)]) == 1
    assert "error[CP0766]" in said_of_it.getvalue()
    assert "the plan says 1/8 x the sum over gpu, node of `grads`" in said_of_it.getvalue()
    assert "tested.plan:18:5" in said_of_it.getvalue()


F32, BF16, F64 = DType.F32, DType.BF16, DType.F64
DOWN, UP = ("cast", F32, BF16), ("cast", BF16, F32)
ALLOWED = (("allow", ("a", "b"), BF16, F32, F32, True, False),)
SCATTERED = (("allow", ("a", "b"), BF16, F32, F32, False, False),)
WIDE = (("allow", ("a",), F32, F64, F32, True, False),)
ADDED = ("sum", ("a", "b"))
BOTH = ("a", "b")  # of 2 and 4 ranks


def over(ranks: int, dtype: DType = F32, axes: tuple[str, ...] = BOTH) -> tuple[Any, ...]:
    return ("scale", Fraction(1, ranks), dtype, axes)


MEAN = (("allow", BOTH, BF16, F32, F32, True, True), over(8))


@pytest.mark.parametrize(
    ("actual", "expected", "good"),
    [
        ((), (), True),
        ((DOWN, UP), (), False),
        ((DOWN, UP, ADDED, DOWN, UP), ALLOWED, True),
        ((DOWN, UP, ("sum", ("a",)), DOWN, UP, ("sum", ("b",)), DOWN, UP), ALLOWED, True),
        (ALLOWED, ALLOWED, True),  # not written out yet
        ((), ALLOWED, False),  # sent in 16 bits
        ((ADDED, DOWN, UP), ALLOWED, False),
        ((DOWN, UP, ADDED), ALLOWED, False),
        ((DOWN, UP, ADDED), SCATTERED, True),
        ((DOWN, UP, ADDED, DOWN, UP), SCATTERED, False),  # not sent on, in 16 bits
        ((DOWN, UP, ("sum", ("a",)), DOWN, UP, ("sum", ("b",))), SCATTERED, True),
        ((DOWN, ADDED, UP), ALLOWED, False),  # added in 16 bits
        ((("cast", F32, DType.F16), ("cast", DType.F16, F32), ADDED), ALLOWED, False),
        ((DOWN, UP, ("sum", ("a", "c")), DOWN, UP), ALLOWED, False),
        ((DOWN, UP, ADDED, DOWN), ALLOWED, False),  # left in 16 bits
        ((DOWN, UP), (("allow", (), BF16, BF16, F32, False, False),), True),
        ((), (("allow", (), BF16, BF16, F32, False, False),), True),  # a move may be exact
        ((), WIDE, False),  # a wider sum is required
        ((("cast", F32, F64), ("sum", ("a",)), ("cast", F64, F32)), WIDE, True),
        ((DOWN, UP, ADDED, over(8), DOWN, UP), MEAN, True),
        ((DOWN, UP, ADDED, DOWN, UP, over(8)), MEAN, False),  # a sum travels in 16 bits
        ((DOWN, UP, ADDED, DOWN, over(8, BF16), UP), MEAN, False),
        ((over(8, axes=()), DOWN, UP, ADDED, DOWN, UP), MEAN, False),  # small terms are lost
        ((DOWN, UP, ADDED, over(4), DOWN, UP), MEAN, False),
        ((DOWN, UP, ADDED, DOWN, UP), MEAN, False),
        ((DOWN, UP, ("sum", ("a",)), over(2), DOWN, UP, ("sum", ("b",)), over(4), DOWN, UP), MEAN, True),
        ((DOWN, UP, ("sum", ("a",)), DOWN, UP, ("sum", ("b",)), over(8), DOWN, UP), MEAN, False),
        ((over(8, axes=()),), (over(8),), False),  # the terms for the sum
    ],
)
def test_rounding_that_is_allowed(actual: Any, expected: Any, good: bool) -> None:
    assert accepts(actual, expected, {"a": 2, "b": 4}) == good


def test_a_cast_there_and_back_is_none() -> None:
    assert cast(cast((), BF16, F32), F32, BF16) == ()
    assert cast(cast((), F32, BF16), BF16, F32) == (DOWN, UP)


@pytest.mark.parametrize("dtype", [DType.I32, DType.U32, DType.F32, DType.BF16])
def test_no_type_of_64_bits_holds_the_values_of_another(dtype: DType) -> None:
    """Without jax_enable_x64 they are f32 and i32, and XLA:CPU loses denormals on the way to f64."""
    text = f"""plan moved
axis a = 2
input x : {dtype}[4] per a
each step {{
    y = broadcast x over a from 1
    output y
}}
"""
    schedule = compiled(text, "")

    def there_and_back(ops: Ops) -> Ops:
        (move,) = ops
        wide = ir.Cast("x.0/wide", move.operand, DType.F64, move.span)
        back = ir.Cast("x.0/back", wide.result, dtype, move.span)
        return [wide, back, msgspec.structs.replace(move, operand=back.result)]

    assert {code for code, _, _ in said(with_values(edited(schedule, there_and_back)))} == {"CP0766"}


def test_each_rate_of_a_chain_of_elastic_stages_is_compared() -> None:
    """Twelve rates have 4,096 subsets, of which the last pull is not the sum."""
    schedule = compiled(elastic(12)[0])
    assert said(schedule) == []
    pulls = [op for op in schedule.phase("step").ops if isinstance(op, ir.Elastic)]
    moves = [op for op in schedule.phase("step").ops if isinstance(op, ir.Update)]
    for number in (0, 5, 11):
        edits = [
            replaced(of(ir.Elastic, pull=pulls[number].pull), rho=0.02),
            replaced(of(ir.Update, result=moves[number].result), delta=moves[number - 1].delta),
        ]
        for edit in edits[: 1 if number == 0 else 2]:
            assert {code for code, _, _ in said(edited(schedule, edit))} == {"CP0766"}, number


def test_terms_are_compared_and_summed_however_deep_they_are() -> None:
    """A phase of many lines nests the functions of one in those of the next."""
    algebra = Algebra({"w": 4})
    local = algebra.value("own", ["w"])
    sent = algebra.cast(algebra.cast(local, DType.F32, DType.BF16), DType.BF16, DType.F32)
    event = allowed_event((), DType.F32, Hints(wire=DType.BF16))
    assert event is not None
    terms = [local, sent, algebra.traced(local, event)]
    for _ in range(3000):
        terms = [algebra.call("f", [Argument(term, 0)]) for term in terms]
    terms = [algebra.total(term, ["w"]) for term in terms]
    compare = TermComparison(algebra)
    exact, sent, planned = terms
    assert [part.sums for part in planned.parts] == [("w",)]
    assert (compare(sent, planned), compare(sent, exact), compare(exact, exact)) == (True, False, True)


@pytest.mark.parametrize(("added", "accepted"), [(DType.F32, True), (DType.BF16, False)])
def test_rounded_elements_of_one_rank_are_summed_as_the_plan_says(added: DType, accepted: bool) -> None:
    """Sums over the axis of that rank add zeros and round nothing; those over other axes are listed."""
    algebra = Algebra({"a": 2, "b": 4})
    local, event = algebra.value("own", ["a", "b"]), allowed_event(("b",), DType.F32, Hints(wire=DType.BF16))
    planned = algebra.total(algebra.only(algebra.total(local, ["b"], event), [(rank("a"), 1)]), ["a"])
    sent = algebra.cast(algebra.cast(local, DType.F32, DType.BF16), DType.BF16, added)
    total = algebra.total(algebra.only(sent, [(rank("a"), 1)]), ["a", "b"])
    assert TermComparison(algebra)(algebra.cast(total, added, DType.F32), planned) == accepted
