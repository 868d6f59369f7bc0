"""Warnings: their triggers and exceptions, and comments that disable them."""

from __future__ import annotations

from pathlib import Path

import pytest

from commplan import dsl
from commplan.cost.calibration import only_input
from commplan.diagnostics import CommplanError, Severity
from commplan.input.measured_costs import FnCost, InputCosts, SourceCost
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType
from commplan.lint import LintInputs, lint
from commplan.topology import load_topology

ROOT = Path(__file__).parents[2]
SHOWN = sorted([*(ROOT / "examples/plans").glob("*.plan"), *(ROOT / "commplan/cli/templates").glob("*.plan")])
TWO_RACK = load_topology(ROOT / "examples/topologies/two_rack.toml")
H100 = load_topology(ROOT / "examples/topologies/h100_64.toml")
HEAD = "plan p\naxis data = 8\nensemble member = 2\n"


def found(text: str, **options: object) -> list[tuple[str, int]]:
    """Code and line of every warning of a plan without errors."""
    analysis = dsl.analyze(text, "p.plan")
    assert not analysis.diagnostics, "\n".join(map(str, analysis.diagnostics))
    warnings = lint(analysis, LintInputs(**options))  # pyright: ignore[reportArgumentType]
    assert all(warning.severity is Severity.WARNING and warning.file == "p.plan" for warning in warnings)
    return [(warning.code, warning.span.line) for warning in warnings if warning.span]


def step(*lines: str, head: str = HEAD) -> str:
    return head + "each step {\n" + "".join(f"    {line}\n" for line in lines) + "}\n"


@pytest.mark.parametrize("plan", SHOWN, ids=lambda plan: plan.stem)
def test_the_plans_that_we_show_have_no_warnings(plan: Path):
    assert not lint(dsl.analyze(plan.read_text("utf-8"), plan.name))


def test_a_plan_with_errors_has_no_warnings():
    assert lint(dsl.analyze(step("y = reduce x over data by sum"), "p.plan")) == ()


def test_values_that_nobody_uses():
    head = HEAD + "input x : f32 partial data\ninput spare : f32\ninput _kept : f32\nstate s : f32\n"
    head += "at start { s = reduce x over data by sum }\n"
    text = step("y = reduce x over data by sum", "_z = reduce x over data by sum", head=head)
    text += "each_step" and "every 2 steps { s = reduce x over data by mean }\n"
    assert found(text) == [("CP1201", 5), ("CP1201", 10)]


def test_a_value_that_is_hidden_before_it_is_read():
    head = HEAD + "input x : f32 partial data\n"
    text = step("y = reduce x over data by sum", "y = reduce x over data by mean", "output y", head=head)
    (warning,) = lint(dsl.analyze(text, "p.plan"))
    assert warning.span and warning.span.line == 6
    assert warning.notes[0].span and warning.notes[0].span.line == 7


def test_outputs_that_nobody_takes():
    head = HEAD + "input x : f32 partial data\ninput y : f32\n"
    text = step(
        "a = reduce x over data by sum", "b = reduce x over data by mean", "output a, b,", "y", head=head
    )
    text = text.replace("b,\n    y", "b, y")
    assert found(text) == [("CP1202", 9)]
    programs = {"train.py": "out = run.step(x=1)\nprint(out.a)\n"}
    analysis = dsl.analyze(text, "p.plan")
    messages = [warning.message for warning in lint(analysis, LintInputs(programs=programs))]
    assert messages == ["the output `b` is never used", "the output `y` is the unchanged input of that name"]
    programs["eval.py"] = "print(out['b'])"
    assert len(lint(analysis, LintInputs(programs=programs))) == 1


def test_buckets_that_hold_everything():
    head = HEAD + "input x : f32[1000] partial data\ninput t : tree partial data\n"
    lines = [
        "a = reduce x over data by sum { bucket = 1 KiB }",
        "b = reduce x over data by sum { bucket = 1 MiB }",
        "c = reduce t over data by sum { bucket = 1 GiB }",
        "d = reduce x over data by mean { bucket = 7 KiB }",
        "e = reduce x over data by mean { bucket = 7 KiB }",
        "output a, b, c, d, e",
    ]
    text = step(*lines, head=head)
    assert found(text) == [("CP1203", 8)]  # the tree has no shapes; d and e share their buckets
    leaves = (Leaf("w", (1000, 1000), DType.F32),)
    assert found(text, shapes={"t": leaves}) == [("CP1203", 8), ("CP1203", 9)]


def test_pins_that_cost_more_than_the_choice():
    head = "plan p\naxis data = 8\ninput x : f32[4_000_000] partial data\n"
    lines = [
        "a = reduce x over data by sum via recursive_doubling",
        "b = reduce x over data by mean",
        "output a, b",
    ]
    text = step(*lines, head=head)
    options = {"backend": "mpi"}
    assert found(text) == []
    assert found(text, topology=TWO_RACK, options=options) == [("CP1204", 5)]
    best = text.replace("recursive_doubling", "hierarchical(data)")
    assert found(text.replace(" via recursive_doubling", ""), topology=TWO_RACK, options=options) == []
    assert best != text


def test_messages_of_a_pinned_size():
    head = "plan p\naxis data = 8\ninput x : f32[4_000_000] partial data\n"
    lines = ["a = reduce x over data by sum via chain { chunk = 256 B }", "output a"]
    text = step(*lines, head=head).replace("256 B", "1 KiB")
    analysis = dsl.analyze(text, "p.plan")
    warnings = lint(analysis, LintInputs(topology=TWO_RACK, options={"backend": "mpi"}))
    assert [warning.message.partition(" leaves")[0] for warning in warnings] == [
        "`via chain`",
        "`chunk = 1 KiB`",
    ]


def test_a_narrow_wire_that_is_slower_than_none():
    head = "plan p\naxis data = 64\ninput x : f32[40_000_000] partial data\n"
    text = step("a = reduce x over data by mean { wire = bf16 }", "output a", head=head)
    warnings = lint(dsl.analyze(text, "p.plan"), LintInputs(topology=H100))
    assert [warning.message.partition(" leaves")[0] for warning in warnings] == ["`wire = bf16`"]
    assert found(text.replace("64", "8"), topology=H100) == []


def test_designs_of_sharing_that_cost_more_than_others():
    head = "plan p\nensemble member = 4\nsource images : bytes\nfn decode(bytes) -> u8[64, 64, 3] on host\n"
    lines = ["raw = load images batch 64 visit exactly_once seed 1", "pixels = map decode(raw)"]
    lines += ["same = share pixels over member via duplicate", "output same"]
    costs = InputCosts(
        "2026-11-21", 2, 1e-10, source=(SourceCost("images", 2e-5, 0.0, 5e4),), fn=(FnCost("decode", 2e-3),)
    )
    calibration = only_input("2026-11-21", costs)
    text = step(*lines, head=head)
    assert found(text, calibration=calibration) == [("CP1204", 8)]
    assert found(text.replace("duplicate", "single_broadcast(readers = 2)"), calibration=calibration) == []
    assert found(text) == []


def test_what_does_not_compile_is_an_error():
    head = "plan p\naxis data = ?\ninput x : tree partial data\n"
    analysis = dsl.analyze(step("a = reduce x over data by sum", "output a", head=head), "p.plan")
    with pytest.raises(CommplanError, match="CP0701"):
        lint(analysis, LintInputs(sizes={"data": 2}, shapes={}))


def test_random_numbers_that_all_members_share():
    head = HEAD + "source s : bytes\nfn f(bytes) -> u8[4] on host random\nfn g(u8[4]) -> u8[4] on host\n"
    load = "raw = load s batch 8 {} visit exactly_once seed 1"
    lines = ["a = map f(raw)", "b = map f(raw) per member", "c = map g(a)", "output a, b, c"]
    assert found(step(load.format(""), *lines, head=head)) == [("CP1205", 9)]
    assert found(step(load.format("per member"), *lines, head=head)) == []


@pytest.mark.parametrize(
    ("label", "codes"),
    [
        ("visit exactly_once seed 1", []),
        ("visit exactly_once seed 2", [("CP1210", 13)]),
        ("visit at_least_once seed 1", [("CP1210", 13)]),
    ],
)
def test_records_of_two_loads_in_different_orders(label: str, codes: list[tuple[str, int]]):
    head = HEAD + "source s : bytes\nsource t : i32\nfn f(bytes) -> u8[4] on host\n"
    head += "fn g(u8[4], i32) -> u8[4] on host\nfn h(u8[4]) -> u8[4] on host\n"
    images = "raw = load s batch 8 split data visit exactly_once seed 1"
    labels = f"y = load t batch 8 split data {label}"
    maps = ("x = map f(raw)", "z = map g(x, y)", "u = map h(z)", "output u")
    assert found(step(images, labels, *maps, head=head)) == codes


def test_two_orders_of_the_same_sources_are_meant():
    head = HEAD + "source s : u8[4]\nsource t : i32\nfn mixed(u8[4], i32, u8[4], i32) -> u8[4] on host\n"
    loads = [
        f"{name}{seed} = load {source} batch 8 split data visit exactly_once seed {seed}"
        for seed in (1, 2)
        for name, source in (("x", "s"), ("y", "t"))
    ]
    assert found(step(*loads, "z = map mixed(x1, y1, x2, y2)", "output z", head=head)) == []


def test_tails_that_lose_much():
    head = "plan p\naxis data = 2\nsource s : u8[4]\n"
    text = step("x = load s batch 8 visit at_most_once seed 1 tail drop", "output x", head=head)
    assert found(text) == []
    assert found(text, records={"s": 79}) == [("CP1206", 5)]  # 7 of 79
    assert found(text, records={"s": 159}) == []  # 7 of 159
    assert found(text, records={"s": 5}) == [("CP1206", 5)]
    assert found(text.replace("tail drop", "tail pad"), records={"s": 5}) == []


def test_declarations_that_nobody_uses():
    head = HEAD + "server hub = 1\nserver idle = 1\nsource s : bytes\nfn f(f32) -> f32 on device\n"
    head += "fn _g(f32) -> f32 on device\ninput x : f32 partial data\nstate c : f32 on hub\n"
    head += "at start { c = reduce x over data by sum }\n"
    text = step("y = reduce x over data by sum", "output y", head=head)
    text += "every 2 steps { c = exchange x into c with _g over data by sum }\n"
    text = text.replace("fn _g(f32) -> f32 on device\n", "fn _g(f32, f32) -> f32 on device elementwise\n")
    analysis = dsl.analyze(text, "p.plan")
    assert not analysis.diagnostics, analysis.diagnostics
    assert [(w.code, w.span.line) for w in lint(analysis) if w.span] == [("CP1209", n) for n in (5, 6, 7)]


# comments

PLAIN = HEAD + "input x : f32 partial data\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["y = reduce x over data by sum  # commplan: ignore CP1201"], []),
        (["# commplan: ignore CP1201", "y = reduce x over data by sum"], []),
        (["# commplan: ignore CP1201: it is for later", "# more", "y = reduce x over data by sum"], []),
        (["y = reduce x", "# commplan: ignore cp1201", "over data by sum"], []),
        (["y = reduce x over data", "by sum #commplan: ignore CP1201"], []),
        (["y = reduce x over data by sum  # commplan: ignore CP1205, CP1201"], [("CP1208", 6)]),
        (["y = reduce x over data by sum  # commplan: ignore CP1203"], [("CP1201", 6), ("CP1208", 6)]),
        (["y = reduce x over data by sum  # commplan: ignore CP1204"], [("CP1201", 6)]),  # not looked for
        (["y = reduce x over data by sum  # commplan: ignore CP1201 cp1201"], [("CP1207", 6)]),
        (["# commplan: ignore CP1201", "z = reduce x over data by max", "y = reduce x over data by sum"],
         [("CP1201", 8)]),
        (["y = reduce x over data by sum  # commplan: ignore CP0412"], [("CP1201", 6), ("CP1207", 6)]),
        (["y = reduce x over data by sum  # commplan: ignore CP1299"], [("CP1201", 6), ("CP1207", 6)]),
        (["y = reduce x over data by sum  # commplan: ignore CP1208"], [("CP1201", 6), ("CP1207", 6)]),
        (["y = reduce x over data by sum  # commplan: ignore"], [("CP1201", 6), ("CP1207", 6)]),
        (["y = reduce x over data by sum  # commplan: skip CP1201"], [("CP1201", 6), ("CP1207", 6)]),
        (["y = reduce x over data by sum  # about commplan: ignore CP1201"], [("CP1201", 6)]),
    ],
)  # fmt: skip
def test_comments_take_warnings_back(lines: list[str], expected: list[tuple[str, int]]):
    text = step(*lines, head=PLAIN).replace("by max", "by mean")
    assert found(text) == expected


def test_a_comment_on_the_last_line_is_about_nothing():
    text = step("y = reduce x over data by sum", "output y", head=PLAIN) + "# commplan: ignore CP1201"
    assert found(text) == [("CP1208", 9)]


def test_two_orders_of_a_source_beside_another_name_both_sources():
    head = "plan p\naxis data = 2\nsource images : f32\nsource labels : i32\n"
    head += "fn mix(f32, i32, f32) -> f32 on host\n"
    load = "{} = load {} batch 4 split data visit exactly_once seed {}"
    loads = (load.format("a", "images", 0), load.format("b", "labels", 0), load.format("c", "images", 1))
    text = step(*loads, "d = map mix(a, b, c)", "output d", head=head)
    (warning,) = lint(dsl.analyze(text, "p.plan"), LintInputs())
    assert warning.message == "`mix` takes records of `images` in different orders, and of `labels`"
