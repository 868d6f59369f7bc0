"""Mutants of sources: what is picked, what a site becomes, and that the tests which run it judge it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import source_mutants as mutants
from bench import suite_costs

SOURCE = '''
LIMIT = 4

def least(xs: "list[int]", more=2):
    """A docstring."""
    if not xs and LIMIT:
        raise ValueError("none")
    xs.sort()
    return xs[0] + more
'''
TESTS = """
import subprocess, sys
from commplan.small import least

def test_the_least():
    assert least([3, 1]) == 3

def test_in_a_process():
    code = "from commplan.small import least; assert least([1]) == 3"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_another():
    pass
"""


def test_every_kind_of_mutation_is_made_in_functions_alone():
    made = {(site.expression, site.mutant) for site in mutants.sites_of("commplan/small.py", SOURCE)}
    assert made == {
        ("not xs and LIMIT", "not (not xs and LIMIT)"),
        ("not xs and LIMIT", "not xs or LIMIT"),
        ("'none'", "'none~'"),
        ("xs.sort()", "None"),
        ("xs[0] + more", "xs[0] - more"),
        ("xs[0] + more", "None"),
        ("0", "1"),
    }


def test_a_site_is_found_by_its_function_and_its_text():
    site = next(site for site in mutants.sites_of("s.py", SOURCE) if site.kind == "drop statement")
    later = "# one more line\n" + SOURCE
    assert mutants.replaced(later, [(site, "None")]) == later.replace("xs.sort()", "(None)")
    other = later.replace("least", "most")
    assert mutants.replaced(other, [(site, "None")]) == other


@pytest.fixture(name="checkout")
def _checkout(tmp_path: Path) -> Path:
    checkout = tmp_path / "checkout"
    files = {
        "commplan/__init__.py": "",
        "commplan/small.py": SOURCE,
        "bench/x.py": "",
        "test_small.py": TESTS,
    }
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=checkout, check=True)
    return checkout


def test_the_tests_that_run_a_line_judge_its_mutant(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sites, runs, work = (str(tmp_path / name) for name in ("sites.json", "runs.json", "work"))
    every = mutants.sites_of("commplan/small.py", SOURCE)
    chosen = [site for site in every if site.mutant in ("'none~'", "xs[0] - more")]
    chosen.append(chosen[0]._replace(function="most"))
    (tmp_path / "sites.json").write_text(json.dumps([site._asdict() for site in chosen]))
    common = ["--checkout", str(checkout), "--work", work]
    assert mutants.main(["trace", sites, runs, *common, "--workers", "0"]) == 0
    found = json.loads((tmp_path / "runs.json").read_text())["tests"]
    tests = [sorted(cost[0] for cost in found[str(number)]) for number in range(3)]
    assert tests == [[], ["test_small.py::test_in_a_process", "test_small.py::test_the_least"], []]
    capsys.readouterr()
    assert mutants.main(["judge", sites, runs, *common]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 gone, 1 killed, 1 never run"
    assert any("by test_small.py::test_" in line for line in lines)


def test_costs_are_summed_by_file(tmp_path: Path):
    costs = [suite_costs.Cost("a.py::one", True, 1.5, 2.0), suite_costs.Cost("a.py::two", False, 0.5, 1.0)]
    path = tmp_path / "costs.jsonl"
    path.write_text("".join(json.dumps(cost._asdict()) + "\n" for cost in costs))
    assert suite_costs.read(path) == costs
    assert [line.split() for line in suite_costs.table(costs, by_test=False).splitlines()] == [
        ["2.00", "3.00", "2", "a.py"],
        ["2.00", "3.00", "2", "all"],
    ]
