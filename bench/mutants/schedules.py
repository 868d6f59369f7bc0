"""The campaign of mutants of schedules, see `bench.mutants`: the drawn mutants, and their outcomes."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
import re
import signal
import sys
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic
from commplan.ir import schedule as ir
from commplan.ir.remark import Design
from commplan.ir.serialization.canonical_json import decode, encode
from commplan.ir.stages import VERBS
from commplan.verify import load_schedule, verify
from commplan.verify import structural as schedule_rules
from tests.support import schedule_bases
from tests.support.schedule_bases import Base
from tests.support.schedule_fields import joint_edit
from tests.support.schedule_judge import Judge, Verdict
from tests.support.schedule_mutation import NAMES, Edit, head_edits, op_edits, phase_edits
from tests.support.schedule_repair import Repair, repaired

_COMPARISON = Path(schedule_rules.__file__).with_name("equivalence.py")
# The codes of comparisons with the plan; any other code is an error of form.
MEANING = set(re.findall(r"CP\d{4}", _COMPARISON.read_text())) if _COMPARISON.exists() else set[str]()
REPAIRS: tuple[Repair, ...] = ("", "types", "placements")
PATIENCE = 60  # seconds that one case may take
SHOWN = 20  # failures of each kind that are printed


REQUIRED = (
    *(f"op {kind.__name__.lower()}" for kind in typing.get_args(ir.Op)),
    *(f"collective {name}" for name in typing.get_args(ir.CollectiveKind)),
    *(f"verb {name}" for name in VERBS),
    *(f"algorithm {name}" for name in (*NAMES, "hierarchical")),
    *(f"design {name}" for name in typing.get_args(Design)),
)
BESIDE = ("bindings and values of a phase", "outputs and updates", "axes, functions, entry", "several fields")


def labels(base: Base, op: ir.Op) -> list[str]:
    """The categories that `op` counts for."""
    names = [f"op {type(op).__name__.lower()}"]
    verb = base.verbs.get((op.span.line, op.span.column))
    if verb:
        names.append(f"verb {verb}")
    if isinstance(op, ir.Collective):
        names.append(f"collective {op.kind}")
        names += [
            f"algorithm {name}" for name in (op.algorithm.name, *(a.name for _, a in op.algorithm.levels))
        ]
    if isinstance(op, ir.Share):
        names.append(f"design {op.design}")
    return names


class Mutant(NamedTuple):
    """A mutated schedule: its base, its edits, and its category."""

    base: int
    edits: tuple[Edit, ...]
    repair: Repair
    hits: tuple[str, ...]
    schedule: ir.Schedule


class Record(msgspec.Struct, frozen=True):
    """The outcome of one case.

    Attributes:
        cell: `form`, `meaning`, `accepted`, or the reason for no verdict.
        level: that of the oracle.
        confirmed: whether a refusal by meaning names the difference that the oracle finds.
    """

    number: int
    cell: str
    level: str
    kind: str
    hits: tuple[str, ...] = ()
    text: str = ""
    codes: tuple[str, ...] = ()
    confirmed: bool | None = None
    limits: str = ""

    @property
    def failed(self) -> bool:
        return self.cell == "broken" or (self.cell, self.level) == ("accepted", "differs")


class Campaign:
    """Mutants of the schedules that follow from `seed`. A case is a function of the seed, the share and its
    number."""

    def __init__(self, seed: int, share: float = 1.0) -> None:
        self.seed = seed
        drawn = list(schedule_bases.bases(seed, share))
        self.bases = [base for base in drawn if isinstance(base, Base)]
        self.broken = [str(base) for base in drawn if isinstance(base, CommplanError)]
        self.places: dict[str, list[tuple[int, int, int]]] = {}
        self._judges: dict[int, Judge] = {}
        for number, base in enumerate(self.bases):
            for at, phase in enumerate(base.schedule.phases):
                for place, op in enumerate(phase.ops):
                    for label in labels(base, op):
                        self.places.setdefault(label, []).append((number, at, place))
        self.labels = [label for label in REQUIRED if label in self.places] + list(BESIDE)

    def judge(self, number: int) -> Judge:
        if number not in self._judges:
            base = self.bases[number]
            self._judges[number] = Judge(base.schedule, base.linear)
        return self._judges[number]

    def unsound(self) -> list[str]:
        """Bases that are refused, by the compiler already or as they are, or that the oracle cannot run."""
        problems = list(self.broken)
        for number, base in enumerate(self.bases):
            refused = verify(base.schedule)
            errors = self.judge(number).errors
            if refused or errors:
                problems.append(f"{base.name}: {refused[0].message if refused else errors[0]}\n{base.text}")
        return problems

    def mutant(self, number: int) -> Mutant:
        rng = random.Random(f"mutant {self.seed} {number}")
        while True:
            mutated = self._mutant(rng, self.labels[number % len(self.labels)])
            if mutated is not None and mutated.schedule != self.bases[mutated.base].schedule:
                return mutated

    def _mutant(self, rng: random.Random, label: str) -> Mutant | None:
        if label in self.places:
            places = self.places[label]
            chosen = rng.choice(sorted({base for base, _, _ in places}))
            _, phase, at = rng.choice([place for place in places if place[0] == chosen])
            base = self.bases[chosen]
            edits = list(op_edits(base.schedule, phase, at))
            hits = labels(base, base.schedule.phases[phase].ops[at])
        else:
            chosen = rng.randrange(len(self.bases))
            base, hits = self.bases[chosen], [label]
            edits = _beside(base.schedule, label, rng)
        repair = rng.choices(REPAIRS, (1, 2, 2))[0]
        if not edits:
            return None
        first = drawn(rng, edits)
        changed = _made(first, repair, base.schedule)
        if changed is None or rng.random() >= 0.15 or changed == base.schedule:
            return None if changed is None else Mutant(chosen, (first,), repair, tuple(hits), changed)
        second = _any_edit(changed, rng)
        twice = None if second is None else _made(second, repair, base.schedule)
        if second is None or twice is None:
            return None
        return Mutant(chosen, (first, second), repair, tuple(hits), twice)

    def text(self, mutant: Mutant) -> str:
        base = self.bases[mutant.base]
        lines: list[str] = []
        for edit in mutant.edits:
            written = "" if edit.line is None else base.text.splitlines()[edit.line - 1].strip()
            line = f" (plan line {edit.line}: {written})" if written else ""
            lines.append(f"{edit.kind}: {edit.what}{line}")
        repair = f", {mutant.repair} repaired" if mutant.repair else ""
        return f"{base.name}: {'; '.join(lines)}{repair}"

    def record(self, number: int, mutant: Mutant) -> Record:
        kind, text = " and ".join(edit.kind for edit in mutant.edits), self.text(mutant)
        judge = self.judge(mutant.base)
        try:
            read = decode(encode(mutant.schedule))
        except CommplanError as error:
            return Record(number, "undecodable", "", kind, (), f"{text}: {error}")
        verdict = judge.compare(read)
        limits = "servers and records by a fixed order" if _unordered(read) else ""
        try:
            refused = verify(read)
        except Exception as error:  # noqa: BLE001 - a verifier that raises is a finding
            line = f"{text}: verify raised {type(error).__name__}: {error}"
            return Record(number, "broken", verdict.level, kind, mutant.hits, line, (), None, limits)
        codes = tuple(sorted({problem.code for problem in refused}))
        cell = "accepted" if not refused else "meaning" if MEANING.intersection(codes) else "form"
        confirmed = _confirmed(refused, verdict) if cell == "meaning" else None
        line = f"{text}: {verdict.level} {verdict.where}"
        return Record(number, cell, verdict.level, kind, mutant.hits, line, codes, confirmed, limits)

    def keep(self, number: int, mutant: Mutant, folder: Path) -> Path:
        """Write the mutant and its base to files."""
        own = folder / f"{self.seed}-{number}"
        own.mkdir(parents=True, exist_ok=True)
        base = self.bases[mutant.base]
        (own / "plan.plan").write_text(base.text)
        (own / "sound.json").write_bytes(encode(base.schedule))
        (own / "mutant.json").write_bytes(encode(mutant.schedule))
        (own / "README").write_text(self.text(mutant) + "\n")
        return own


# Most of these change nothing, or the form alone.
SELDOM = ("lane", "hints", "after", "form", "pinned", "dropped", "nbytes", "dtype")


def drawn(rng: random.Random, edits: Sequence[Edit]) -> Edit:
    """One of the edits: kinds almost evenly, then one of the kind."""
    kinds = sorted({edit.kind for edit in edits})
    weights = [0.3 if kind.rpartition(".")[2] in SELDOM else 1.0 for kind in kinds]
    kind = rng.choices(kinds, weights)[0]
    return rng.choice([edit for edit in edits if edit.kind == kind])


def _beside(schedule: ir.Schedule, label: str, rng: random.Random) -> list[Edit]:
    if label == BESIDE[2]:
        return list(head_edits(schedule))
    if label == BESIDE[3]:
        return [edit for edit in (joint_edit(schedule, rng) for _ in range(4)) if edit is not None]
    edits = list(phase_edits(schedule, rng.randrange(len(schedule.phases))))
    bound = ("phase outputs", "phase updates")
    return [edit for edit in edits if (edit.kind in bound) == (label == BESIDE[1])]


def _any_edit(schedule: ir.Schedule, rng: random.Random) -> Edit | None:
    phases = [number for number, phase in enumerate(schedule.phases) if phase.ops]
    if not phases:
        return None
    phase = rng.choice(phases)
    edits = list(op_edits(schedule, phase, rng.randrange(len(schedule.phases[phase].ops))))
    return drawn(rng, edits) if edits else None


def _made(edit: Edit, repair: Repair, sound: ir.Schedule) -> ir.Schedule | None:
    """The schedule after `edit`; None if it is not possible."""
    try:
        return repaired(edit.make(), repair, sound)
    except (KeyError, IndexError, ValueError, StopIteration):
        return None


def _unordered(schedule: ir.Schedule) -> bool:
    return any(
        isinstance(op, ir.Read | ir.Exchange | ir.Put | ir.Get)
        or (isinstance(op, ir.Elastic) and op.mode != "sync")
        for phase in schedule.phases
        for op in phase.ops
    )


def _confirmed(refused: Sequence[Diagnostic], verdict: Verdict) -> bool | None:
    """Whether a counter-example names an output that differs for the oracle; None if none differs."""
    if not verdict.names:
        return None
    messages = " ".join(
        [
            text
            for diagnostic in refused
            for text in (diagnostic.message, *(note.text for note in diagnostic.notes))
        ]
    )
    return any(f"`{name}`" in messages for name in verdict.names)


# one case of each campaign


def mutant_case(campaign: Campaign, number: int, folder: Path | None) -> Record:
    mutant = campaign.mutant(number)
    record = campaign.record(number, mutant)
    if record.failed and folder is not None:
        kept = campaign.keep(number, mutant, folder)
        return msgspec.structs.replace(record, text=f"{record.text}\n  kept in {kept}")
    return record


def sound_case(seed: int, number: int) -> Record:
    """A schedule that the compiler makes, read back and verified."""
    make = schedule_bases.wide_base if number % 3 == 2 else schedule_bases.random_base
    draws = ((seed * 1_000_003 + number) * 31 + attempt for attempt in itertools.count())
    draw, text = 0, ""
    try:
        base = None
        while base is None:
            draw = next(draws)
            base = make(draw)
        refused = verify(base.schedule)
        if refused:
            text = f"{make.__name__}({draw}), {base.name}: {refused[0].message}\n{base.text}"
        else:
            load_schedule(encode(base.schedule))
    except CommplanError as error:
        return Record(number, "broken", "", make.__name__, (), f"{make.__name__}({draw}): {error}")
    return Record(number, "refused" if refused else "accepted", "", make.__name__, (), text)


# many cases


class TooSlowError(Exception):
    """One case took longer than `PATIENCE`."""


def _ring(_: int, __: FrameType | None) -> None:
    raise TooSlowError


_case: Callable[[int], Record] | None = None  # in a child


def _start(case: Callable[[int], Record]) -> None:
    global _case  # noqa: PLW0603 - a pool hands it to its children so
    _case = case
    signal.signal(signal.SIGALRM, _ring)


def _run(number: int) -> tuple[int, Record]:
    assert _case is not None
    signal.alarm(PATIENCE)
    try:
        return number, _case(number)
    except TooSlowError:
        return number, Record(number, "broken", "", "", (), f"took longer than {PATIENCE} s")
    finally:
        signal.alarm(0)


def run_all(
    case: Callable[[int], Record], numbers: Sequence[int], jobs: int, state: Path | None, head: str
) -> Iterator[Record]:
    """The records of all cases: those in the state file, then the others as they are made."""
    done: set[int] = set()
    if state is not None and state.exists():
        lines = state.read_text().splitlines()
        if lines and lines[0] != head:
            sys.exit(f"{state} belongs to another campaign: {lines[0]}")
        for line in lines[1:]:
            try:
                number, record = msgspec.json.decode(line, type=tuple[int, Record])
            except msgspec.DecodeError:
                break  # it was cut off in this line
            done.add(number)
            yield record
    missing = [number for number in numbers if number not in done]
    if state is not None:
        kept = state.read_text().splitlines()[: len(done) + 1] if done else [head]
        state.write_text("".join(f"{line}\n" for line in kept))
    start = time.perf_counter()
    with state.open("a") if state is not None else contextlib.nullcontext() as log:
        for count, (number, record) in enumerate(_results(case, missing, jobs), 1):
            if log is not None:
                print(msgspec.json.encode((number, record)).decode(), file=log, flush=True)
            if count % 500 == 0:
                passed = time.perf_counter() - start
                print(f"  {len(done) + count} of {len(numbers)}, {passed:.0f} s", file=sys.stderr, flush=True)
            yield record


def _results(
    case: Callable[[int], Record], numbers: Sequence[int], jobs: int
) -> Iterable[tuple[int, Record]]:
    if jobs == 1:
        yield from ((number, case(number)) for number in numbers)
        return
    with multiprocessing.get_context("fork").Pool(jobs, _start, (case,)) as pool:
        yield from pool.imap_unordered(_run, numbers, chunksize=8)


# the final output


def summary(records: Iterable[Record], least: int, again: Callable[[int], str]) -> tuple[list[str], bool]:
    """The report on mutants, and whether all is well. least: how often everything must have been hit."""
    cells: Counter[tuple[str, str]] = Counter()
    hits: Counter[str] = Counter()
    past: Counter[str] = Counter()  # hits that structure alone does not refuse
    idle: dict[str, Counter[str]] = {"form": Counter(), "meaning": Counter()}
    codes: Counter[str] = Counter()
    limited: Counter[tuple[str, str]] = Counter()
    confirmed: Counter[bool | None] = Counter()
    lines: list[str] = []
    escaped: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for record in records:
        cells[record.cell, record.level] += 1
        hits.update(set(record.hits))
        if record.cell in ("meaning", "accepted"):
            past.update(set(record.hits))
        if record.cell in ("form", "meaning"):
            codes.update(record.codes)
            if record.cell == "meaning":
                confirmed[record.confirmed] += 1
            if record.level == "same":
                idle[record.cell][record.kind] += 1
        if record.limits:
            limited[record.cell, record.level] += 1
        if record.cell == "accepted" and record.level in ("rounds", "rounds less"):
            lines.append(f"accepted, and differs by rounding alone {record.number}: {record.text}")
        if record.failed:
            failed[record.cell] += 1
            escaped[record.kind] += 1
            if failed[record.cell] <= SHOWN:
                lines.append(
                    f"FAILED {record.cell} {record.number}: {record.text}\n  again: {again(record.number)}"
                )
    if escaped:
        lines.append("failed by kind: " + _counted(escaped))
    for cell, kinds in idle.items():
        if kinds:
            lines.append(f"refused by {cell}, though it changes nothing: {_counted(kinds)}")
    lines.append("codes: " + _counted(codes))
    if hits:
        shown = [f"{label} {hits[label]} ({past[label]})" for label in (*REQUIRED, *BESIDE)]
        lines.append("hits (of them past the form): " + ", ".join(shown))
    missing = [label for label in REQUIRED if hits[label] < least]
    if missing:
        lines.append(f"hit less than {least} times: {', '.join(missing)}")
    for cell in ("form", "meaning", "accepted", "broken", "undecodable"):
        counts = {level: count for (name, level), count in sorted(cells.items()) if name == cell}
        if counts:
            with_servers = sum(count for (name, _), count in limited.items() if name == cell)
            each = ", ".join(f"{count} {level or 'not run'}" for level, count in counts.items())
            lines.append(
                f"{cell}: {sum(counts.values())} ({each}; {with_servers} of them with records or servers)"
            )
    if confirmed:
        lines.append(
            f"counter-examples: {confirmed[True]} name an output that the oracle tells apart,"
            f" {confirmed[False]} do not, {confirmed[None]} where it tells no output apart"
        )
    return lines, not failed and not missing


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common(40))
