"""The manual is true: its plans check, its program runs, its links and drawings hold."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import types
from pathlib import Path

import pytest
from support import interpreter, mpirun

import commplan

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MADE = ("errors/index.md",)  # when the site is built


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


def fences(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def test_there_is_a_manual():
    names = {page.stem for page in PAGES}
    assert {"language", "embedding", "schedule", "architecture"} <= names
    assert len(fences(DOCS / "language.md", "plan")) >= 2
    assert len(fences(DOCS / "embedding.md", "python")) >= 1


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_plans_of_the_manual_check(page: Path):
    for text in fences(page, "plan"):
        assert commplan.loads(text).name


@pytest.mark.parametrize("page", [p for p in PAGES if fences(p, "python")], ids=name_of)
def test_programs_of_the_manual_run(page: Path):
    if page.stem.startswith("mpi"):
        mpirun.needs_mpi()
    if page.parent.name == "tutorial" and importlib.util.find_spec(page.stem) is None:
        assert os.environ.get("COMMPLAN_SITE") != "1"
        pytest.skip(f"{page.stem} is not installed: make docs-test runs this")
    script = "\n".join(fences(page, "python"))
    environment = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    # The process is forked from one that has imported JAX, and gets the number of devices beforehand.
    devices = re.search(r'^os\.environ\["JAX_NUM_CPU_DEVICES"\] = "(\d+)"', script, re.M)
    if devices:
        assert devices.end() < script.index("import jax"), "JAX reads its variables when it is imported"
        environment["JAX_NUM_CPU_DEVICES"] = devices[1]
    done = subprocess.run(
        [*interpreter.words(environment), "-c", script],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_processes_of_a_cluster_have_all_their_gpus(monkeypatch: pytest.MonkeyPatch):
    """JAX shows a process that Slurm started one GPU, unless its devices are specified."""
    starts = [t for t in fences(DOCS / "recipes" / "cluster.md", "text") if "distributed.initialize" in t]
    names = {"COORDINATOR": "a:1", "PROCESSES": "4", "JOB_COMPLETION_INDEX": "0", "SLURM_GPUS_ON_NODE": "8"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    calls: list[object] = []
    distributed = types.SimpleNamespace(initialize=lambda *_, **ids: calls.append(ids["local_device_ids"]))
    jax = types.SimpleNamespace(
        distributed=distributed,
        local_device_count=lambda: 8, device_count=lambda: 32, process_index=lambda: 0,
    )  # fmt: skip
    for start in starts:
        exec(start, {"jax": jax, "os": os})
    assert calls == [list(range(8))] * 2


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    missing = [name_of(page) for page in PAGES if f" {name_of(page)}.md\n" not in navigation]
    assert not missing, "add them to `nav` of mkdocs.yml, or `make docs` fails"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_named_files_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (page.parent / link).exists() or link.removeprefix("../") in MADE, link
    for name in re.findall(r"`((?:tests|commplan|lowering|runtime|dsl|bench)/[\w./]+)`", text):
        assert (DOCS.parent / name).exists(), name


@pytest.mark.parametrize("page", [p for p in PAGES if fences(p, "bash")], ids=name_of)
def test_scripts_of_the_manual_are_bash(page: Path):
    bash = shutil.which("bash")
    assert bash is not None
    for script in fences(page, "bash"):
        done = subprocess.run([bash, "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [p for p in PAGES if fences(p, "yaml")], ids=name_of)
def test_manifests_of_the_manual_are_yaml(page: Path):
    yaml = pytest.importorskip("yaml")
    for text in fences(page, "yaml"):
        assert all(part["kind"] for part in yaml.safe_load_all(text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_drawings_are_balanced(page: Path):
    drawings = fences(page, "mermaid")
    for drawing in drawings:
        assert drawing.startswith("flowchart ")
        assert drawing.count("subgraph ") == len(re.findall(r"^ +end$", drawing, re.M))
        for line in drawing.splitlines():
            assert line.count('"') % 2 == 0, line


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add the folder of the modules that build pages of the site to the path."""
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    return DOCS / "tools"


def test_a_bar_in_code_is_no_end_of_a_cell(tools: Path):
    tables = importlib.import_module("tables")
    assert tables.cell("`--format human|json` or a | b") == "`--format human|json` or a \\| b"
    command = tables.made("<!-- table: command -->\n")
    assert "`--format human|json`" in command
    usage = command.partition("```text\n")[2].partition("```")[0]
    assert usage.startswith("commplan check [-h]")
    assert max(map(len, usage.splitlines())) <= 90 < len(usage)


def test_every_table_of_the_reference_is_made(tools: Path):
    tables = importlib.import_module("tables")
    for name in tables.TABLES:
        assert tables.made(f"<!-- table: {name} -->\n").startswith(("|", "##")), name


def test_code_of_error_pages_stays_one_block(tools: Path):
    """This includes code with a Markdown apostrophe: `prefetch` in a comment."""
    error_pages = importlib.import_module("error_pages")
    for name, text in error_pages.pages().items():
        blocks = re.findall(r"^```\w+\n(.*?)^```$", text, re.M | re.S)
        assert not any("```" in block for block in blocks), name
