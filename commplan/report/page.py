"""One HTML file from the document and the files of `assets`."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files

import msgspec

from commplan.report.document import Document

ASSETS = files("commplan.report") / "assets"
SCRIPTS = (
    "dom.js",
    "selection.js",
    "layers.js",
    "graph.js",
    "timeline.js",
    "machine.js",
    "parts.js",
    "panels.js",
    "run.js",
    "reasons.js",
    "main.js",
)
STYLES = ("page.css", "panels.css", "components.css")
# Where a script or a tag could begin inside the JSON; JSON reads the escapes as the characters.
ESCAPES = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "<>&\u2028\u2029"})


def page(document: Document) -> str:
    """The page that shows `document`: no other file or host is asked for anything, and no script but its own
    runs (the policy at its head lists them by digest)."""
    scripts = [f"\n{_asset(name)}" for name in SCRIPTS]
    slots = {
        "title": html.escape(f"{document.plan}: commplan report"),
        "policy": html.escape(_policy(scripts)),
        "styles": "\n".join(_asset(name) for name in STYLES),
        "document": msgspec.json.encode(document).decode().translate(ESCAPES),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], _asset("page.html"))


def _policy(scripts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; script-src {allowed}"


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
