"""The page in a real Chromium: it opens without an error, is clicked through, and nothing on it overlaps."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.chromium import Browser, browser
from support.records import data_parallel
from support.reports import COMPLETE, ROOT, SMALL, evil, leaves, many_leaves, report, trace

from commplan import dsl
from commplan.report.graph import graphs
from commplan.report.page import SCRIPTS

LINE = ".code-line.active .code-number"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as tab:
        yield tab


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the ensemble, with a recorded run that began late and took longer."""
    folder = tmp_path_factory.mktemp("report")
    run = folder / "run.json"
    late = COMPLETE | {"ts": 1e6 + 100, "args": {"line": 26}, "dur": 400.0}
    run.write_text(trace(COMPLETE | {"dur": 100.0, "args": {}}, late))
    return report(folder, "ensemble_training", "--trace", run, shapes={"params": SMALL, "grads": SMALL})


@pytest.fixture
def opened(tab: Browser, page: Path) -> Generator[Browser]:
    tab.open(page)
    yield tab
    assert tab.errors == []
    assert tab.requests == [page.as_uri()]


def active(tab: Browser) -> dict[str, Any]:
    """The marked items: lines of the text, boxes of the graph, events, by number."""
    return tab.run(
        "({line: [...document.querySelectorAll('.code-line.active')].map((e) => Number(e.dataset.line)),"
        " nodes: document.querySelectorAll('.node.active:not(.kind-value)').length,"
        " bars: document.querySelectorAll('.bar.active').length})"
    )


def test_a_line_marks_its_stage_and_its_events_and_back(opened: Browser) -> None:
    opened.click(".code-line[data-line='26']")
    opened.point("h1")
    marked = active(opened)
    assert marked["line"] == [26] and marked["nodes"] >= 1 and marked["bars"] >= 4
    opened.press("Escape")
    assert active(opened) == {"line": [], "nodes": 0, "bars": 0}
    opened.point(".node.kind-host[aria-label^='map decode']")
    assert active(opened)["line"] == [22]
    opened.point(".bar.kind-network")
    assert active(opened)["line"] == [26]
    tip = opened.run("document.querySelector('.tooltip').innerText")
    for text in ("all_reduce via native", "plan line", "26", "busiest gpu link", "takes"):
        assert text in tip


def test_the_keyboard_does_what_the_pointer_does(opened: Browser) -> None:
    opened.run("document.querySelector('.code-line[data-line=\"22\"]').focus()")
    assert active(opened)["line"] == [22]
    opened.press("Enter")
    opened.press("Tab")
    opened.run("document.querySelector('.timeline-stage').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        opened.press(key)
    announced = opened.run("document.querySelector('.timeline-frame [aria-live]').textContent")
    assert announced.startswith("all_reduce via native, plan line 26") and "lane network:gpu" in announced
    ticks = "[...document.querySelectorAll('.tick-text')].map((e) => e.textContent)"
    whole = opened.run(ticks)
    opened.press("+")
    opened.press("+")
    close = opened.run(ticks)
    assert close != whole
    opened.press("ArrowRight", shift=True)
    assert opened.run(ticks) != close
    opened.press("0")
    assert opened.run(ticks) == whole
    opened.press("Enter")
    assert active(opened)["line"] == [26]


def test_buttons_zoom_and_phases_change(opened: Browser) -> None:
    bars = "document.querySelectorAll('.bar').length"
    before = opened.run(bars)
    for name in ("zoom in", "zoom in", "zoom in", "later"):
        opened.click(f"button[aria-label='{name}']")
    assert opened.run(bars) < before
    opened.click("button[aria-label='show all']")
    assert opened.run(bars) == before
    opened.click("#time .tabs label:first-of-type")
    opened.point(".bar.kind-network")
    assert active(opened)["line"] == [16]
    links = "document.querySelector('.machine').outerHTML"
    step = opened.run(links)
    opened.click("#links .tabs label:first-of-type")
    assert opened.run(links) != step
    opened.point(".link-pair[tabindex] .link-target")
    assert "busy" in opened.run("document.querySelector('.tooltip').innerText")


def test_a_run_is_aligned_with_the_prediction(opened: Browser) -> None:
    assert "run: process 7" in opened.run("document.querySelector('.timeline').textContent")
    opened.click(".align button:last-of-type")
    assert "select a line first" in opened.run("document.querySelector('.align').innerText")
    opened.click(".code-line[data-line='26']")
    opened.click(".align button:last-of-type")
    assert "is moved by" in opened.run("document.querySelector('.align').innerText")
    opened.click(".align button:first-of-type")


@pytest.mark.parametrize("topology", ["h100_64", None])
def test_a_recorded_run_is_clicked_through(tab: Browser, tmp_path: Path, topology: str | None) -> None:
    folder = data_parallel(tmp_path)
    shapes = {"params": SMALL, "grads": SMALL}
    tab.open(report(tmp_path, "data_parallel", "--records", folder, shapes=shapes, topology=topology))
    assert "rank 7" in tab.run("document.querySelector('.timeline').textContent")
    assert tab.run("document.querySelectorAll('.bar .waited').length") >= 14
    tab.point(".bar:has(.waited)")
    tip = tab.run("document.querySelector('.tooltip').innerText")
    assert "waited for rank 3" in tip and ("predicted" in tip) == (topology is not None)
    row = "document.querySelector('[aria-label=\"collectives of the run\"] tbody tr').innerText"
    assert "all_gather via native" in tab.run(row) and "rank 3: 6" in tab.run(row)
    assert tab.run("document.querySelectorAll('.against').length") == (2 if topology else 0)
    assert "measured: step" in tab.run("document.querySelector('#summary').textContent")
    tab.click("[aria-label='collectives of the run'] .line-button")
    assert active(tab)["bars"] >= 16
    for width in (390, 1280):
        tab.size(width, 900)
        assert tab.run("document.documentElement.scrollWidth") == width
    assert tab.errors == []


def test_the_theme_follows_the_system_and_its_button(opened: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert opened.run(ground) == "rgb(255, 255, 255)"
    opened.media(dark=True)
    dark = opened.run(ground)
    assert dark != "rgb(255, 255, 255)"
    opened.click("#theme")
    assert opened.run(ground) == "rgb(255, 255, 255)"
    opened.media()
    opened.click("#theme")
    assert opened.run(ground) == dark
    opened.click("#theme")
    assert opened.run("document.querySelector('#theme').textContent") == "Theme: system"


@pytest.mark.parametrize("width", [700, 1400])
def test_the_page_never_scrolls_sideways(opened: Browser, width: int) -> None:
    opened.size(width, 900)
    assert opened.run("document.documentElement.scrollWidth") == width
    opened.media(kind="print")
    assert opened.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    opened.media()


def test_whatever_can_be_focused_has_a_name(opened: Browser) -> None:
    nameless = opened.run(
        "[...document.querySelectorAll('a, button, summary, input, [tabindex]')].filter((e) =>"
        " !(e.getAttribute('aria-label') || e.textContent || e.closest('label')?.textContent || '').trim())"
        ".map((e) => e.outerHTML)"
    )
    assert nameless == []
    small = opened.run(
        "[...document.querySelectorAll('main *')].filter((e) => e.firstChild && e.firstChild.nodeType === 3"
        " && parseFloat(getComputedStyle(e).fontSize) < 12).map((e) => e.outerHTML)"
    )
    assert small == []


def test_what_a_plan_says_is_text(tab: Browser, tmp_path: Path) -> None:
    tab.open(evil(tmp_path))
    assert tab.errors == []
    assert tab.run("document.scripts.length") == len(SCRIPTS) + 1  # the document is one, too
    assert tab.run("document.querySelectorAll('main script, main img').length") == 0
    assert "</script><script>alert(1)" in tab.run("document.querySelector('#source').textContent")


def test_many_leaves_open_soon(tab: Browser, tmp_path: Path) -> None:
    page = report(tmp_path, many_leaves(tmp_path, "16 KiB"), shapes={"grads": leaves(2000)})
    assert min(tab.open(page) for _ in range(3)) < 2
    assert tab.errors == []
    tab.click("button[aria-label='zoom in']")
    tab.click("button[aria-label='later']")
    assert tab.errors == []


def test_without_a_machine_the_page_says_what_is_missing(tab: Browser, tmp_path: Path) -> None:
    tab.open(report(tmp_path, "two_level", shapes={"grads": SMALL}, topology=None))
    assert "--topology" in tab.run("document.querySelector('#time').textContent")
    assert tab.errors == []


# The geometry of a graph: boxes that overlap, texts that leave their box, edges that run through a box.
GEOMETRY = """(graphs) => graphs.flatMap((graph) => {
  const { element } = commplan.graph(graph);
  document.body.append(element);
  const wrong = [];
  const boxes = [...element.querySelectorAll('.node')].map((node) => {
    const { x, y, width, height } = node.querySelector('rect').getBBox();
    return { node, name: node.getAttribute('aria-label'), x0: x, y0: y, x1: x + width, y1: y + height };
  });
  const meet = (a, b) => a.x0 < b.x1 && b.x0 < a.x1 && a.y0 < b.y1 && b.y0 < a.y1;
  boxes.forEach((a, i) => {
    for (const b of boxes.slice(i + 1)) if (meet(a, b)) wrong.push(`${a.name} over ${b.name}`);
    for (const text of a.node.querySelectorAll('text')) {
      const { x, y, width, height } = text.getBBox();
      const inside = x >= a.x0 && x + width <= a.x1 && y >= a.y0 && y + height <= a.y1;
      if (!inside) wrong.push(`${text.textContent} leaves ${a.name}`);
    }
  });
  for (const edge of element.querySelectorAll('.edge')) {
    for (let at = 0; at <= edge.getTotalLength(); at += 4) {
      const { x, y } = edge.getPointAtLength(at).matrixTransform(edge.transform.baseVal.consolidate().matrix);
      const point = { x0: x - 1, x1: x + 1, y0: y - 1, y1: y + 1 };
      const inner = ({ x0, x1, y0, y1 }) => ({ x0: x0 + 2, x1: x1 - 2, y0: y0 + 2, y1: y1 - 2 });
      for (const box of boxes) if (meet(inner(box), point)) wrong.push(`an edge through ${box.name}`);
    }
  }
  element.remove();
  return wrong;
})"""
PLANS = [*(ROOT / "examples" / "plans").glob("*.plan"), *(ROOT / "tests" / "plans").glob("*.plan")]


def test_graphs_keep_their_boxes_apart(tab: Browser, page: Path) -> None:
    tab.open(page)
    for path in sorted(PLANS):
        plan, _ = dsl.load(path.read_text(encoding="utf-8"), path.name)
        assert plan is not None
        drawn = msgspec.json.encode(graphs(plan)).decode()
        assert tab.run(f"({GEOMETRY})({drawn})") == [], path.name


def test_the_geometry_can_be_wrong(tab: Browser, page: Path) -> None:
    tab.open(page)
    shifted = GEOMETRY.replace("x1: x + width,", "x1: x + width + 400,")
    plan, _ = dsl.load(
        (ROOT / "examples" / "plans" / "ensemble_training.plan").read_text(encoding="utf-8"), "p"
    )
    assert plan is not None
    assert tab.run(f"({shifted})({json.dumps(msgspec.to_builtins(graphs(plan)))})")
