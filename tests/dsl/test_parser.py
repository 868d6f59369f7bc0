"""The parse of well-formed text: nodes, spans, the newline rule, soft words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.random_ast import bare

from commplan.diagnostics import Span
from commplan.dsl import ast
from commplan.dsl.lexer import tokenize
from commplan.dsl.parser import parse

PLANS = [
    *sorted((Path(__file__).parents[2] / "examples" / "plans").glob("*.plan")),
    Path(__file__).parents[1] / "plans" / "caches.plan",
]


def tree_of(text: str) -> ast.File:
    tree, diagnostics = parse(text, "test.plan")
    assert not diagnostics, "\n".join(map(str, diagnostics))
    return tree


def stage(line: str) -> Any:
    """The expression of one stage line."""
    phase = tree_of(f"plan p\neach step {{\n{line}\n}}\n").items[0]
    assert isinstance(phase, ast.PhaseDecl)
    (statement,) = phase.body
    assert isinstance(statement, ast.StageStmt)
    return statement.expr


def declaration(line: str) -> Any:
    return tree_of(f"plan p\n{line}\n").items[0]


def nodes(node: Any) -> Iterator[ast.SyntaxNode]:
    if isinstance(node, tuple):
        for item in node:
            yield from nodes(item)
    if isinstance(node, ast.SyntaxNode):
        yield node
        for field in node.__struct_fields__:
            yield from nodes(getattr(node, field))


def written(text: str, span: Span) -> str:
    lines = text.split("\n")[span.line - 1 : span.end_line]
    lines[-1] = lines[-1][: span.end_column - 1]
    lines[0] = lines[0][span.column - 1 :]
    return "\n".join(lines)


def texts(names: tuple[ast.Name, ...]) -> list[str]:
    return [name.text for name in names]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_span_of_the_examples_holds_what_it_says(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = tree_of(text)
    for node in nodes(tree):
        piece = written(text, node.span)
        match node:
            case ast.File():
                assert piece == text
            case ast.Name():
                assert piece == node.text
            case ast.Number():
                assert piece == (f"{node.text} {node.unit}" if node.unit else node.text)
            case ast.PhaseDecl():
                assert piece.endswith("}")
                assert written(text, node.header) == piece.partition("{")[0].rstrip()
            case ast.Options():
                assert piece[0] == "{" and piece[-1] == "}"
            case ast.CallExpr():
                assert piece.startswith(node.name.text) and (node.args is None or piece.endswith(")"))
            case ast.AxisDecl() | ast.PlacementItem() | ast.StageExpr():
                assert piece.startswith(node.kind)
            case _:
                assert piece == piece.strip()


def test_the_examples_hold_every_kind_of_node() -> None:
    node_types = {type(node) for path in PLANS for node in nodes(tree_of(path.read_text(encoding="utf-8")))}
    kinds = {*ast.SyntaxNode.__subclasses__(), *ast.Communication.__subclasses__()} - {ast.Communication}
    assert kinds - node_types == {ast.BadStmt}


def test_numbers_keep_their_text_and_get_their_value() -> None:
    options = stage(
        "x = reduce g over a by mean { b = 25MiB, c = 1_000, d = 1.5 us, e = 2Mbit/s, f = 1e-3 }"
    ).options
    numbers = [item.value for item in options.items]
    assert [(n.text, n.value, n.unit) for n in numbers] == [
        ("25", 25, "MiB"), ("1_000", 1000, None), ("1.5", 1.5, "us"), ("2", 2, "Mbit/s"),
        ("1e-3", 0.001, None),
    ]  # fmt: skip
    assert isinstance(numbers[1].value, int)


def test_a_size_may_be_left_open() -> None:
    assert declaration("axis data = ?").size is None
    assert declaration("ensemble member = 0_4").size.value == 4


def test_dimensions_are_told_from_none() -> None:
    operands = declaration("fn f(f32, f32[], f32[3, 4]) -> tree on host random").operands
    dims = [None if operand.dims is None else [d.value for d in operand.dims] for operand in operands]
    assert dims == [None, [], [3, 4]]


def test_arguments_are_told_from_none() -> None:
    assert stage("x = share g over m via ring").via.args is None
    assert stage("x = share g over m via ring()").via.args == ()
    args = stage("x = share g over m via h(gpu = native, node, 3)").via.args
    assert [(arg.key and arg.key.text, bare(arg.value)) for arg in args] == [
        ("gpu", ("Name", {"text": "native"})),
        (None, ("Name", {"text": "node"})),
        (None, ("Number", "3", 3, None)),
    ]


def test_where_is_none_where_it_is_not_written() -> None:
    fn = declaration("fn f() -> tree")
    assert fn.where is None and fn.flags == () and fn.operands == ()
    assert texts(declaration("fn f() -> tree on device linear elementwise").flags) == [
        "linear",
        "elementwise",
    ]


def test_placements_stand_in_the_order_written() -> None:
    items = declaration("state s : tree same split b, a per c on hub").placement
    assert [(item.kind, texts(item.axes)) for item in items] == [
        ("same", []),
        ("split", ["b", "a"]),
        ("per", ["c"]),
    ]
    assert declaration("state s : tree same split b, a per c on hub").server.text == "hub"


def test_a_load_has_all_its_clauses() -> None:
    load = stage("x, n = load s batch [32, 64] over m split a, b per m visit k seed 7 tail pad { cores = 2 }")
    assert [size.value for size in load.batch.sizes] == [32, 64]
    assert load.batch.over.text == "m"
    assert (texts(load.split), texts(load.per)) == (["a", "b"], ["m"])
    assert (load.visit.text, load.seed.value, load.tail.text) == ("k", 7, "pad")
    assert load.options.items[0].key.text == "cores"


def test_stages_say_which_word_stood_before_their_axes() -> None:
    assert stage("x = reduce g across m by min").over_word.text == "across"
    assert stage("x = broadcast g over a, b from 3 via chain").root.value == 3


def test_servers_and_centers() -> None:
    exchange = stage(
        "w, m = exchange g into w, m with sgd over a by mean via ps(owners = 2) { chunk = 1 KiB }"
    )
    assert (exchange.gradient.text, texts(exchange.states), exchange.fn.text) == ("g", ["w", "m"], "sgd")
    elastic = stage("d, c = elastic w with c over a by sync(eta = e, rho = 0.1)")
    assert (elastic.operand.text, elastic.center.text, elastic.by.name.text) == ("w", "c", "sync")


@pytest.mark.parametrize(
    "header, kind, period, name",
    [
        ("at start", "start", None, None),
        ("each step", "step", None, None),
        ("every 4 steps", "every", 4, None),
        ("phase evaluate", "named", None, "evaluate"),
    ],
)
def test_phases(header: str, kind: str, period: int | None, name: str | None) -> None:
    phase = tree_of(f"plan p\n{header}\n{{ output x }}\n").items[0]
    assert isinstance(phase, ast.PhaseDecl)
    assert (phase.kind, phase.period and phase.period.value, phase.name and phase.name.text) == (
        kind,
        period,
        name,
    )
    assert len(phase.body) == 1


ONE_LINE = "x = reduce g over a, b by mean(weight = n) via ring(k = 1) { bucket = 25 MiB, wire = bf16 }"
MANY_LINES = """x = reduce g   # a remark
    over a, b

    by mean(
weight
=
n)
    # another
  via ring(k = 1)
{ bucket = 25 MiB,

  wire = bf16
  }"""


def test_newlines_end_statements_only_where_the_rule_says() -> None:
    assert bare(stage(ONE_LINE)) == bare(stage(MANY_LINES))


@pytest.mark.parametrize(
    "line",
    [
        "x = slice g\nover a",
        "x = reduce g\nacross a by sum",
        "x = broadcast g over a\nfrom 0",
        "x = reduce g over a\nby sum",
        "x = gather g over a\nvia ring",
        "x = map f(y)\nper m",
        "x = load s batch 4\nsplit a visit k seed 1",
        "x, c = elastic w\nwith c over a",
        "w = exchange g\ninto w with f over a",
        "x = load s batch 4\nvisit k seed 1",
        "x = load s batch 4 visit k\nseed 1",
        "x = load s batch 4 visit k seed 1\ntail pad",
        "x = map f(y)\n{ }",
    ],
)
def test_a_newline_before_a_continuing_word_ends_nothing(line: str) -> None:
    assert bare(stage(line)) == bare(stage(line.replace("\n", " ")))


@pytest.mark.parametrize(
    "line", ["input s : tree\npartial a", "state s : tree\non hub", "fn f() -> tree\non host"]
)
def test_nor_in_declarations(line: str) -> None:
    assert bare(declaration(line)) == bare(declaration(line.replace("\n", " ")))


def test_a_newline_before_another_word_does() -> None:
    _, diagnostics = parse("plan p\nphase\n  evaluate {\n}\n", "p")
    assert [(d.code, d.span and d.span.line) for d in diagnostics] == [("CP0009", 2)]


@pytest.mark.parametrize(
    "name", ["batch", "start", "step", "steps", "same", "host", "mean", "tree", "pad", "KiB"]
)
def test_soft_words_and_all_that_is_no_word_of_the_grammar_are_names(name: str) -> None:
    text = f"""plan {name}
axis {name} = 2
source {name} : {name}
fn {name}({name}) -> {name} on {name} {name}
input {name} : {name} per {name}
each step {{
    {name} = load {name} batch 4 visit {name} seed 1
    {name} = map {name}({name}) per {name} {{ {name} = {name} }}
    {name} = reduce {name} over {name} by {name}({name} = {name})
    output {name}
}}
phase {name} {{
}}
"""
    names = {node.text for node in nodes(tree_of(text)) if isinstance(node, ast.Name)}
    assert names == {name, "over"}


def test_comments_have_their_place() -> None:
    text = "# first\nplan p  # behind\neach step {   # of the phase\n  # alone\n}\n# last"
    comments = [token for token in tokenize(text) if token.type == "COMMENT"]
    assert [(c.text, not c.leads, c.line, c.column) for c in comments] == [
        ("# first", False, 1, 1),
        ("# behind", True, 2, 9),
        ("# of the phase", True, 3, 15),
        ("# alone", False, 4, 3),
        ("# last", False, 6, 1),
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_and_the_byte_order_mark_change_nothing(newline: str) -> None:
    lines = ["plan p", "axis data = 8   # ranks", "each step {", "    x = map f(y)", "}", ""]
    plain, other = tree_of("\n".join(lines)), tree_of("\ufeff" + newline.join(lines))
    assert [node.span for node in nodes(plain)] == [node.span for node in nodes(other)]


def test_what_stands_before_a_mistake_and_behind_it_is_read() -> None:
    tree, _ = parse(
        "plan p\naxis a = 1\naxis b 2\naxis c = 3\neach step {\n x = reduc g\n output x\n}\n", "p"
    )
    kinds = [type(item).__name__ for item in tree.items]
    assert kinds == ["AxisDecl", "BadStmt", "AxisDecl", "PhaseDecl"]
    phase = tree.items[-1]
    assert isinstance(phase, ast.PhaseDecl)
    bad, output = phase.body
    assert isinstance(bad, ast.BadStmt) and texts(bad.targets) == ["x"]
    assert isinstance(output, ast.OutputStmt)


@pytest.mark.parametrize(
    "header, kind", [("at strat", "start"), ("each stp", "step"), ("every 3 stps", "every")]
)
def test_a_misspelt_phase_is_still_a_phase(header: str, kind: str) -> None:
    tree, diagnostics = parse(f"plan p\n{header} {{\n  x = map f(y)\n}}\n", "p")
    assert len(diagnostics) == 1
    (phase,) = tree.items
    assert isinstance(phase, ast.PhaseDecl) and phase.kind == kind and len(phase.body) == 1


def test_an_unknown_phase_binds_what_its_stages_bind() -> None:
    tree, _ = parse("plan p\nphase {\n  x, y = map f(z)\n  q = load s\n}\n", "p")
    (bad,) = tree.items
    assert isinstance(bad, ast.BadStmt) and texts(bad.targets) == ["x", "y", "q"]
