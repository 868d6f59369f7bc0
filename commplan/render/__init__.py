"""Diagnostics to text, in five styles. Nothing here decides what is wrong; it only says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from commplan.diagnostics import Diagnostic
from commplan.render.human import human
from commplan.render.machine import concise, github, json_document, sarif

Style = Literal["human", "concise", "json", "github", "sarif"]


def render(
    diagnostics: Sequence[Diagnostic], texts: Mapping[str, str], style: Style = "human", color: bool = False
) -> str:
    """`diagnostics` in one style, in their order; "" for none, except that json and sarif are documents.

    `texts` maps a diagnostic's file to what is written there, for the excerpts of `human`.
    `color` is for `human` alone.
    """
    match style:
        case "human":
            return human(diagnostics, texts, color)
        case "concise":
            return concise(diagnostics)
        case "json":
            return json_document(diagnostics)
        case "github":
            return github(diagnostics)
        case "sarif":
            return sarif(diagnostics)
