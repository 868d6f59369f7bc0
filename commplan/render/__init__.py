"""Format diagnostics as text, in five styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from commplan.diagnostics import Diagnostic

Style = Literal["human", "concise", "json", "github", "sarif"]


def render(
    diagnostics: Sequence[Diagnostic], texts: Mapping[str, str], style: Style = "human", color: bool = False
) -> str:
    """Format `diagnostics` in their order.

    Args:
        diagnostics: The diagnostics.
        texts: The content of the files, by name, for the excerpts of style `human`.
        style: The style.
        color: Whether to use terminal colors; only for style `human`.

    Returns:
        The text. It is empty without diagnostics, except for `json` and `sarif`, which are documents.
    """
    if style == "human":
        if not diagnostics:  # the usual case of `commplan check` needs no imports
            return ""
        from commplan.render.human import human

        return human(diagnostics, texts, color)
    from commplan.render import machine

    return machine.STYLES[style](diagnostics)
