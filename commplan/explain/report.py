"""Explains each line of a plan: its ops, its traffic, the choices and the rejected alternatives.

Bytes on the wire are lower bounds for any algorithm: the bytes that a rank sends (in a broadcast: receives).
For n ranks with an operand of S bytes each, that is 2(n-1)/n S for an all-reduce, (n-1)/n S for a
reduce-scatter and an all-to-all, (n-1) S for an all-gather, and S for a broadcast. These are the bandwidth
bounds of Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
experience" (2007); the bus bandwidths of nccl-tests use the same factors. A hierarchy is charged level by
level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from commplan.cost import Prediction, Predictor
from commplan.cost.schedule.prediction import PhaseTime
from commplan.diagnostics import Span
from commplan.explain.servers import ServerText, ServerTexts, server_lines
from commplan.explain.stages import filler_lines, levels_text, phase_title, stage_text, table_lines
from commplan.explain.step_cost import StepCost, step_costs
from commplan.explain.times import basis, compared, phase_times
from commplan.ir import plan as graph
from commplan.ir import schedule as ir
from commplan.ir.analysis.server_ops import worker_operands
from commplan.ir.grouping import grouped
from commplan.ir.remark import Alternative, Choice, SharingCost
from commplan.ir.types import DType, sized, timed
from commplan.verify.claims import Claims, claims

_SHOWN_BUCKETS = 8  # most buckets of a line that are listed
# The headings of `sharing_table`.
_HEAD = ("", "design", "members part", "CPU", "of the limit", "step", "waits for", "between hosts", "memory")


class Traffic(msgspec.Struct, frozen=True):
    """A lower bound on the bytes that one rank moves.

    Attributes:
        axes: The axes, or one level, that they are moved over.
        ranks: The number of ranks along `axes`, n.
        nbytes: The bound in bytes.
        formula: The bound for S bytes per rank; a sum of formulas for several collectives.
    """

    axes: tuple[str, ...]
    ranks: int
    nbytes: int
    formula: str


class OpSummary(msgspec.Struct, frozen=True):
    """One op.

    Attributes:
        kind: The kind, such as `all_reduce`.
        result: Its first result.
        detail: Its operands and options as text.
        lane: The lane that it runs in, such as `network` or `host_read`.
        nbytes: The bytes of one rank's operands; of the buffer for a pack, and of the values that are sent or
            received for a request to servers.
        dtype: The dtype of a collective; else None.
        algorithm: The algorithm of a collective; else None.
        traffic: The traffic of a collective; else empty.
    """

    kind: str
    result: str
    detail: str
    lane: str
    nbytes: int
    dtype: DType | None = None
    algorithm: str | None = None
    traffic: tuple[Traffic, ...] = ()


class Bucket(msgspec.Struct, frozen=True):
    """A buffer that the compiler packs.

    Attributes:
        buffer: The name of the packed value.
        nbytes: The size in bytes.
        dtype: The dtype of all its elements.
        leaves: The leaves with a part in it, `VALUE/PATH`, without duplicates.
    """

    buffer: str
    nbytes: int
    dtype: DType
    leaves: tuple[str, ...]


class StageSummary(msgspec.Struct, frozen=True):
    """One stage of the plan, or a state that a phase gets from servers without a stage.

    Attributes:
        line: The line of the stage, or of the state's declaration.
        stage: The stage as text.
        results: The values that it makes.
        ops: Its ops in order, `steps` in JSON; empty if passes have removed it.
        buckets: The buffers that it packs.
        traffic: The sum over its ops, one entry per group of axes.
        choices: The decisions of passes about it.
        servers: Lines about states on servers, traffic with them, and its time.
        sent: The bytes that the busiest worker sends to servers; 0 without servers.
        filler: For a load, lines about the rows that only pad a batch.
    """

    line: int
    stage: str
    results: tuple[str, ...]
    ops: tuple[OpSummary, ...] = msgspec.field(name="steps")
    buckets: tuple[Bucket, ...]
    traffic: tuple[Traffic, ...]
    choices: tuple[Choice, ...]
    servers: tuple[str, ...] = ()
    sent: int = 0
    filler: tuple[str, ...] = ()


class PhaseLines(msgspec.Struct, frozen=True):
    """A phase.

    Attributes:
        name: Its name in the schedule.
        title: Its heading in the plan, such as `each step`.
        lines: Its stages.
        traffic: A lower bound on the bytes that a rank moves in one run, one entry per group of axes.
        outputs: The names of its outputs.
        times: Its predicted times; None without a topology.
    """

    name: str
    title: str
    lines: tuple[StageSummary, ...]
    traffic: tuple[Traffic, ...]
    outputs: tuple[str, ...] = ()
    times: PhaseTime | None = None


class Explanation(msgspec.Struct, frozen=True):
    """An explained plan. `msgspec.json.encode` writes it as JSON, `text()` as text.

    Attributes:
        plan: The name of the plan.
        axes: The sizes of the axes, including servers.
        pipeline: The passes as text; empty if none ran.
        phases: The phases.
        choices: Choices that belong to no single line.
        backend: The backend.
        placement: The levels of the topology that each axis maps to; empty without a topology.
        topology: The topology, or None.
        servers: The names of the server axes.
        claims: The properties that the compiler has proved.
        times: The source of predicted times, and their parts; empty without a prediction.
        steps: The cost of phases `each step`; empty without a prediction.
    """

    plan: str
    axes: dict[str, int]
    pipeline: str
    phases: tuple[PhaseLines, ...]
    choices: tuple[Choice, ...]
    backend: ir.Backend = "jax"
    placement: dict[str, str] = {}
    topology: ir.CompiledTopology | None = None
    servers: tuple[str, ...] = ()
    claims: Claims | None = None
    times: str = ""
    steps: tuple[StepCost, ...] = ()

    def text(self) -> str:
        """The explanation as text, with ops of one kind on one line."""
        axes = ", ".join(self._axis(name) for name in self.axes if name not in self.servers)
        lines = [f"plan {self.plan}, compiled for {self.backend}"]
        lines += [f"  axes: {axes}"] if axes else []
        lines += [f"  servers: {self._server_ranks()}"] if self.servers else []
        if self.topology is not None:
            lines.append(f"  topology: {self.topology.name}")
            lines += [f"    assumed: {text}" for text in self.topology.assumed]
        lines.append(f"  passes: {self.pipeline or 'none'}")
        lines += [f"  times: {self.times}"] if self.times else []
        lines += [f"  {text}" for choice in self.choices for text in _choice(choice)]
        for cost in self.steps:
            lines += ["", "cost of a step", *(f"  {text}" for text in cost.lines())]
        for phase in self.phases:
            lines += ["", phase.title]
            lines += [f"  {text}" for text in phase_times(phase.times)] if phase.times else []
            for line in phase.lines:
                lines += [f"  {text}" for text in line_text(line)]
            if not phase.lines:
                names = " and ".join(f"`{name}`" for name in phase.outputs)
                lines.append(f"  nothing moves: {names} as on entry")
            if len(phase.lines) > 1:
                lines += [f"  in all: {text}" for text in _traffic(phase.traffic)]
        lines += ["", *self.claims.lines()] if self.claims else []
        return "\n".join(lines) + "\n"

    def _axis(self, name: str) -> str:
        """The size of an axis and its levels, as text."""
        position = f" on {self.placement[name]}" if name in self.placement else ""
        return f"{name} = {self.axes[name]}{position}"

    def _server_ranks(self) -> str:
        """The ranks of the servers, which are the last ones, as text."""
        first = math.prod(size for name, size in self.axes.items() if name not in self.servers)
        ranges: list[str] = []
        for name in self.servers:
            last = first + self.axes[name] - 1
            word = "and" if last == first + 1 else "to"
            ranks_text = f"rank {first}" if first == last else f"ranks {first} {word} {last}"
            ranges.append(f"{name} = {self.axes[name]} ({ranks_text})")
            first = last + 1
        note = "" if self.backend == "mpi" else "; servers need MPI: compile with `--backend mpi`"
        return ", ".join(ranges) + note


def explain_plan(
    plan: graph.Plan,
    schedule: ir.Schedule,
    predictor: Predictor | None = None,
    records: Mapping[str, int] | None = None,
    prediction: Prediction | None = None,
) -> Explanation:
    """Explain each line of `plan`, which `schedule` was compiled from.

    Args:
        plan: The plan.
        schedule: The schedule.
        predictor: The cost model of a machine; None without a topology. Adds predicted times of requests to
            servers and elastic averaging, and of alternatives.
        records: The number of records of each source, if known. Adds the rows that pad batches.
        prediction: The prediction of `schedule`, or None. Adds times of phases and costs of steps.

    Raises:
        CommplanError: As `commplan.protocol.build_sites.sites`, for states on servers.
    """
    spans = {stage.span for phase in plan.phases for stage in phase.stages}
    server_texts = server_lines(schedule, predictor)
    choices = grouped(schedule.choices, lambda choice: choice.span)
    return Explanation(
        plan=plan.name,
        axes={axis.name: axis.size for axis in schedule.axes},
        pipeline=schedule.pipeline,
        phases=tuple(
            _phase(phase, schedule, server_texts, choices, records or {}, prediction) for phase in plan.phases
        ),
        choices=tuple(choice for choice in schedule.choices if choice.span not in spans),
        backend=schedule.backend,
        placement={axis.name: levels_text(axis) for axis in schedule.axes if axis.levels},
        topology=schedule.topology,
        servers=tuple(axis.name for axis in schedule.axes if axis.kind is graph.AxisKind.SERVER),
        claims=claims(schedule),
        times=basis(prediction) if prediction is not None else "",
        steps=step_costs(plan, schedule, prediction) if prediction is not None else (),
    )


def _phase(
    phase: graph.Phase, schedule: ir.Schedule, server_texts: ServerTexts,
    choices: Mapping[Span | None, Sequence[Choice]], records: Mapping[str, int],
    prediction: Prediction | None,
) -> PhaseLines:  # fmt: skip
    """The stages of a phase. `choices` are grouped by location, and `records` counted by source."""
    compiled = schedule.phase(phase.name)
    values = {value.id: value for value in (*schedule.entry, *compiled.values)}
    ops, spans = grouped(compiled.ops, lambda op: op.span), {stage.span for stage in phase.stages}
    lines: list[StageSummary] = []
    # States that the phase gets from servers without a stage, because it returns them unchanged.
    for op in (op for op in compiled.ops if op.span not in spans):
        summary = _op_summary(op, values, schedule)
        server_text = server_texts.get((phase.name, op.span), ServerText())
        stage, resulting = f"{summary.kind} {summary.detail}", ir.results(op)
        lines.append(
            StageSummary(
                op.span.line, stage, resulting, (summary,), (), (), (), server_text.lines, server_text.sent
            )
        )
    for stage in phase.stages:
        server_text = server_texts.get((phase.name, stage.span), ServerText())
        stage_ops = ops.get(stage.span, [])
        summaries = tuple(_op_summary(op, values, schedule) for op in stage_ops)
        line = StageSummary(
            stage.span.line, stage_text(stage), graph.results(stage), summaries,
            buckets=tuple(_bucket(op, values) for op in stage_ops if isinstance(op, ir.Pack)),
            traffic=_sum(entry for op in summaries for entry in op.traffic),
            choices=tuple(choices.get(stage.span, ())), servers=server_text.lines, sent=server_text.sent,
            filler=filler_lines(stage, records.get(stage.source)) if isinstance(stage, graph.Load) else (),
        )  # fmt: skip
        lines.append(line)
    total = _sum(entry for line in lines for entry in line.traffic)
    outputs = tuple(binding.name for binding in compiled.outputs)
    times = prediction.phase(phase.name) if prediction is not None else None
    return PhaseLines(phase.name, phase_title(phase), tuple(lines), total, outputs, times)


def _bucket(op: ir.Pack, values: Mapping[str, ir.Value]) -> Bucket:
    """The buffer of a pack. A leaf with an empty path is called like its value."""
    buffer = values[op.result]
    leaves = dict.fromkeys(
        f"{part.value}/{path}" if (path := values[part.value].leaves[part.leaf].path) else part.value
        for part in op.parts
    )
    return Bucket(op.result, buffer.nbytes, buffer.leaves[0].dtype, tuple(leaves))


def _op_summary(op: ir.Op, values: Mapping[str, ir.Value], schedule: ir.Schedule) -> OpSummary:
    """The summary of an op. A map of a built-in function shows its formula."""
    # States on servers stay there; only the values that a worker gets are counted.
    moved = worker_operands(op, values) or (ir.results(op) if op.uses_servers(values) else ())
    moved = ir.results(op) if isinstance(op, ir.Pack) else moved
    nbytes = sum(values[ref].nbytes for ref in moved)
    detail = op.detail(values)
    if isinstance(op, ir.Map) and (body := schedule.fn(op.fn).body) and str(body) != op.fn:
        detail += f" = {body}"
    summary = OpSummary(op.title, ir.results(op)[0], detail, op.lane, nbytes)
    if not isinstance(op, ir.Collective):
        return summary
    return replace(
        summary, dtype=op.dtype, algorithm=str(op.algorithm), nbytes=op.nbytes, traffic=traffic(op, schedule)
    )


def traffic(op: ir.Collective, schedule: ir.Schedule) -> tuple[Traffic, ...]:
    """Lower bounds on the bytes that one rank moves for `op`, one entry for each level of a hierarchy.

    The formulas are those at the beginning of this module.
    """
    if op.algorithm.name == "hierarchical":
        return _levels(op, schedule)
    return (_charge(op.kind, op.axes, op.nbytes, schedule.size(op.axes)),)


def _levels(op: ir.Collective, schedule: ir.Schedule) -> tuple[Traffic, ...]:
    """The traffic of a hierarchy.

    The inner levels of an all-reduce are a reduce-scatter and an all-gather, and the outermost an all-reduce.
    After a reduce-scatter at one level, less is left for the next outer level; an all-gather begins at the
    outermost. Other collectives move all bytes on every level.
    """
    spans = {spread.level: spread.count for name in op.axes for spread in schedule.axis(name).levels}
    axes = {name: schedule.size((name,)) for name in op.axes}
    # A key is an axis, or a level that an axis spans.
    sizes = {key: axes.get(key) or spans.get(key, 1) for key, _ in op.algorithm.levels}
    outermost = [*sizes][-1]
    whole = op.nbytes * (math.prod(sizes.values()) if op.kind == "all_gather" else 1)
    entries: list[Traffic] = []
    for key, ranks in sizes.items():
        shard = -(-whole // ranks)
        halves = op.kind == "all_reduce" and key != outermost
        for kind in ("reduce_scatter", "all_gather") if halves else (op.kind,):
            entries.append(_charge(kind, (key,), shard if kind == "all_gather" else whole, ranks))
        if op.kind in ("all_reduce", "reduce_scatter", "all_gather"):
            whole = shard
    return _sum(entries)


def _charge(kind: str, over: tuple[str, ...], nbytes: int, ranks: int) -> Traffic:
    """The bound for one collective with an operand of `nbytes` on each of `ranks` ranks."""
    match kind:
        case "all_reduce":
            sent, formula = 2 * (ranks - 1) * nbytes / ranks, "2(n-1)/n S"
        case "reduce_scatter" | "all_to_all" | "swap":
            sent, formula = (ranks - 1) * nbytes / ranks, "(n-1)/n S"
        case "all_gather":
            sent, formula = (ranks - 1) * nbytes, "(n-1) S"
        case _:
            sent, formula = nbytes if ranks > 1 else 0, "S"
    return Traffic(over, ranks, round(sent), formula)


def _sum(entries: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """The sum, with one entry for each group of axes, in order of first occurrence."""
    totals: dict[tuple[str, ...], Traffic] = {}
    for entry in entries:
        before = totals.get(entry.axes)
        if before is None:
            totals[entry.axes] = entry
            continue
        formulas = dict.fromkeys([*before.formula.split(" + "), *entry.formula.split(" + ")])
        totals[entry.axes] = replace(
            before, nbytes=before.nbytes + entry.nbytes, formula=" + ".join(formulas)
        )
    return tuple(totals.values())


def line_text(line: StageSummary) -> list[str]:
    """A line of the plan with its ops and choices, indented below the stage."""
    lines = [f"line {line.line}: {line.stage}", *(f"    {text}" for text in line_lines(line))]
    return lines + [f"    {text}" for choice in line.choices for text in _choice(choice)]


def line_lines(line: StageSummary) -> list[str]:
    """The ops and the traffic of a line, with ops of one kind on one line."""
    lines: list[str] = []
    by_kind = grouped(line.ops, lambda op: (op.kind, op.detail, op.lane))
    for (kind, detail, lane), ops in by_kind.items():
        count = f"{len(ops)} x " if len(ops) > 1 else ""
        nbytes = sum(op.nbytes for op in ops)
        moved = f", {sized(nbytes)}" if nbytes else ""
        lines.append(f"{count}{kind} {detail}".rstrip() + f"{moved}  [{lane.replace('_', ' ')}]")
    if not line.ops:
        lines.append("removed: no op is left")
    if line.buckets:
        shown, hidden = line.buckets[:_SHOWN_BUCKETS], len(line.buckets[_SHOWN_BUCKETS:])
        sizes = ", ".join(f"{sized(bucket.nbytes)} ({_leaves(bucket)})" for bucket in shown)
        more = f", and {hidden} more" if hidden else ""
        lines.append(f"buckets in the order sent: {sizes}{more}")
    return [*lines, *_traffic(line.traffic), *line.servers, *line.filler]


def _leaves(bucket: Bucket) -> str:
    return "1 leaf" if len(bucket.leaves) == 1 else f"{len(bucket.leaves)} leaves"


def _traffic(entries: Iterable[Traffic]) -> list[str]:
    return [
        f"each rank moves at least {sized(entry.nbytes)} over {', '.join(entry.axes)}"
        f" (n = {entry.ranks}: {entry.formula})"
        for entry in entries
    ]


def _choice(choice: Choice) -> list[str]:
    """A decision of a pass: its reason, its time, and the rejected alternatives."""
    lines = [f"{choice.by} chose {choice.what}: {choice.why}"]
    if choice.seconds is not None:
        source = f"  ({choice.source})" if choice.source else ""
        lines.append(f"  {choice.measure} {timed(choice.seconds)}{source}")
    lines += [f"  {text}" for text in sharing_table(choice.sharing)]
    lines += [f"  rejected: {text}" for text in choice.rejected]
    width = max((len(other.what) for other in choice.alternatives), default=0)
    return lines + [f"  rejected: {_alternative(other, choice, width)}" for other in choice.alternatives]


def sharing_table(rows: Sequence[SharingCost]) -> list[str]:
    """The cost of each design, one per line, with `>` at the selected one; empty without rows.

    CPU is per record and member, also as a multiple of the physical limit. `step` is the predicted time of a
    step. Bytes are those received from other hosts in a step, and those of the slots on the fullest host.
    """
    if not rows:
        return []
    limit = f"physical limit: {timed(rows[0].limit)} of CPU per record and member"
    return [limit, *table_lines([_HEAD, *map(_sharing_row, rows)])]


def _sharing_row(cost: SharingCost) -> tuple[str, ...]:
    """The cells of a design in `sharing_table`."""
    readers = f"(readers = {cost.readers})" if cost.readers else ""
    return (
        ">" if cost.taken else "",
        f"{cost.design}{readers}",
        cost.cut or "before reading",
        timed(cost.cpu),
        f"{cost.distance:.2f} x",
        timed(cost.wall),
        cost.waits_for,
        sized(round(cost.nbytes)),
        sized(round(cost.memory)),
    )


def _alternative(alternative: Alternative, choice: Choice, width: int) -> str:
    """An alternative, its predicted time, the ratio to that of `choice`, and other disadvantages.

    `width` is the number of characters of the longest alternative.
    """
    if alternative.seconds is None:
        return f"{alternative.what}: {alternative.why or 'without a topology its time is not known'}"
    parts = [f"{timed(alternative.seconds):>8}"]
    if choice.seconds:
        parts.append(compared(alternative.seconds / choice.seconds))
    reason = f"; {alternative.why}" if alternative.why else ""
    return f"{alternative.what:<{width}}  {', '.join(parts)}{reason}"
