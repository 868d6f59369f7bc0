"""Every field of a schedule has a role, and the manual lists them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from commplan.ir import roles
from commplan.ir.roles import Meaning, Presentation
from commplan.ir.schedule import Schedule

PAGE = Path(__file__).resolve().parents[2] / "docs" / "proofs.md"


class Note(msgspec.Struct):
    plain: int


class Inner(msgspec.Struct):
    plain: int


class Outer(msgspec.Struct):
    inner: Meaning[tuple[Inner | None, ...]]
    note: Presentation[Note | None] = None


@pytest.mark.parametrize("kind", list(roles.structs(Schedule)), ids=lambda kind: kind.__qualname__)
def test_every_field_declares_its_role(kind: type[msgspec.Struct]):
    assert [field.name for field in roles.fields(kind) if field.role is None] == []


def test_an_undeclared_field_is_found_at_any_depth():
    assert list(roles.structs(Outer)) == [Outer, Inner]
    assert [field.role for field in roles.fields(Inner)] == [None]


def test_the_manual_lists_every_field_and_its_role():
    text = roles.table(Schedule)
    assert text in PAGE.read_text(), f"put this table into {PAGE.name}:\n{text}"
