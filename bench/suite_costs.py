"""A pytest plugin: processor and wall time of every test, in all processes that the test starts.

    python -m pytest -p bench.suite_costs --costs costs.jsonl -n 3 --dist worksteal -q
    python -m bench.suite_costs costs.jsonl          # by file, most expensive first
    python -m bench.suite_costs costs.jsonl --tests  # by test

Processor time is read from /proc for the process that runs the tests and for all its descendants, living and
waited for. So it includes compilers, ranks under `mpirun` and processes of the fork servers, and it hardly
depends on how busy the machine is, unlike wall time. Work of shared fixtures counts for the first test that
uses them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """One test that ran; times in seconds."""

    test: str
    passed: bool
    cpu: float
    wall: float


def processor_time(root: int) -> float:
    """Seconds of user and system time of `root`, its descendants and the children for which they waited."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        process = int(entry.name)
        children[int(fields[1])].append(process)
        ticks[process] = sum(map(int, fields[11:15]))
    waiting, total = [root], 0
    while waiting:
        process = waiting.pop()
        total += ticks.get(process, 0)
        waiting += children[process]
    return total / TICKS


class Recorder:
    """Appends one line of JSON to a file after each test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        cpu, wall = processor_time(os.getpid()), time.perf_counter()
        result = yield
        cost = Cost(
            item.nodeid,
            item.nodeid not in self.failed,
            max(0.0, processor_time(os.getpid()) - cpu),
            time.perf_counter() - wall,
        )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cost._asdict()) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="append processor and wall time of every test to this file")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--costs")) is not None:
        config.pluginmanager.register(Recorder(Path(path).absolute()), "suite-costs")


def read(path: Path) -> list[Cost]:
    return [Cost(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def table(costs: Iterable[Cost], by_test: bool) -> str:
    groups: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        groups[cost.test if by_test else cost.test.partition("::")[0]].append(cost)
    rows = sorted(groups.items(), key=lambda group: -sum(cost.cpu for cost in group[1]))
    rows.append(("all", [cost for _, group in rows for cost in group]))
    sums = [(sum(cost.cpu for cost in group), sum(cost.wall for cost in group)) for _, group in rows]
    return "\n".join(
        f"{cpu:9.2f} {wall:9.2f} {len(group):6} {name}"
        for (name, group), (cpu, wall) in zip(rows, sums, strict=True)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print what the tests of a run cost.")
    parser.add_argument("costs", type=Path)
    parser.add_argument("--tests", action="store_true", help="one line per test instead of per file")
    options = parser.parse_args(arguments)
    print(f"{'CPU s':>9} {'wall s':>9} {'tests':>6}")
    print(table(read(options.costs), options.tests))


if __name__ == "__main__":
    main()
