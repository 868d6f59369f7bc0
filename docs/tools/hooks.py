"""What MkDocs calls while it builds the manual: pages made from sources, libraries that the site serves."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "playground"))

import error_pages
import pictures
import playground
import repository
import tables
import vendor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

CHART = re.compile(r'<pre class="mermaid">.*?</pre>', re.DOTALL)
LONG_NAME = re.compile(r"(?<=<td><code>)[^<]{30,}(?=</code>)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made: one for each error, and one for each file that a page links."""
    errors = error_pages.pages()
    for name, text in {**errors, **repository.pages(files, errors)}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that leave `docs` at the pages made of their files, codes of errors at theirs; adds tables
    and pictures."""
    name = page.file.src_uri
    linked = error_pages.linked(repository.linked(markdown, name), name)
    return pictures.drawn(tables.made(linked))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets charts that are wider than a phone be scrolled, and long names in tables break."""
    html = CHART.sub(r'<div class="chart">\g<0></div>', html)
    return LONG_NAME.sub(lambda name: re.sub("[_,]", r"\g<0><wbr>", name[0]), html)


def on_post_build(config: MkDocsConfig) -> None:
    """Copy the libraries of the pages into the site, and remove references to other hosts."""
    site = Path(config.site_dir)
    vendor.keep_theme_here(site)
    playground.install(site)
