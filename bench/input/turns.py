"""Shared by the benches of input: systems of processes that read epochs in turns, their figures and flags."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.harness.arguments import names, program_parser
from bench.harness.figures import write
from bench.harness.spread import quartiles, turns
from bench.input.team import Block, StalledError, Team


class Figure(msgspec.Struct, frozen=True):
    """One system.

    Attributes:
        cpu_s, wall_s: per record and member, one for each round.
        first_s: CPU of the first epoch.
        latency_s: of the first batch of an epoch, until the last member has it; one for each round.
        memory, private: bytes of all its processes, shared pages counted once, and not at all.
        wrong: records that a member lacked or had twice, or epochs of members with other contents.
        failed: the reason if there are no figures.
    """

    system: str
    cpu_s: list[float] = []
    wall_s: list[float] = []
    first_s: float = 0.0
    latency_s: list[float] = []
    memory: int = 0
    private: int = 0
    wrong: int = 0
    failed: str = ""

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_s)

    def ratios(self, base: Figure) -> tuple[float, float, float]:
        """The quartiles of the CPU as a share of that of `base`, round by round."""
        ratios = [own / other for own, other in zip(self.cpu_s, base.cpu_s, strict=True)]
        return quartiles(ratios)


def in_turns(teams: Mapping[str, Team], rounds: int) -> Iterator[dict[str, Block | StalledError]]:
    """Let each team read an epoch in each round; each round begins with another one.

    Yields the block of each team, or the error of one that stalled, which is closed and left out later.
    """
    stalled: set[str] = set()
    for order in turns(list(teams), rounds):
        blocks: dict[str, Block | StalledError] = {}
        for name in order:
            if name in stalled:
                continue
            try:
                blocks[name] = teams[name].block()
            except StalledError as error:
                blocks[name] = error
                stalled.add(name)
                teams[name].close()
        yield blocks


def bench_parser(
    program: str, summary: str | None, systems: Sequence[str], **defaults: Any
) -> argparse.ArgumentParser:
    """The flags of a bench whose members read one input. summary: the docstring of the program."""
    parser = program_parser(program, summary)
    parser.add_argument("--members", type=int, default=12)
    parser.add_argument("--records", type=int, default=1024)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--systems", type=names(systems), default=tuple(systems))
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a system to answer")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.set_defaults(**defaults)
    return parser


def checked(parser: argparse.ArgumentParser, argv: Sequence[str] | None, batch: int) -> argparse.Namespace:
    """The arguments. Ends the program if they are invalid."""
    options = parser.parse_args(argv)
    counts = [options.members, options.records, options.rounds, getattr(options, "makers", 1)]
    if min(counts) < 1 or options.records % batch:
        parser.error(f"counts are 1 or more, and --records a multiple of {batch}: every batch has one shape")
    return options


def megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.0f} MB"


def run_id() -> str:
    return f"bench-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def finished(figures: Sequence[Figure], table: str, out: Path | None) -> int:
    """Print the table and write the figures. Returns the exit code."""
    print(table)
    if out:
        write(out, list(figures))
    return int(any(figure.wrong for figure in figures))


def commands(module: str, system: str, count: int, *words: object, python: str = "") -> list[list[str]]:
    """The commands of `count` processes of a system, each with its place."""
    common = [python or sys.executable, "-m", module, system, *map(str, words)]
    return [[*common, "--place", str(place)] for place in range(count)]
