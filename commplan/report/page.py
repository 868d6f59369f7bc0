"""Create one HTML file from the document and the files in `assets`."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files

import msgspec

from commplan.report.document import ReportDocument

ASSETS = files("commplan.report") / "assets"  # the folder of scripts, styles and the page's frame
SCRIPTS = (  # in the order of their dependencies
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
STYLES = ("page.css", "panels.css", "components.css")  # style sheets; later rules override earlier ones
# JSON escapes for characters that could end the script element, or that JavaScript treats as line breaks.
ESCAPES = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "<>&\u2028\u2029"})


def page(document: ReportDocument) -> str:
    """Render `document` as the text of an HTML file.

    The page loads no other resource, and its content security policy permits only the included scripts.
    """
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
    """The content security policy, which identifies scripts by the hash of their text."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; script-src {allowed}"


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
