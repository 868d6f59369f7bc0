"""Pages of the site for files outside of `docs` that pages link to: `source/PATH.md`.

A Markdown file is shown as it is, any other as a block of code. Links are written as they work in the
checkout; here they are pointed at the pages.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:)([\w./-]+)(?=[)#])")
LANGUAGES = {".py": "python", ".plan": "plan", ".toml": "toml", ".json": "json"}
ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md")
ERROR_PAGES = "commplan/pages/"


def pages(files: Files, generated: Mapping[str, str]) -> dict[str, str]:
    """The pages of all files that a page of the site, or one of these pages, links to."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    texts_of: dict[str, str] = {}
    waiting = list(ALWAYS)
    for name, text in (texts | dict(generated)).items():
        waiting.extend(_outside(text, name))
    while waiting:
        path = waiting.pop()
        name = _page(path)
        if name in texts_of or name in generated or not (ROOT / path).is_file():
            continue
        texts_of[name] = _text(path)
        waiting.extend(_outside(texts_of[name], name))
    return texts_of


def linked(markdown: str, name: str) -> str:
    """The text of page `name` with the links that leave `docs` pointed at pages of the site.

    A link to a file that is not there stays as it is, and MkDocs refuses it.
    """
    return LINK.sub(lambda link: _target(link[1], name), markdown)


def _target(link: str, name: str) -> str:
    path = _resolved(link, name)
    if path.startswith("docs/"):
        page = path.removeprefix("docs/")
    elif (ROOT / path).is_file():
        page = _page(path)
    else:
        return link
    return posixpath.relpath(page, posixpath.dirname(name) or ".")


def _outside(text: str, name: str) -> Iterator[str]:
    """Paths, from the root of the checkout, of the files outside of `docs` that a page links to."""
    for link in LINK.findall(text):
        path = _resolved(link, name)
        if not path.startswith("docs/"):
            yield path


def _resolved(link: str, name: str) -> str:
    """Where `link` of page `name` leads, from the root of the checkout."""
    folder = posixpath.dirname(_origin(name))
    return posixpath.normpath(posixpath.join(folder, link))


def _origin(name: str) -> str:
    """The file of the checkout that page `name` shows."""
    if name.startswith("source/"):
        path = name.removeprefix("source/")
        return path if (ROOT / path).is_file() else path.removesuffix(".md")
    return f"docs/{name}"


def _page(path: str) -> str:
    if path.startswith(ERROR_PAGES):
        return f"errors/{posixpath.basename(path)}"
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _text(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    head = "---\nhide: [navigation, toc]\n---\n\n"  # room for lines of code
    return f"{head}# {posixpath.basename(path)}\n\n`{path}`\n\n```{language}\n{text.rstrip()}\n```\n"
