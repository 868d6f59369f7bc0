"""`python -m editors.grammars ROOT`: writes the tables of the parser, and the grammars of editors."""

from __future__ import annotations

import sys
from pathlib import Path

from editors.grammars.tables import tables
from editors.grammars.textmate import grammar
from editors.grammars.vim import syntax

FILES = {
    "dsl/plan.tables.json": tables,
    "editors/vscode/syntaxes/plan.tmLanguage.json": grammar,
    "editors/vim/syntax/plan.vim": syntax,
}


def main(root: str) -> None:
    """Write every generated file below `root`."""
    for name, text in FILES.items():
        place = Path(root, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["."])
