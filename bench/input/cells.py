"""One cell of the table: all systems for a number of members, cores and a consumer, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.input.members import DESIGNS
from bench.input.team import Block, StalledError, Team
from bench.input.turns import commands, in_turns, run_id

OURS = (*DESIGNS, "one_process")
SYSTEMS = (*OURS, "plain", "grain")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
LIMITS = ("decoding", "decoding_apart", "consuming")


@dataclass(frozen=True)
class Asked:
    """A cell to measure. cores: the numbers of those that all processes may use. environment: theirs."""

    members: int
    cores: tuple[int, ...]
    consumer: str
    rounds: int
    systems: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: QUIET)


class Figure(msgspec.Struct, frozen=True):
    """One system in one cell; one entry per round.

    Attributes:
        cpu_s: per record and member.
        rate: records per second and member.
        made: bytes that its processes made per record of the epoch (a record that each of twelve members
            makes counts twelve times); None if unknown.
        missing, again: records that members did not receive, or received twice, over all rounds.
        memory, private: bytes in addition to those of as many processes without an input, with shared pages
        counted once and not at all.
        failed: the reason if there are no more rounds.
    """

    system: str
    cpu_s: list[float] = []
    rate: list[float] = []
    made: float | None = None
    missing: int = 0
    again: int = 0
    memory: int | None = None
    private: int | None = None
    failed: str = ""

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_s)

    @property
    def wall(self) -> float:
        return statistics.median(self.rate)


class Cell(msgspec.Struct, frozen=True):
    """decode_s: CPU seconds of one decode; consume_s: of the consumer, per record and member; one per
    round. apart_s: of one decode, where as many processes as there are members decode at once.
    """

    members: int
    cores: int
    consumer: str
    decode_s: list[float]
    consume_s: list[float]
    figures: list[Figure]
    apart_s: list[float] = []

    @property
    def limit(self) -> float:
        """The lower bound of CPU seconds per record and member."""
        return statistics.median(self.decode_s) / self.members + statistics.median(self.consume_s)

    @property
    def apart(self) -> float | None:
        """The same with decodes in all processes at once, which take cores and caches from each other."""
        if not self.apart_s:
            return None
        return statistics.median(self.apart_s) / self.members + statistics.median(self.consume_s)

    def of(self, system: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.system == system and figure.cpu_s), None)


def measure(asked: Asked, records: Path, folder: Path, peer_python: str, timeout: float) -> Cell:
    """Start everything, then take turns; each round begins with another system."""
    where = folder / f"{asked.consumer}-{asked.members}-{len(asked.cores)}"
    teams: dict[str, Team] = {}
    failed: dict[str, str] = {}
    blocks: dict[str, list[Block]] = {}
    memory: dict[str, tuple[int, int]] = {}
    try:
        for name in (*LIMITS, *asked.systems):
            try:
                teams[name] = team(name, asked, records, where / name, peer_python, timeout)
            except StalledError as error:
                failed[name] = str(error)
        if missing := [name for name in LIMITS if name in failed]:
            raise SystemExit(f"{missing[0]}: {failed[missing[0]]}")
        memory_without_input = teams["consuming"].memory()
        for number, turn in enumerate(in_turns(teams, asked.rounds)):
            for name, block in turn.items():
                if isinstance(block, StalledError):
                    failed[name] = f"in round {number + 1}: {block}"
                else:
                    blocks.setdefault(name, []).append(block)
                    memory[name] = teams[name].memory()
    finally:
        for running in teams.values():
            running.close()
    alone = (memory_without_input[0] // asked.members, memory_without_input[1] // asked.members)
    figures = [
        _figure(
            name,
            blocks.get(name, []),
            memory.get(name),
            alone if name == "one_process" else memory_without_input,
            failed.get(name, ""),
        )
        for name in asked.systems
    ]
    return Cell(
        asked.members,
        len(asked.cores),
        asked.consumer,
        [block.cpu_per_record for block in blocks["decoding"]],
        [block.cpu_per_record for block in blocks["consuming"]],
        figures,
        [block.cpu_per_record for block in blocks["decoding_apart"]],
    )


def _figure(
    name: str,
    blocks: Sequence[Block],
    memory: tuple[int, int] | None,
    memory_without_input: tuple[int, int],
    failed: str,
) -> Figure:
    bytes_made = [sum(answer.get("made", 0) for answer in block.answers) for block in blocks]
    each = [block.records / sum(answer.get("members", 1) for answer in block.answers) for block in blocks]
    return Figure(
        name,
        [block.cpu_per_record for block in blocks],
        [records / block.wall_s for records, block in zip(each, blocks, strict=True)],
        sum(bytes_made) / sum(each) if any(bytes_made) else None,
        sum(answer["missing"] for block in blocks for answer in block.answers),
        sum(answer["again"] for block in blocks for answer in block.answers),
        memory[0] - memory_without_input[0] if memory else None,
        memory[1] - memory_without_input[1] if memory else None,
        failed,
    )


def team(name: str, asked: Asked, records: Path, where: Path, peer_python: str, timeout: float) -> Team:
    """The processes of a system. A process of one member has the threads that are its share of the cores."""
    threads = max(1, len(asked.cores) // asked.members)
    count = asked.members
    if name == "one_process":
        count, threads = 1, len(asked.cores)
    if name == "decoding":  # as loaded as the machine is when all of its cores decode
        count, threads = len(asked.cores), 1
    words = ["--records", records, "--members", asked.members, "--threads", threads]
    words += ["--consumer", asked.consumer, "--run-id", run_id()]
    members = commands(
        "bench.input.members", name, count, *words, python=peer_python if name == "grain" else ""
    )
    return Team([], members, cores=asked.cores, folder=where, timeout=timeout, environment=asked.environment)
