"""A bank of syntax errors: each text gets exactly these codes at these places."""

from __future__ import annotations

import pytest
from support.campaign import parameters

from commplan.diagnostics import Diagnostic
from commplan.dsl import load
from commplan.dsl.parser import MOST_ERRORS, parse

Place = tuple[str, int, int]

HEAD = "plan p\naxis data = 8\n"  # two lines
STEP = f"{HEAD}each step {{\n"  # three


def _step(*lines: str) -> str:
    return STEP + "".join(f"  {line}\n" for line in lines) + "}\n"


BANK: dict[str, tuple[str, list[Place]]] = {
    # The header.
    "empty": ("", [("CP0005", 1, 1)]),
    "comments only": ("# a\n\n# b\n", [("CP0005", 1, 1)]),
    "no plan": ("\n  axis data = 8\n", [("CP0005", 2, 3)]),
    "plan comes late": ("axis data = 8\nplan p\n", [("CP0005", 2, 1)]),
    "two plans": ("plan p\nplan q\n", [("CP0005", 2, 1)]),
    "misspelt plan": ("pln p\n", [("CP0008", 1, 1)]),
    "plan without a name": ("plan\naxis a = 1\n", [("CP0009", 1, 5)]),
    "plan with two names": ("plan p q\n", [("CP0009", 1, 8)]),
    "plan is a word": ("plan reduce\n", [("CP0010", 1, 6)]),
    # Declarations.
    "phase without a header, options without an end": (
        HEAD + "{\n  output{ x\n}\n",
        [("CP0009", 3, 1), ("CP0006", 4, 9)],
    ),
    "axis without a size": (HEAD + "axis b\n", [("CP0009", 3, 7)]),
    "axis of a fraction": (HEAD + "axis b = 1.5\n", [("CP0009", 3, 10)]),
    "axis with a unit": (HEAD + "axis b = 2 KiB\n", [("CP0009", 3, 10)]),
    "axis is a word": (HEAD + "axis over = 2\n", [("CP0010", 3, 6)]),
    "two on a line": (HEAD + "axis b = 2 axis c = 3\n", [("CP0009", 3, 12)]),
    "equals twice": (HEAD + "axis b == 2\n", [("CP0009", 3, 9)]),
    "misspelt declaration": (HEAD + "axes b = 2\n", [("CP0008", 3, 1)]),
    "misspelt, no equals": (HEAD + "inptu b : tree\n", [("CP0008", 3, 1)]),
    "no colon": (HEAD + "input b tree\n", [("CP0009", 3, 9)]),
    "no type": (HEAD + "input b :\n", [("CP0009", 3, 10)]),
    "type on the next line": (HEAD + "input b :\n  tree\n", [("CP0009", 3, 10)]),
    "per what": (HEAD + "input b : tree per\n", [("CP0009", 3, 19)]),
    "input on a server": (HEAD + "input b : tree on hub\n", [("CP0009", 3, 16)]),
    "no arrow": (HEAD + "fn f(tree) tree on host\n", [("CP0009", 3, 12)]),
    "fn without parentheses": (HEAD + "fn f tree -> tree on host\n", [("CP0009", 3, 6)]),
    "trailing comma": (HEAD + "fn f(tree,) -> tree on host\n", [("CP0009", 3, 11)]),
    "braces behind a declaration": (HEAD + "axis b = 2 { }\n", [("CP0009", 3, 12)]),
    "dimension with a name": (HEAD + "source b : f32[n]\n", [("CP0009", 3, 16)]),
    # Phases.
    "misspelt step": (HEAD + "each stepp {\n}\n", [("CP0009", 3, 6)]),
    "misspelt each": (HEAD + "eahc step {\n}\n", [("CP0008", 3, 1)]),
    "every without a number": (HEAD + "every steps {\n}\n", [("CP0009", 3, 7)]),
    "every step": (HEAD + "every 4 step {\n}\n", [("CP0009", 3, 9)]),
    "phase without a name": (HEAD + "phase {\n}\n", [("CP0009", 3, 6)]),
    "phase is a word": (HEAD + "phase map {\n}\n", [("CP0010", 3, 7)]),
    "no brace": (HEAD + "each step\n  output x\n}\n", [("CP0009", 3, 10)]),
    "a name in two lines": (HEAD + "phase d\nispatch {\n}\n", [("CP0009", 3, 8)]),
    "brace alone": (HEAD + "axis b = 1\n\n\n}\n{\n  output x\n}\n", [("CP0007", 6, 1), ("CP0009", 7, 1)]),
    "stage outside": (HEAD + "x = map f(y)\nz = map f(x)\n}\n", [("CP0012", 3, 1)]),
    "output outside": (HEAD + "output x\n", [("CP0012", 3, 1)]),
    # Stages.
    "misspelt output": (_step("outptu x"), [("CP0008", 4, 3)]),
    "a word alone": (_step("banana"), [("CP0008", 4, 3)]),
    "a number alone": (_step("12"), [("CP0008", 4, 3)]),
    "misspelt stage": (_step("x = reduc g over data by mean"), [("CP0009", 4, 7)]),
    "no map": (_step("x = decode(g)"), [("CP0009", 4, 7)]),
    "unknown stage": (_step("x = banana"), [("CP0009", 4, 7)]),
    "nothing behind equals": (_step("x ="), [("CP0009", 4, 6)]),
    "stage on the next line": (_step("x =", "  map f(g)"), [("CP0009", 4, 6)]),
    "no equals": (_step("x map f(g)"), [("CP0008", 4, 3)]),
    "no operand": (_step("x = reduce over data by mean"), [("CP0009", 4, 14)]),
    "operand is a word": (_step("x = reduce visit over data by mean"), [("CP0010", 4, 14)]),
    "a word is bound": (_step("x = map f(g)", "seed = map f(x)", "output x"), [("CP0010", 5, 3)]),
    "a word twice, one error": (_step("per = map f(g)", "output per"), [("CP0010", 4, 3)]),
    "misspelt over": (_step("x = reduce g ovr data by mean"), [("CP0009", 4, 16)]),
    "no over": (_step("x = reduce g by mean"), [("CP0009", 4, 16)]),
    "over nothing": (_step("x = reduce g over by mean"), [("CP0009", 4, 21)]),
    "by before over": (_step("x = reduce g by mean over data"), [("CP0009", 4, 16)]),
    "no comma between targets": (_step("x y = map f(g)"), [("CP0009", 4, 5)]),
    "no comma between axes": (_step("x = reduce g over a b by mean"), [("CP0009", 4, 23)]),
    "two stages on a line": (_step("x = map f(g) y = map f(x)"), [("CP0009", 4, 16)]),
    "map without parentheses": (_step("x = map f g"), [("CP0009", 4, 13)]),
    "root has a name": (_step("x = broadcast g over data from root"), [("CP0009", 4, 34)]),
    "no source": (_step("x = load batch 8 visit k seed 1"), [("CP0009", 4, 12)]),
    "no batch": (_step("x = load s visit k seed 1"), [("CP0009", 4, 14)]),
    "batch on the next line": (_step("x = load s", "     batch 8 visit k seed 1"), [("CP0009", 4, 13)]),
    "half a record": (_step("x = load s batch 0.5 visit k seed 1"), [("CP0009", 4, 20)]),
    "seed before visit": (_step("x = load s batch 8 seed 1 visit k"), [("CP0009", 4, 29)]),
    "split twice": (_step("x = load s batch 8 split a split b visit k seed 1"), [("CP0009", 4, 30)]),
    "exchange without into": (_step("w = exchange g with f over a by sum"), [("CP0009", 4, 18)]),
    "elastic without with": (_step("d, c = elastic w over a by sync"), [("CP0009", 4, 20)]),
    "comma at the end of the line": (_step("output x,", "       y"), [("CP0009", 4, 12)]),
    # Options and arguments.
    "option without equals": (_step("x = reduce g over a by mean { bucket 25 MiB }"), [("CP0009", 4, 40)]),
    "option without a comma": (_step("x = reduce g over a by mean { a = 1 b = 2 }"), [("CP0004", 4, 37)]),
    "options without a comma": (_step("x = reduce g over a by mean { a = b c = d }"), [("CP0009", 4, 39)]),
    "no such unit": (_step("x = reduce g over a by mean { a = 25MB }"), [("CP0004", 4, 37)]),
    "no such unit, spaced": (_step("x = reduce g over a by mean { a = 25 MB }"), [("CP0004", 4, 37)]),
    "empty argument": (_step("x = reduce g over a by mean(,)"), [("CP0009", 4, 31)]),
    "nested call": (_step("x = reduce g over a by mean via h(a = r(b))"), [("CP0009", 4, 42)]),
    "braces twice": (_step("x = reduce g over a by mean { } { }"), [("CP0009", 4, 35)]),
    # Brackets.
    "parenthesis open, a stage follows": (_step("x = map f(a,", "y = map f(b)"), [("CP0006", 4, 12)]),
    "parenthesis open, a misspelt stage": (
        _step("x = map f(a", "y = reduc g over a"),
        [("CP0006", 4, 12), ("CP0009", 5, 7)],
    ),
    "parenthesis open, output follows": (_step("x = map f(a", "output x"), [("CP0006", 4, 12)]),
    "parenthesis open, phase ends": (_step("x = map f(a") + "at start {\n}\n", [("CP0006", 4, 12)]),
    "parenthesis open, a declaration": (HEAD + "fn f(tree -> tree on host\naxis q = 2\n", [("CP0006", 3, 5)]),
    "parenthesis open, a phase": (HEAD + "fn f(tree -> tree on host\neach step {\n}\n", [("CP0006", 3, 5)]),
    "square bracket open": (HEAD + "fn f(u8[3, 4) -> u8[3] on host\n", [("CP0006", 3, 8)]),
    "options open, output follows": (
        _step("x = reduce g over a by mean { b = c", "output x"),
        [("CP0006", 4, 31)],
    ),
    "options open, phase ends": (_step("x = reduce g over a by mean { b = c"), [("CP0006", 4, 31)]),
    "phase open, a phase follows": (STEP + "  output x\nat start {\n}\n", [("CP0006", 3, 11)]),
    "phase open, a declaration follows": (STEP + "  output x\naxis b = 1\n", [("CP0006", 3, 11)]),
    "declaration inside a phase": (_step("output x", "axis b = 1", "output y"), [("CP0006", 3, 11)]),
    "phase inside a phase": (STEP + "  at start {\n  }\n}\n", [("CP0006", 3, 11)]),
    "phase open at the end": (STEP + "  output x\n", [("CP0006", 3, 11)]),
    "all open at the end": (STEP + "  x = map f(a", [("CP0006", 4, 12)]),
    "wrong closer": (_step("x = map f(a]"), [("CP0006", 4, 12)]),
    "closer too many": (_step("x = map f(a))"), [("CP0007", 4, 15)]),
    "options never opened": (
        _step("x = reduce g over a by mean", "b = 25 MiB, c = d }", "output x"),
        [("CP0007", 5, 21)],
    ),
    "options never opened, one line": (
        _step("x = reduce g over a by mean b = c }", "output x"),
        [("CP0007", 4, 37)],
    ),
    "phase ends behind its last stage": (
        STEP + "  x = reduce g over a by mean(weight = n) }\nbanana\n",
        [("CP0008", 5, 1)],
    ),
    "lines run together": (
        _step("x = load s batch 8 visit k seed 1 y, z = map f(x)", "output x, y, z"),
        [("CP0009", 4, 37)],
    ),
    "a number and a word": (HEAD + "axis b = 4axis c = 4\n", [("CP0009", 3, 11)]),
    "brace too many": (_step("output x") + "}\n", [("CP0007", 6, 1)]),
    # Characters.
    "junk": (HEAD + "axis b $ 2\n", [("CP0003", 3, 8)]),
    "letters of other scripts": (HEAD + "axis größe = 2\n", [("CP0003", 3, 8)]),
    "string": (HEAD + 'axis b = "2"\n', [("CP0003", 3, 10)]),
    "a text where a name stands": (HEAD + 'axis b = 2\nsource "s" : bytes\n', [("CP0003", 4, 8)]),
    "a topology without quotes": (HEAD + "topology cluster.toml\n", [("CP0009", 3, 10)]),
    "a topology in single quotes": (HEAD + "topology 'cluster.toml'\n", [("CP0009", 3, 10)]),
    "a topology whose quotes are not closed": (HEAD + 'topology "cluster.toml\n', [("CP0009", 3, 10)]),
    "a word like topology": (HEAD + 'topolgy "cluster.toml"\n', [("CP0008", 3, 1)]),
    "no-break space": (HEAD + "axis b\u00a0= 2\n", [("CP0003", 3, 7)]),
    "semicolon": (HEAD + "axis b = 2;\naxis c = 3;\n", [("CP0003", 3, 11), ("CP0003", 4, 11)]),
    "slashes": (HEAD + "axis b = 2 // ranks\n", [("CP0003", 3, 12)]),
    "nul": (HEAD + "axis b\0= 2\naxes c = 3", [("CP0002", 3, 7)]),
    "binary": ("\x7fELF\x02\x01\x01\x00", [("CP0002", 1, 5)]),
    "number of many digits": (HEAD + f"axis b = {'9' * 5000}\n", [("CP0004", 3, 10)]),
    "number too large": (_step("x = elastic w with c over a by s(e = 1e999)"), [("CP0004", 4, 40)]),
    "underscores": (HEAD + "axis b = 1__0\n", [("CP0004", 3, 10)]),
    "number and letters": (HEAD + "axis b = 3x\n", [("CP0004", 3, 10)]),
    # Several at once, and ways to write lines.
    "all in one run": (
        HEAD + "axes b = 2\n" + "each step {\n  outptu x\n  y = map f(\n  z = reduc g over a\n}\n}\n",
        [("CP0008", 3, 1), ("CP0008", 5, 3), ("CP0006", 6, 12), ("CP0009", 7, 7), ("CP0007", 9, 1)],
    ),
    "crlf": ("plan p\r\n\r\naxes b = 2\r\n", [("CP0008", 3, 1)]),
    "cr": ("plan p\r\raxes b = 2\r", [("CP0008", 3, 1)]),
    "byte order mark": ("\ufeffplan p\naxes b = 2\n", [("CP0008", 2, 1)]),
    "tabs": ("plan p\n\taxis\tb = ;\n", [("CP0003", 2, 11)]),
}


def _places(diagnostics: tuple[Diagnostic, ...]) -> list[Place]:
    return [(d.code, d.span.line, d.span.column) for d in diagnostics if d.span]


@pytest.mark.parametrize("name", BANK)
def test_each_mistake_is_one_error_at_its_place(name: str) -> None:
    text, expected = BANK[name]
    _, diagnostics = parse(text, "bank.plan")
    assert _places(diagnostics) == expected, "\n".join(map(str, diagnostics))


@pytest.mark.parametrize("name", BANK)
def test_fixes_mend_what_they_are_for(name: str) -> None:
    text, _ = BANK[name]
    _, diagnostics = parse(text, "bank.plan")
    for diagnostic in diagnostics:
        if diagnostic.fix is None:
            continue
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        span = diagnostic.fix.span
        line = lines[span.line - 1]
        lines[span.line - 1] = line[: span.column - 1] + diagnostic.fix.text + line[span.end_column - 1 :]
        _, after = parse("\n".join(lines), "bank.plan")
        assert _places((diagnostic,))[0] not in _places(after), diagnostic.fix.title


def test_a_bad_stage_still_binds_its_targets_and_nothing_else_is_reported() -> None:
    text = _step("x, y = reduc g over data", "z = map f(x)", "output y, z").replace(
        "axis data = 8\n", "axis data = 8\ninput g : tree partial data\nfn f(tree) -> tree on device\n"
    )
    _, diagnostics = load(text, "p.plan")
    assert _places(diagnostics) == [("CP0009", 6, 10)]


@pytest.mark.parametrize(
    "line, column", [("input x tree", 9), ("input input x : tree", 7), ("state w : tree input x : tree", 16)]
)
def test_names_of_bad_declarations_are_known(line: str, column: int) -> None:
    text = _step("y = map f(x)", "output y").replace(
        "axis data = 8\n", f"axis data = 8\n{line}\nfn f(tree) -> tree on device\n"
    )
    _, diagnostics = load(text, "p.plan")
    assert _places(diagnostics) == [("CP0009", 3, column)]


@pytest.mark.parametrize("text", parameters(["{\n}\n", "é", "[("], ["{", "}", "x\n", "9", "-", "(a,\n", "="]))
def test_ten_megabytes_of_anything_end_in_a_diagnostic(text: str) -> None:
    big = text * (10_000_000 // len(text))
    for start in ("", STEP):
        _, diagnostics = parse(start + big, "big.plan")
        assert 1 <= len(diagnostics) <= MOST_ERRORS + 1


def test_a_thousand_errors_are_enough() -> None:
    _, diagnostics = parse("plan p\n" + "banana\n" * 5000, "p.plan")
    assert len(diagnostics) == MOST_ERRORS + 1
    assert [d.code for d in diagnostics[-2:]] == ["CP0008", "CP0013"]


def test_large_plans_are_read_in_one_go() -> None:
    lines = [f"x{i} = map f(x{i - 1})" for i in range(1, 5001)]
    tree, diagnostics = parse("plan p\nphase big {\n" + "\n".join(lines) + "\n}\n", "p.plan")
    assert not diagnostics
    assert len(tree.items[0].body) == 5000  # pyright: ignore


def test_batches_of_many_members_fit_in_a_statement() -> None:
    sizes = ", ".join(["32"] * 65_536)
    _, diagnostics = parse(
        f"plan p\neach step {{\n  x = load s batch [{sizes}] over m visit k seed 1\n}}\n", "p"
    )
    assert not diagnostics
