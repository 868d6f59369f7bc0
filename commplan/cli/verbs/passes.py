"""`commplan passes`: list the passes in their usual order, with options."""

from __future__ import annotations

import typing
from argparse import Namespace
from typing import Any

import msgspec

from commplan.cli.console import Console, fold_table
from commplan.passes.base import written
from commplan.passes.pipeline.registry import DEFAULT, PASSES


def run(args: Namespace, console: Console) -> int:
    """List the passes in their usual order."""
    listed = [_describe(name) for name in PASSES]
    if not console.is_human:
        console.document(passes=listed, default=DEFAULT)
        return 0
    table = _table(listed)
    console.show(lambda screen: screen.print(table), 110)
    console.put(f'\nThe default pipeline is "{DEFAULT}"; options are written bucket{{max=25MiB}}.\n')
    return 0


def _describe(name: str) -> dict[str, Any]:
    """The JSON description of a pass: its summary, options, and the passes that must precede it."""
    kind = PASSES[name]
    options = [
        {"name": field.name, "type": _type(field.type), "default": field.default}
        for field in msgspec.structs.fields(kind)
    ]
    return {"name": name, "summary": kind.summary(), "options": options, "after": list(kind.after)}


def _type(kind: Any) -> str:
    """The name of an option's type, for example `int` for an optional or bounded number."""
    while typing.get_args(kind) and typing.get_origin(kind) is not typing.Literal:
        kind = typing.get_args(kind)[0]
    return str(getattr(kind, "__name__", kind)).replace("typing.", "")


def _table(listed: list[dict[str, Any]]) -> Any:
    """A rich table of the described passes; an option without `=` has no default."""
    table = fold_table("pass", "effect", "options")
    for listed_pass in listed:
        options = ", ".join(
            option["name"] if option["default"] is None else f"{option['name']}={written(option['default'])}"
            for option in listed_pass["options"]
        )
        table.add_row(listed_pass["name"], listed_pass["summary"], options)
    return table
