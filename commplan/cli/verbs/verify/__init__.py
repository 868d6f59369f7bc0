"""`commplan verify`: prove a plan, a saved schedule or an algorithm, or print counterexamples."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from commplan.cli.console import Console, fold_table, name_of, render_text
from commplan.cli.saved import is_saved, read_saved
from commplan.cli.verbs.verify.input import input_data, input_text
from commplan.cli.verbs.verify.servers import ServerReport
from commplan.diagnostics import CommplanError, Diagnostic, fail, plural
from commplan.ir.schedule import Collective, Schedule
from commplan.ir.types import sized
from commplan.verify.programs.algorithm_proof import (
    Proof,
    prove_algorithm,
    prove_levels,
    prove_sliced,
    str_of,
)
from commplan.verify.programs.counterexample import Counterexample
from commplan.verify.programs.proof import Counted


def run(args: Namespace, console: Console) -> int:
    """Print the proved properties; returns 1 if there is a counterexample.

    Raises:
        CommplanError: an error of the plan or the flags; CP1001 to CP1005 for a file that is not a schedule;
            CP0748 for an algorithm that cannot be proved.
    """
    if args.file is None:
        return _algorithm(args, console)
    text = console.read(args.file)
    if is_saved(args.file, text):
        schedule, diagnostics = _load_saved(text, name_of(args.file), console)
    else:
        from commplan.cli.binding import compile_with_flags

        # The compiler proves the schedule after every pass, and raises counterexamples.
        schedule, diagnostics = compile_with_flags(args.file, args, console).schedule, []
    served = ServerReport(schedule) if not diagnostics else None
    facts = VerifyReport(schedule, diagnostics)
    data = facts.data() | {"servers": served.data() if served else {}, "proved": not diagnostics}
    return console.conclude(
        diagnostics, lambda: facts.text(console.color(sys.stdout)) + (served.text() if served else ""), **data
    )


def _load_saved(text: str, name: str, console: Console) -> tuple[Schedule, list[Diagnostic]]:
    """Load a schedule that may have been edited, and return it with all its errors.

    Raises the errors of a file that cannot be decoded.
    """
    from commplan.verify.structural import verify

    diagnostics: list[Diagnostic] = []
    decoded: list[Schedule] = []

    def collect(schedule: Schedule) -> tuple[Diagnostic, ...]:
        """Keep the schedule and its errors, and report none, so that decoding continues."""
        decoded.append(schedule)
        diagnostics.extend(verify(schedule))
        return ()

    try:
        read_saved(text, name, collect)
    except CommplanError as error:
        if not decoded:
            raise
        diagnostics.extend(error.diagnostics)
    show_lines(decoded[0], console)
    return decoded[0], diagnostics


def show_lines(schedule: Schedule, console: Console) -> None:
    """Load the text of a schedule's plan into `console`, for excerpts, if its file is unchanged."""
    from commplan import dsl
    from commplan.ir.serialization.canonical_json import is_of

    if not schedule.file or schedule.file in console.texts or not Path(schedule.file).is_file():
        return
    try:
        plan, _ = dsl.load(console.read(schedule.file), schedule.file)
    except CommplanError:
        return
    if plan is None or not is_of(schedule, plan):
        console.texts.pop(schedule.file, None)


class LineProof(NamedTuple):
    """Equal collectives of one plan line.

    Attributes:
        phase: name of the phase.
        line: line number in the plan.
        kind: kind of the collectives.
        axes: the axes that they communicate over.
        via: their algorithm.
        ranks: number of ranks along `axes`.
        number: number of collectives.
        nbytes: bytes of the whole buffers of all collectives, S.
        proof: the proof; None for the backend's native collective.
    """

    phase: str
    line: int
    kind: str
    axes: tuple[str, ...]
    via: str
    ranks: int
    number: int
    nbytes: int
    proof: Proof | None

    @property
    def proved(self) -> str:
        """Describe which part is proved."""
        if self.proof is None:
            return "assumed: the backend's own"
        assumed = f"; assumed: {', '.join(self.proof.assumed)}" if self.proof.assumed else ""
        if len(self.proof.tasks) == 1 and not assumed:
            return "proved"
        return f"{len(self.proof.tasks)} programs{assumed}"

    @property
    def busiest(self) -> int | None:
        """The larger of the bytes that the busiest rank sends and receives; None without a proof."""
        if self.proof is None:
            return None
        return _bytes(max(self.proof.cost.sent, self.proof.cost.received), self.nbytes)

    @property
    def least(self) -> int | None:
        """A lower bound on the bytes that the busiest rank moves with any algorithm; None without a proof."""
        return _bytes(self.proof.cost.least, self.nbytes) if self.proof else None


class VerifyReport:
    """The report on a schedule. Facts that hold for valid schedules only are empty if it has errors.

    Args:
        schedule: the schedule.
        diagnostics: its errors; empty if it is valid.

    Attributes:
        visits: the proved loads.
        shares: the proved shared values.
        input: memory bounds of input, by phase.
        lines: the proved collectives, by plan line.
        memory: memory bounds of a rank, by phase.
        calls: all collectives, in the order of calls.
        communicators: the axes of each communicator, in the order of first use.
        claims: the properties that are proved, assumed and not checked.
        ranks: number of ranks, without servers.
    """

    def __init__(self, schedule: Schedule, diagnostics: list[Diagnostic]) -> None:
        from commplan.verify.claims import claims
        from commplan.verify.input_proof import input_memory, shares, visits
        from commplan.verify.memory import memory

        self.schedule = schedule
        self.visits = () if diagnostics else visits(schedule)
        self.shares = () if diagnostics else shares(schedule)
        self.input = () if diagnostics else input_memory(schedule)
        self.lines = [] if diagnostics else _lines(schedule)
        self.memory = () if diagnostics else memory(schedule)
        self.calls = [op for phase in schedule.phases for op in phase.ops if isinstance(op, Collective)]
        self.communicators = list(dict.fromkeys(op.axes for op in self.calls))
        self.claims = claims(schedule)
        self.ranks = schedule.size(tuple(axis.name for axis in schedule.mesh_axes))

    def data(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "plan": self.schedule.plan,
            "claims": msgspec.to_builtins(self.claims),
            "axes": {axis.name: axis.size for axis in self.schedule.axes},
            "collectives": [
                {
                    "phase": line.phase, "line": line.line, "kind": line.kind, "axes": list(line.axes),
                    "via": line.via, "ranks": line.ranks, "count": line.number, "nbytes": line.nbytes,
                    **_proof_data(line.proof, line.nbytes),
                }
                for line in self.lines
            ],
            "communicators": [list(axes) for axes in self.communicators],
            "calls": len(self.calls),
            "memory": [
                {
                    "phase": line.phase, "nbytes": line.nbytes, "collectives_nbytes": line.buffers,
                    "line": line.span.line if line.span else None,
                }
                for line in self.memory
            ],
            **input_data(self.visits, self.shares, self.input),
        }  # fmt: skip

    def text(self, color: bool) -> str:
        """The report as text, with terminal colors if `color`."""
        ranks = _sizes("rank", self.ranks, self.schedule.mesh_sizes)
        mesh = self.schedule.mesh_sizes
        hubs = {axis.name: axis.size for axis in self.schedule.axes if axis.name not in mesh}
        servers = f" and {_sizes('server', sum(hubs.values()), hubs)}" if hubs else ""
        word = "proved" if self.schedule.origin is not None else self.claims.proved
        out = [f"plan {self.schedule.plan}, {ranks}{servers}: {word}"]
        out += [f"  {line}" for line in self.claims.lines()]
        if self.lines:
            out += ["", _table(self.lines, color).rstrip("\n"), ""]
        return "\n".join([*out, *self.sentences()]) + "\n"

    def sentences(self) -> list[str]:
        """Sentences about communicators, input and memory."""
        out: list[str] = []
        if self.calls:
            groups = ", ".join("x".join(axes) for axes in self.communicators)
            out.append(
                f"communicators: {len(self.communicators)} ({groups}), created and called in one order by all"
                f" ranks, {plural(len(self.calls), 'call')}"
            )
        out += input_text(self.visits, self.shares, self.input)
        for memory in self.memory:
            location = f" (line {memory.span.line})" if memory.span else ""
            out.append(
                f"memory of a rank in phase {memory.phase}: at most {sized(memory.nbytes)}{location},"
                f" of which collectives use {sized(memory.buffers)}"
            )
        return out


def _sizes(noun: str, number: int, sizes: dict[str, int]) -> str:
    """Describe a number of things and the axes along which they are counted."""
    size_list = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    return plural(number, noun) + (f" ({size_list})" if size_list else "")


def _lines(schedule: Schedule) -> list[LineProof]:
    """The proofs of the collectives, with equal ones of a line added up."""
    from commplan.verify.algorithms import prove_op

    lines: dict[tuple[Any, ...], LineProof] = {}
    for phase in schedule.phases:
        for op in (op for op in phase.ops if isinstance(op, Collective)):
            ranks = schedule.size(op.axes)
            whole = op.nbytes * ranks if op.kind == "all_gather" else op.nbytes
            key = (phase.name, op.span.line, op.kind, op.axes, str(op.algorithm), op.root)
            before = lines.get(key)
            lines[key] = LineProof(
                *key[:5], ranks, (before.number if before else 0) + 1,
                (before.nbytes if before else 0) + whole,
                before.proof if before else prove_op(schedule, op),
            )  # fmt: skip
    return list(lines.values())


def _proof_data(proof: Proof | None, nbytes: int) -> dict[str, Any]:
    """The proof of collectives of `nbytes` bytes, as JSON data; None for native ones."""
    if proof is None:
        return {"proved": False, "assumed": ["native"]}
    shares = {f"{name}_nbytes": _bytes(share, nbytes) for name, share in _shares(proof.cost).items()}
    return {"proved": True, **_proof_document(proof), **shares}


def _proof_document(proof: Proof) -> dict[str, Any]:
    return {
        "assumed": list(proof.assumed),
        "programs": [task._asdict() for task in proof.tasks],
        "rounds": proof.cost.rounds,
        "least_rounds": proof.cost.least_rounds,
    }


def _shares(cost: Counted) -> dict[str, Fraction]:
    """The fractions of the whole buffer in a cost, by name."""
    return {"sent": cost.sent, "received": cost.received, "least": cost.least, "staged": cost.staged}


def _bytes(share: Fraction, nbytes: int) -> int:
    """Convert a fraction to bytes, rounded up since chunks differ by up to one element."""
    return -(-share.numerator * nbytes // share.denominator)


def _table(lines: list[LineProof], color: bool) -> str:
    """The table of collectives, with terminal colors if `color`."""
    table = fold_table("line", "collective", "over", "via", "rounds", "busiest rank", "at least", "proof")
    for line in lines:
        kind = f"{line.kind} x {line.number}" if line.number > 1 else line.kind
        over = f"{', '.join(line.axes)} ({line.ranks})"
        rounds = str(line.proof.cost.rounds) if line.proof else ""
        moved = ("" if nbytes is None else sized(nbytes) for nbytes in (line.busiest, line.least))
        table.add_row(str(line.line), kind, over, line.via, rounds, *moved, line.proved)
    return render_text(lambda screen: screen.print(table), 130, color=color)


def _algorithm(args: Namespace, console: Console) -> int:
    """Prove the algorithm or hierarchy of --algorithm; returns 1 if there is a counterexample."""
    subject, proof = _prove_named(args)
    diagnostics = [wrong.diagnostic(subject) for subject, wrong in proof.wrong]
    ranks = args.ranks
    return console.conclude(
        diagnostics, lambda: _praise(subject, proof),
        algorithm=args.algorithm, collective=args.collective,
        ranks=ranks if isinstance(ranks, int) else dict(ranks),
        root=args.root or 0, slices=args.slices, proved=not diagnostics, **_proof_document(proof),
        **{name: float(share) for name, share in _shares(proof.cost).items()},
        counterexamples=[_as_data(counterexample) for _, counterexample in proof.wrong],
    )  # fmt: skip


def _as_data(wrong: Counterexample) -> dict[str, Any]:
    data = msgspec.structs.asdict(wrong)
    return {name: value for name, value in data.items() if name not in ("span", "related")}


_HIERARCHY = re.compile(r"hierarchical\s*\((.*)\)\s*", re.DOTALL)  # with the list of levels
_LEVEL = re.compile(r"\s*(\w+)\s*(?:=\s*(\w+)\s*)?")  # a level, such as `gpu = ring` or `gpu`


def _prove_named(args: Namespace) -> tuple[str, Proof]:
    """The algorithm of --algorithm in words, and its proof. Raises CP0748 for flags that do not fit it."""
    root, kind = args.root or 0, args.collective
    hierarchy = _HIERARCHY.fullmatch(args.algorithm)
    if hierarchy is None:
        if not isinstance(args.ranks, int):
            fail("CP0748", f"`{args.algorithm}` has no levels", "give a number: --ranks 13")
        subject = f"{args.algorithm} for {kind} over {args.ranks} ranks"
        if args.slices > 1:
            return subject, prove_sliced(args.algorithm, kind, args.ranks, root, args.slices)
        return subject, prove_algorithm(args.algorithm, kind, args.ranks, root)
    if args.slices > 1:
        fail("CP0748", "the proof of a hierarchy does not depend on slices", "omit --slices")
    levels = _levels(hierarchy[1], args)
    sizes = " x ".join(str(size) for _, size in levels)
    return f"{args.algorithm} for {kind} over {sizes} ranks", prove_levels(tuple(levels), kind, root)


def _levels(text: str, args: Namespace) -> list[tuple[str, int]]:
    """The algorithm and size of each level of --algorithm; a level without an algorithm is native.

    Raises:
        CommplanError: CP0748 if the levels are not those of --ranks.
    """
    parts = [_LEVEL.fullmatch(part) for part in text.split(",")]
    if isinstance(args.ranks, int) or None in parts:
        message = f"`{args.algorithm}` over {args.ranks} ranks: cannot infer the levels and their sizes"
        note = 'write --algorithm "hierarchical(gpu = ring, node = chain)" --ranks gpu=8,node=4'
        fail("CP0748", message, note)
    sizes = dict(args.ranks)
    names = [(part[1], part[2] or "native") for part in parts if part is not None]
    if sorted(sizes) != sorted(name for name, _ in names):
        message = (
            f"the levels are {', '.join(name for name, _ in names)}, the sizes are for {', '.join(sizes)}"
        )
        fail("CP0748", message, "give one size for each level")
    return [(algorithm, sizes[name]) for name, algorithm in names]


def _praise(subject: str, proof: Proof) -> str:
    """The result of a proof without counterexamples, as text."""
    out = [f"{subject}: {'proved' if proof.tasks else 'assumed'}"]
    if proof.tasks:
        out += [
            "  every send has a matching receive; no rank waits forever, even if sends block until received",
            "  at the end every slot holds the promised value: each contribution once, sums bitwise equal",
            "  no message is redundant, races with another, or sends unset data",
        ]
    if len(proof.tasks) > 1:
        out += ["  composed of:", *(f"    {str_of(task)}" for task in proof.tasks)]
    if proof.assumed:
        out.append(f"  assumed, being the backend's own: {', '.join(proof.assumed)}")
    if proof.tasks:
        out += [
            f"  rounds {proof.cost.rounds} (no fewer than {proof.cost.least_rounds})",
            f"  the busiest rank sends {_share(proof.cost.sent)} and receives {_share(proof.cost.received)}",
            f"  (no less than {_share(proof.cost.least)}; S are the bytes of the whole buffer)",
            f"  a rank needs receive buffers of {_share(proof.cost.staged)}",
        ]
    return "\n".join(out) + "\n"


def _share(share: Fraction) -> str:
    """A fraction of the whole buffer S, as text."""
    return f"{share} S" if share.denominator == 1 else f"{share} S ({float(share):.3f})"
