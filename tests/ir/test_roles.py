"""Every field of a schedule has a role, and the manual lists them."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from commplan.ir import roles
from commplan.ir.roles import Meaning, Presentation, Role
from commplan.ir.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "fields.md"


class Note(msgspec.Struct):
    plain: int


class Inner(msgspec.Struct):
    plain: int


class Outer(msgspec.Struct):
    inner: Meaning[tuple[Inner | None, ...]]
    note: Presentation[Note | None] = None


def structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that a value of type `kind` can contain, at any depth, each once.

    Presentation fields are skipped, since all of their content is presentation.
    """
    visited = dict[type[msgspec.Struct], None]()
    stack: list[Any] = [kind]
    while stack:
        item = stack.pop()
        if not (isinstance(item, type) and issubclass(item, msgspec.Struct)):
            stack += reversed(get_args(item))
        elif item not in visited:
            visited[item] = None
            followed = [field.type for field in roles.fields(item) if field.role is not Role.PRESENTATION]
            stack += reversed(followed)
    return iter(visited)


@pytest.mark.parametrize("kind", list(structs(Schedule)), ids=lambda kind: kind.__qualname__)
def test_every_field_declares_its_role(kind: type[msgspec.Struct]):
    assert [field.name for field in roles.fields(kind) if field.role is None] == []


def test_an_undeclared_field_is_found_at_any_depth():
    assert list(structs(Outer)) == [Outer, Inner]
    assert [field.role for field in roles.fields(Inner)] == [None]


def table(kind: type[msgspec.Struct]) -> str:
    """A Markdown table of the fields of all structs in `kind`, by role."""
    lines = ["| |" + "".join(f" {role.name.lower()} |" for role in Role), "|---" * (len(Role) + 1) + "|"]
    for struct in structs(kind):
        by_role = {role: [f"`{f.name}`" for f in roles.fields(struct) if f.role is role] for role in Role}
        if any(by_role.values()):
            cells = "".join(f" {', '.join(names)} |" if names else " |" for names in by_role.values())
            lines.append(f"| {title(struct)} |{cells}")
    return "\n".join(lines) + "\n"


def title(struct: type[msgspec.Struct]) -> str:
    """The title of a struct in the table. An op and a stage may have the same class name."""
    *_, folder, module = struct.__module__.split(".")
    tag = struct.__struct_config__.tag
    if folder in ("ops", "stages") and tag is not None:
        return f"{folder[:-1]} `{tag}`"
    return f"`{module}.{struct.__name__}`"


def test_the_manual_lists_every_field_and_its_role():
    text = table(Schedule)
    assert text in PAGE.read_text(), f"put this table into {PAGE.name}:\n{text}"


# Reads of a place in the text that order or match for people: what compiled HLO says of its plan lines, and
# the lines of an account of the input.
FOR_PEOPLE = {"lowering/audit/causes.py", "runtime/input/observe/accounting.py"}
RECORDERS = ("self", "recording.record", "record")  # whose lanes are threads
KEYS = (ast.Compare, ast.Lambda, ast.Subscript, ast.Set, ast.SetComp)


def reads(path: Path, name: str) -> Iterator[list[ast.AST]]:
    """The reads of an attribute of an op or a stage, each with the nodes around it, the innermost first."""
    text = path.read_text()
    tree = ast.parse(text) if f".{name}" in text else ast.Module([], [])
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in parents:
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
            around: list[ast.AST] = [node]
            while not isinstance(around[-1], ast.stmt):
                around.append(parents[around[-1]])
            if ast.unparse(node.value) not in RECORDERS:
                yield around


def is_key(around: list[ast.AST]) -> bool:
    """Whether the value is compared, sorted or used as a key; arguments of calls are not followed."""
    for inner, outer in itertools.pairwise(around):
        if isinstance(outer, KEYS) or (isinstance(outer, ast.DictComp) and inner is outer.key):
            return True
        if isinstance(outer, ast.keyword | ast.JoinedStr):
            return False
        if isinstance(outer, ast.Call) and inner is not outer.func:
            return False
    return False


def test_runtimes_and_lowerings_read_no_cost_and_identify_nothing_by_its_place():
    kinds = list(structs(Schedule))
    costs = {field.name for kind in kinds for field in roles.fields(kind) if field.role is Role.COST}
    assert costs == {"lane", "pinned"}
    wrong: list[str] = []
    for path in (path for room in ("lowering", "runtime") for path in sorted((ROOT / room).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        wrong += [f"{name} reads the cost `{cost}`" for cost in costs for _ in reads(path, cost)]
        places = [around for around in reads(path, "span") if name not in FOR_PEOPLE and is_key(around)]
        wrong += [f"{name} identifies something by its place: {ast.unparse(each[0])}" for each in places]
    assert wrong == []
