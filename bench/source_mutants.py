"""Mutants of commplan's own sources: how many mistakes in a line do the tests that run this line detect?

    python -m bench.source_mutants pick sites.json --count 60 --seed 1
    python -m bench.source_mutants trace sites.json runs.json --work DIR      # one run of the whole suite
    python -m bench.source_mutants judge sites.json runs.json --work DIR      # one line per mutant

`pick` draws expressions in functions of the product, in turn over all packages, and one mutation for each: a
negated condition, another operator, a number off by one, another constant, a dropped call or result. `trace`
copies the checkout, has each of these expressions report the running test, from any process that the test
starts, and runs the suite. `judge` applies one mutant at a time to a fresh copy and runs the tests that
evaluate its expression, cheapest first, until one fails. A test that fails without the mutant does not count.

A site is found again by its function and its text. So sites that were picked in one commit are judged by the
tests of another, as long as the expression is still there: two tables compare the power of two suites.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.suite_costs import Cost
from bench.suite_costs import read as read_costs

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("commplan", "dsl", "lowering", "runtime")
OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift,
}  # fmt: skip
PROBE = """import os
_SEEN = set()
def hit(site):
    pair = (site, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
    if pair not in _SEEN:
        _SEEN.add(pair)
        with open(f"{FOLDER}/{os.getpid()}", "a", encoding="utf-8") as file:
            file.write(f"{pair[0]} {pair[1]}\\n")
"""


class Site(NamedTuple):
    """An expression of the product and the one that a mutant has instead."""

    file: str
    function: str  # with the classes and functions around it
    line: int
    expression: str
    occurrence: int  # among equal expressions of the function
    mutant: str
    kind: str


class Runs(NamedTuple):
    """A traced run of the suite."""

    tests: dict[int, list[Cost]]  # those that passed and evaluate the site, cheapest first
    missing: list[int]  # sites that are not in the checkout
    failed: list[str]


class Verdict(NamedTuple):
    site: int
    result: str
    run: int  # tests, of so many that evaluate the site
    of: int
    killer: str


def product_files(checkout: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *PRODUCT], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name for name in listed if name.endswith(".py") and "/templates/" not in name]


def expressions(tree: ast.Module) -> Iterator[tuple[str, ast.expr, ast.AST]]:
    """Yield (function, expression, parent) of all that functions evaluate each time that they run."""

    def visit(node: ast.AST, name: str, inside: bool) -> Iterator[tuple[str, ast.expr, ast.AST]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
            inside = not isinstance(node, ast.ClassDef)
            for child in node.body:
                yield from visit(child, name, inside)
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "pattern", "args") and not isinstance(node, ast.Call):
                continue
            for child in value if isinstance(value, list) else [value]:  # pyright: ignore[reportUnknownVariableType]
                if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                    continue
                if isinstance(child, ast.expr) and inside and hasattr(child, "lineno"):
                    yield name, child, node
                yield from visit(child, name, inside)

    yield from visit(tree, "", False)


def mutations(node: ast.expr, parent: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (kind, new expression) for `node`."""
    text = ast.unparse(node)
    if isinstance(parent, ast.If | ast.While | ast.IfExp) and node is parent.test:
        yield "negate condition", f"not ({text})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = OTHER_COMPARISON[type(node.ops[0])]()
        yield "other comparison", ast.unparse(ast.Compare(node.left, [other], node.comparators))
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER_OPERATOR and "'" not in text:
        yield "other operator", ast.unparse(ast.BinOp(node.left, OTHER_OPERATOR[type(node.op)](), node.right))
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", ast.unparse(ast.BoolOp(other, node.values))
    if isinstance(node, ast.Constant) and not isinstance(parent, ast.Expr):
        if isinstance(node.value, bool):
            yield "other constant", str(not node.value)
        elif isinstance(node.value, int | float):
            yield "off by one", repr(node.value + 1)
        elif isinstance(node.value, str):
            yield "other constant", repr(node.value + "~")
    if isinstance(parent, ast.Expr) and isinstance(node, ast.Call):
        yield "drop statement", "None"
    if isinstance(parent, ast.Return) and not (isinstance(node, ast.Constant) and node.value is None):
        yield "drop result", "None"


def sites_of(name: str, source: str) -> list[Site]:
    sites: list[Site] = []
    count: dict[tuple[str, str], int] = defaultdict(int)
    for function, node, parent in expressions(ast.parse(source)):
        text = ast.unparse(node)
        occurrence = count[function, text]
        count[function, text] += 1
        for kind, mutant in mutations(node, parent):
            sites.append(Site(name, function, node.lineno, text, occurrence, mutant, kind))
    return sites


def pick(checkout: Path, count: int, seed: int) -> list[Site]:
    """Draw sites, from each package in turn: a file, a kind of mutation, an expression; one a function."""
    rng = random.Random(seed)
    files: dict[str, list[list[Site]]] = defaultdict(list)
    for name in product_files(checkout):
        if sites := sites_of(name, (checkout / name).read_text(encoding="utf-8")):
            files["/".join(name.split("/")[:-1][:2])].append(sites)
    chosen: dict[tuple[str, str], Site] = {}
    while len(chosen) < count:
        for package in rng.sample(sorted(files), len(files)):
            kinds: dict[str, list[Site]] = defaultdict(list)
            for site in rng.choice(files[package]):
                kinds[site.kind].append(site)
            site = rng.choice(kinds[rng.choice(sorted(kinds))])
            if len(chosen) < count:
                chosen.setdefault((site.file, site.function), site)
    return sorted(chosen.values())


def replaced(source: str, changes: Sequence[tuple[Site, str]]) -> str:
    """Replace the expressions of sites; `{}` stands for the old one. Sites that are gone are passed over."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    nodes: dict[tuple[str, str], list[ast.expr]] = defaultdict(list)
    for function, node, _ in expressions(ast.parse(source)):
        nodes[function, ast.unparse(node)].append(node)
    edits: list[tuple[int, int, str]] = []
    for site, text in changes:
        for node in nodes[site.function, site.expression][site.occurrence : site.occurrence + 1]:
            assert node.end_lineno is not None and node.end_col_offset is not None
            start, end = starts[node.lineno - 1], starts[node.end_lineno - 1]
            edits.append((start + node.col_offset, end + node.end_col_offset, text))
    body = source.encode()
    for start, end, text in sorted(edits, reverse=True):
        body = body[:start] + f"({text})".encode().replace(b"{}", body[start:end]) + body[end:]
    return body.decode()


def copy_of(checkout: Path, folder: Path) -> Path:
    """Copy what git tracks, links as links."""
    listed = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True)
    if folder.exists():
        shutil.rmtree(folder)
    for name in listed.stdout.splitlines():
        target = folder / name
        if (checkout / name).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, target, follow_symlinks=False)
    return folder


def change(folder: Path, changes: Sequence[tuple[Site, str]]) -> set[Site]:
    """Replace expressions in the files of `folder`, and return the sites that were in them."""
    by_file: dict[str, list[tuple[Site, str]]] = defaultdict(list)
    for site, text in changes:
        by_file[site.file].append((site, text))
    present: set[Site] = set()
    for name, edits in by_file.items():
        if not (folder / name).exists():
            continue
        source = (folder / name).read_text(encoding="utf-8")
        present |= {site for site, text in edits if replaced(source, [(site, text)]) != source}
        (folder / name).write_text(replaced(source, edits), encoding="utf-8")
    return present


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder)}


def trace(checkout: Path, sites: Sequence[Site], work: Path, workers: int, selection: Sequence[str]) -> Runs:
    """Run the suite once, with a probe at each site."""
    folder = copy_of(checkout, work / "traced")
    hits = work / "hits"
    shutil.rmtree(hits, ignore_errors=True)
    hits.mkdir()
    (folder / "commplan" / "mutant_probe.py").write_text(f"FOLDER = {str(hits)!r}\n{PROBE}", encoding="utf-8")
    for name in ("__init__.py", "suite_costs.py"):
        if (ROOT / "bench" / name).exists():
            shutil.copy2(ROOT / "bench" / name, folder / "bench")
    probe = '__import__("commplan.mutant_probe", fromlist=["hit"]).hit({})'
    present = change(folder, [(site, f"({probe.format(n)}, {{}})[1]") for n, site in enumerate(sites)])
    costs = work / "costs.jsonl"
    costs.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "bench.suite_costs", "--costs", str(costs), "-q"]
    if workers:
        command += ["-n", str(workers), "--dist", "worksteal"]
    subprocess.run([*command, *selection], cwd=folder, env=environment(folder), check=False)
    tests: dict[int, set[str]] = defaultdict(set)
    for path in hits.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            number, _, test = line.partition(" ")
            tests[int(number)].add(test)
    every = read_costs(costs)
    passed = {cost.test: cost for cost in every if cost.passed}
    return Runs(
        {
            n: sorted((passed[test] for test in tests[n] if test in passed), key=lambda cost: cost.wall)
            for n in range(len(sites))
        },
        [n for n, site in enumerate(sites) if site not in present],
        [cost.test for cost in every if not cost.passed],
    )


def judge(checkout: Path, sites: Sequence[Site], runs: Runs, work: Path, seconds: float) -> Iterator[Verdict]:
    """Yield the verdict on each mutant, by tests that together cost at most `seconds` of processor time."""
    clean, folder = copy_of(checkout, work / "clean"), copy_of(checkout, work / "mutant")
    for number, site in enumerate(sites):
        if number in runs.missing:
            yield Verdict(number, "gone", 0, 0, "")
            continue
        tests: list[str] = []
        spent = 0.0
        for cost in runs.tests[number]:
            spent += cost.cpu
            if not tests or spent <= seconds:
                tests.append(cost.test)
        original = (folder / site.file).read_text(encoding="utf-8")
        (folder / site.file).write_text(replaced(original, [(site, site.mutant)]), encoding="utf-8")
        killer, position = "", 0
        while position < len(tests):
            failure = first_failure(folder, tests[position:])
            if failure is None or failure not in tests or first_failure(clean, [failure]) is None:
                killer = failure or ""
                break
            position = tests.index(failure) + 1  # it fails without a mutant, too
        (folder / site.file).write_text(original, encoding="utf-8")
        result = "killed" if killer else "survived" if tests else "never run"
        yield Verdict(number, result, len(tests), len(runs.tests[number]), killer)


def first_failure(folder: Path, tests: Sequence[str]) -> str | None:
    """Run tests in this order; return the first that fails, or what ended pytest itself."""
    listed = folder / "tests-to-run.txt"
    listed.write_text("\n".join(tests), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--timeout=120",
        "-p",
        "no:cacheprovider",
        f"@{listed}",
    ]
    with subprocess.Popen(
        command, cwd=folder, env=environment(folder), text=True, process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=1200)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "no end after 1200 s"
    if process.returncode == 0:
        return None
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].partition(" - ")[0]
    return f"pytest ended with {process.returncode}: {output[-200:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    checkout: Path = options.checkout.absolute()
    if options.verb == "pick":
        sites = pick(checkout, options.count, options.seed)
        options.sites.write_text(json.dumps([site._asdict() for site in sites], indent=1), encoding="utf-8")
        return 0
    sites = [Site(**site) for site in json.loads(options.sites.read_text(encoding="utf-8"))]
    work: Path = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if options.verb == "trace":
        runs = trace(checkout, sites, work, options.workers, options.tests)
        options.runs.write_text(json.dumps(runs._asdict()), encoding="utf-8")
        return 0
    kept = json.loads(options.runs.read_text(encoding="utf-8"))
    tests = {int(number): [Cost(*cost) for cost in costs] for number, costs in kept["tests"].items()}
    runs = Runs(tests, kept["missing"], kept["failed"])
    results: Counter[str] = Counter()
    for verdict in judge(checkout, sites, runs, work, options.seconds):
        site = sites[verdict.site]
        results[verdict.result] += 1
        place = f"{site.file}:{site.line} {site.function}"
        change = " ".join(f"{site.kind}: {site.expression} -> {site.mutant}".split())
        print(
            f"{verdict.site:3} {verdict.result:9} {verdict.run}/{verdict.of}  {place}  {change[:100]}",
            flush=True,
        )
        if verdict.killer:
            print(f"      by {verdict.killer[:150]}", flush=True)
    print(", ".join(f"{number} {result}" for result, number in sorted(results.items())))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Judge the tests by mutants of commplan's sources.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    picked = verbs.add_parser("pick", help="draw mutants")
    traced = verbs.add_parser(
        "trace", help="run the suite once and record which tests evaluate the expressions"
    )
    judged = verbs.add_parser("judge", help="run these tests on each mutant")
    for verb in (picked, traced, judged):
        verb.add_argument("sites", type=Path, help="the mutants, as JSON")
        verb.add_argument(
            "--checkout", type=Path, default=ROOT, help="sources and tests (default: this checkout)"
        )
    picked.add_argument("--count", type=int, default=60)
    picked.add_argument("--seed", type=int, default=1)
    for verb in (traced, judged):
        verb.add_argument("runs", type=Path, help="the tests of each mutant, as JSON")
        verb.add_argument("--work", type=Path, required=True, help="a folder for copies of the checkout")
    traced.add_argument("--workers", type=int, default=3)
    traced.add_argument("--tests", nargs="*", default=(), help="only these tests")
    judged.add_argument(
        "--seconds", type=float, default=60.0, help="processor time of the tests of one mutant"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
