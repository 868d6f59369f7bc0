"""The built manual in a real Chromium: it loads nothing from elsewhere, fits phones, has a playground.

`make docs-test` builds it and runs these; without it they are skipped.
"""

from __future__ import annotations

import functools
import http.server
import os
import re
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from support.chromium import Browser, browser

SITE = Path(__file__).resolve().parent.parent.parent / "site"
WIDTHS = (390, 1280)
PATIENCE_S = 240.0
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?(\w+:)?//[^\s\">]+[^>]*>")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that a closed page drops; report all other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def address() -> Generator[str]:
    """Of the site, served on this machine."""
    if not (SITE / "index.html").is_file():
        if os.environ.get("COMMPLAN_SITE") == "1":
            pytest.fail("COMMPLAN_SITE=1, and the site is not built")
        pytest.skip("the site is not built: make docs")
    handler = functools.partial(_Quiet, directory=str(SITE))
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def tab(address: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as tab:
        yield tab


def pages() -> Iterator[str]:
    """Addresses below the site's; of the errors, which are alike, the list and two."""
    for file in sorted(SITE.rglob("index.html")):
        name = file.parent.relative_to(SITE).as_posix()
        if not re.match(r"errors/CP(?!0301|0953)", name):
            yield "" if name == "." else f"{name}/"


def test_no_page_names_another_host_for_what_it_loads(address: str) -> None:
    for page in SITE.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        foreign = [tag[0] for tag in LOADED.finditer(text) if 'rel="canonical"' not in tag[0]]
        assert not foreign, (page, foreign)
        assert "Content-Security-Policy" in text, page
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_every_page_opens_at_the_widths_of_phones_and_desks(address: str, tab: Browser) -> None:
    names = list(pages())
    assert len(names) > 20
    for name in names:
        for width in WIDTHS:
            tab.open(f"{address}{name}", width, 900, dark=width == 390)
            assert tab.errors == [], (name, width)
            assert all(address_of.startswith((address, "data:", "blob:")) for address_of in tab.requests), (
                name
            )
            assert tab.run("document.documentElement.scrollWidth") <= width, (name, width)


RESULT = "document.querySelector('.md-search-result__link')"
ASKED = f"(document.querySelector('.md-search__input').dispatchEvent(new Event('keyup')), {RESULT}?.href)"


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("CP0834", "errors/CP0834/"),
        ("the value is already the same", "errors/CP0301/"),
        ("calibrate", "command/"),
        ("--oversubscribe", "command/"),
    ],
)
def test_the_search_finds_errors_verbs_and_flags(address: str, tab: Browser, words: str, page: str) -> None:
    tab.open(f"{address}", 1280)
    tab.click(".md-search__input")
    tab.call("Input.insertText", text=words)
    assert page in until(tab, ASKED)


def until(tab: Browser, script: str) -> str:
    """The first value of `script` that is true, polled: a busy machine takes minutes."""
    limit = time.monotonic() + PATIENCE_S
    while not (value := tab.run(script)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert value, (script, tab.errors)
    return value


STATE = "document.querySelector('.playground-state').textContent"
ANSWERED = f"document.getElementById('workbench').dataset.answered === 'true' && {STATE}"


@pytest.fixture(scope="module")
def playground(address: str, tab: Browser) -> Browser:
    tab.open(f"{address}playground/", 1280, 1000)
    assert "compiles" in until(tab, ANSWERED)
    return tab


def typed(tab: Browser, text: str) -> str:
    """The playground's output for `text`."""
    tab.click(".editor-text")
    tab.run("document.querySelector('.editor-text').select()")
    tab.call("Input.insertText", text=text)
    return until(tab, ANSWERED)


def shown(tab: Browser, view: str) -> str:
    tab.click(f"[aria-controls='view-{view}']")
    return tab.run(f"document.getElementById('view-{view}').innerText")


def test_the_playground_draws_explains_and_schedules(playground: Browser) -> None:
    assert playground.run("document.querySelectorAll('#view-graph svg .node').length") >= 8
    lines = shown(playground, "lines")
    assert "pack into f32" in lines and "equivalent to its plan" in lines
    assert re.search(r"all_gather .*\bdata\b", shown(playground, "schedule"))
    assert "h100_64" in shown(playground, "timeline")
    assert playground.run("document.querySelectorAll('#view-timeline .bar').length") > 4
    assert playground.errors == []


RECORDED = """
const made = [], Kept = Worker;
Worker = class extends Kept {
  constructor(...given) { super(...given); made.push({ended: 0}); this.entry = made.at(-1); }
  terminate() { this.entry.ended += 1; super.terminate(); }
};
window.made = made;
"""


def test_the_playground_ends_its_worker_when_it_is_left_and_starts_it_when_it_is_back(
    address: str, tmp_path: Path
) -> None:
    """Chromium 156 ended the next page's process in 5 of 35 visits left at once, so in none of 45."""
    with browser(tmp_path / "profile") as tab:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=RECORDED)
        tab.open(f"{address}playground/", 1280)
        tab.run("window.dispatchEvent(new PageTransitionEvent('pagehide', {persisted: true}))")
        assert tab.run("made.filter((each) => each.ended).length") == 1
        started = tab.run("made.length")
        tab.run("window.dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
        assert tab.run("made.length") == started + 1
        assert "compiles" in until(tab, ANSWERED)
        tab.open(f"{address}proofs/", 1280)
        assert tab.errors == []


WRONG = """plan mine

axis data = 8
input grads : tree partial data

each step {
    grads = reduce gards over data by mean
    output grads
}
"""


def test_the_playground_shows_mistakes_and_mends_them(playground: Browser) -> None:
    assert "1 to mend" in typed(playground, WRONG)
    assert "gards" in playground.run("document.querySelector('.message').innerText")
    assert playground.run("document.querySelector('.message a').href").endswith("/errors/CP0102/")
    assert playground.run("document.querySelector('.editor-numbers .wrong').textContent") == "7"
    assert playground.run("document.querySelector('.message .fix').innerText") == "Fix: write grads"
    playground.click(".message .fix")
    assert "compiles" in until(playground, ANSWERED)
    assert "reduce grads over" in playground.run("document.querySelector('.editor-text').value")
    assert "samples as they are" in shown(playground, "timeline")


def test_the_playground_lays_out_and_takes_shapes(playground: Browser) -> None:
    typed(playground, WRONG.replace("gards", "grads").replace("    grads =", "  grads  ="))
    playground.click(".playground-format")
    until(playground, ANSWERED)
    assert "    grads = reduce grads" in playground.run("document.querySelector('.editor-text').value")
    playground.click(".playground-assumed summary")
    playground.click(".playground-given")
    playground.call(
        "Input.insertText", text='{"shapes": {"grads": {"w": {"shape": [3, 5], "dtype": "f32"}}}}'
    )
    until(playground, ANSWERED)
    used = playground.run("document.querySelector('.playground-assumed pre').textContent")
    assert "grads/w : f32[3, 5]" in used
    assert playground.errors == []
