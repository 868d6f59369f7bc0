"""The grammars of editors: they match the lists of the language, and color plans correctly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commplan.dsl.format import format_source
from commplan.highlight.categories import Category, categorize
from editors.grammars.__main__ import FILES, main
from editors.grammars.textmate import SCOPES

ROOT = Path(__file__).parents[2]
VSCODE = ROOT / "editors" / "vscode"
PLANS = sorted(
    [*(ROOT / "examples/plans").glob("*.plan"), *(ROOT / "tests/plans").glob("*.plan"),
     *(ROOT / "commplan/cli/templates").glob("*.plan")]
)  # fmt: skip
COMMAND = Path(sys.executable).with_name("commplan")
MODULES = ROOT / ".make" / "tokenizer" / "node_modules"
GROUPS = {
    "planComment": "comment", "planDeclaration": "declaration", "planPhase": "phase", "planStage": "verb",
    "planClause": "clause", "planType": "type", "planConstant": "constant", "planPlace": "constant",
    "planFunction": "function", "planAlgorithm": "algorithm", "planOperator": "operator",
    "planOption": "option", "planNumber": "number", "planMark": "mark",
    "planText": "text",
}  # fmt: skip


def test_the_files_are_what_is_generated(tmp_path: Path):
    main(str(tmp_path))
    for name in FILES:
        assert (ROOT / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8"), "run `make grammars`"


def test_every_category_has_a_scope():
    assert set(SCOPES) == set(Category)
    assert len(set(SCOPES.values())) == len(SCOPES)


def test_what_the_extension_names_is_there():
    manifest = json.loads((VSCODE / "package.json").read_text("utf-8"))
    (language,), (grammar,) = manifest["contributes"]["languages"], manifest["contributes"]["grammars"]
    for name in (manifest["main"], language["configuration"], grammar["path"]):
        assert (VSCODE / name).is_file(), name
    scope = json.loads((VSCODE / grammar["path"]).read_text("utf-8"))["scopeName"]
    assert scope == grammar["scopeName"] and language["id"] == grammar["language"]
    json.loads((VSCODE / language["configuration"]).read_text("utf-8"))
    pinned = {f"{name}@{version}" for name, version in manifest["devDependencies"].items()}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert set(makefile.partition("TOKENIZER := ")[2].splitlines()[0].split()) == pinned


def scopes(texts: list[str]) -> list[list[Any]]:
    """Of each line of each text the pieces with their scopes, by VS Code's tokenizer."""
    if shutil.which("node") is None or not MODULES.is_dir():
        if os.environ.get("COMMPLAN_TOKENIZER") == "1":
            pytest.fail("COMMPLAN_TOKENIZER=1, and node or the tokenizer is not installed")
        pytest.skip("VS Code's tokenizer is not installed: `make tokenizer`")
    request = {"grammar": str(VSCODE / "syntaxes" / "plan.tmLanguage.json"), "texts": texts}
    done = subprocess.run(
        ["node", str(VSCODE / "tokenize.cjs")], input=json.dumps(request), text=True, check=True,
        capture_output=True, env={**os.environ, "NODE_PATH": str(MODULES)},
    )  # fmt: skip
    return json.loads(done.stdout)


def test_vscode_colors_each_token_as_it_is_meant():
    texts = [plan.read_text("utf-8") for plan in PLANS]
    texts += [format_source(text.replace("bucket", "chunk"), "p.plan") for text in texts[:3]]
    texts.append(
        "plan p\naxis ring = 2  # via ring\ninput same : tree same ring\neach step {\n    tree = same\n}\n"
    )
    wrong, count = [], 0
    for text, lines in zip(texts, scopes(texts), strict=True):
        for token, category in categorize(text):
            start = token.column - 1
            piece = next((piece for piece in lines[token.line - 1] if piece[0] <= start < piece[1]), None)
            count += 1
            if piece is None or piece[2][-1] != SCOPES[category]:
                wrong.append((token.text, str(category), piece, text.splitlines()[token.line - 1]))
    assert count > 3000 and not wrong


def test_a_unit_has_a_scope_of_its_own():
    ((pieces, *_),) = scopes(["25 MiB\n"])
    assert [(start, end, names[-1]) for start, end, names in pieces if len(names) > 1] == [
        (0, 2, SCOPES[Category.NUMBER]),
        (3, 6, SCOPES[Category.UNIT]),
    ]


def vim() -> str:
    """A Vim with syntax support. Skips the test if there is none: Debian's vim-tiny has none."""
    program = shutil.which("vim")
    version = (
        subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        if program
        else None
    )
    if program is None or version is None or "+syntax" not in version.stdout:
        pytest.skip("no Vim with syntax here")
    return program


def _formats(program: str, folder: Path) -> None:
    """`:PlanFormat` lays out a whole plan, and leaves one with errors as it is."""
    environment = {**os.environ, "HOME": str(folder), "PATH": f"{COMMAND.parent}:{os.environ['PATH']}"}
    for text, expected in (
        ("plan   p\naxis a=2", "plan p\n\naxis a = 2\n"),
        ("plan   p\naxis", "plan   p\naxis\n"),
    ):
        place = folder / "p.plan"
        place.write_text(text)
        subprocess.run(
            [program, "-Nu", str(folder / "vimrc"), "-es", "-c", "PlanFormat", "-c", "wq", str(place)],
            check=False, stdin=subprocess.DEVNULL, env=environment, timeout=120,
        )  # fmt: skip
        assert place.read_text() == expected


def test_vim_colors_each_token_as_it_is_meant(tmp_path: Path):
    program = vim()
    (tmp_path / "vimrc").write_text(
        f"set nocompatible\nset runtimepath^={ROOT}/editors/vim\nfiletype plugin on\nsyntax on\n"
    )
    script = ["let out = []"]
    for plan in PLANS:
        script.append(f"edit {plan}")
        for token, _ in categorize(plan.read_text("utf-8")):
            script.append(f"call add(out, synIDattr(synID({token.line}, {token.column}, 1), 'name'))")
    script += ["call add(out, &filetype . ' ' . &makeprg)", f"call writefile(out, '{tmp_path}/out')", "qa!"]
    (tmp_path / "ask.vim").write_text("\n".join(script))
    subprocess.run(
        [program, "-Nu", str(tmp_path / "vimrc"), "-es", "-S", str(tmp_path / "ask.vim")],
        check=True, stdin=subprocess.DEVNULL, env={**os.environ, "HOME": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    _formats(program, tmp_path)
    *groups, last = (tmp_path / "out").read_text("utf-8").splitlines()
    assert last.startswith("plan commplan check")
    tokens = [pair for plan in PLANS for pair in categorize(plan.read_text("utf-8"))]
    wrong = [
        (token.text, str(category), group)
        for (token, category), group in zip(tokens, groups, strict=True)
        if GROUPS.get(group, "name" if category is Category.NAME else "punctuation") != category
    ]
    assert not wrong
