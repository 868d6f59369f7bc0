"""Diagnostics to text, in five styles. Nothing here decides what is wrong; it only says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from commplan.diagnostics import Diagnostic

Style = Literal["human", "concise", "json", "github", "sarif"]


def render(
    diagnostics: Sequence[Diagnostic], texts: Mapping[str, str], style: Style = "human", color: bool = False
) -> str:
    """`diagnostics` in one style, in their order; "" for none, except that json and sarif are documents.

    `texts` maps a diagnostic's file to what is written there, for the excerpts of `human`.
    `color` is for `human` alone.
    """
    if style == "human":
        if not diagnostics:  # the usual answer of `commplan check` loads nothing
            return ""
        from commplan.render.human import human

        return human(diagnostics, texts, color)
    from commplan.render import machine

    return machine.STYLES[style](diagnostics)
