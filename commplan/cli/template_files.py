"""The templates of `commplan new`."""

from __future__ import annotations

from importlib.resources import files


def templates() -> dict[str, str]:
    """For each template, the first comment line of its plan."""
    folder = files("commplan.cli").joinpath("templates")
    names = sorted(
        entry.name.removesuffix(".plan") for entry in folder.iterdir() if entry.name.endswith(".plan")
    )
    return {name: template(f"{name}.plan").splitlines()[0].lstrip("# ") for name in names}


def template(file: str) -> str:
    """The text of a file of a template."""
    return files("commplan.cli").joinpath("templates", file).read_text(encoding="utf-8")
