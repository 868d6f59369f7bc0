"""`commplan report`: an HTML page with the graph, timeline, choices and proofs of a plan."""

from __future__ import annotations

from argparse import Namespace

from commplan.cli.console import STDIN, Console, name_of
from commplan.cli.records import run_in, totals
from commplan.cli.simulated import machines, simulate
from commplan.cli.user_step import need_machine, with_step
from commplan.cli.verbs.verify import VerifyReport, show_lines
from commplan.cli.verbs.verify.servers import ServerReport
from commplan.ir.schedule import Schedule
from commplan.report.document import CollectiveProof, Proofs
from commplan.report.gather import Recorded, ReportTimes, gather
from commplan.report.page import page
from commplan.report.recorded import traces
from commplan.report.trace import read_trace


def run(args: Namespace, console: Console) -> int:
    """Collect the data and write the page.

    Raises:
        CommplanError: CP1113 for an invalid trace, CP1114 for records of another plan or of several runs,
            CP0752 for a step without a topology, or an error of compiling, simulating or verifying.
    """
    trace = read_trace(console.read(args.recorded), name_of(args.recorded)) if args.recorded else None
    args = with_step(args, args.file, console)
    schedule, lines, times = simulate(machines(args, console)[-1], console)
    if times is None:
        need_machine(args)
    if not lines:
        show_lines(schedule, console)
    timed = ReportTimes(*times) if times else None
    recorded = Recorded((trace,) if trace else ())
    if args.records:
        recorded_run = run_in(args.records, schedule, timed.prediction if timed else None)
        phase_of_line = {op.span.line: phase.name for phase in schedule.phases for op in phase.ops}
        recorded = Recorded(traces(recorded_run, phase_of_line), totals(recorded_run))
    text = console.texts.get(schedule.file) if schedule.file else None
    data = page(gather(schedule, text, _proofs(schedule), timed, recorded)).encode()
    console.write(args.output, data)
    if args.output != STDIN:
        console.note(f"wrote {args.output}: {len(data) / 1e6:.2f} MB, open it in a browser")
        if not console.is_human:
            console.document(plan=schedule.plan, output=args.output, nbytes=len(data))
    return 0


def _proofs(schedule: Schedule) -> Proofs:
    """The results of `commplan verify` for a valid schedule."""
    facts = VerifyReport(schedule, [])
    collectives = tuple(
        CollectiveProof(
            line.line, line.kind, line.number, line.axes, line.ranks, line.via, line.proved,
            line.proof.cost.rounds if line.proof else None, line.busiest, line.least,
        )
        for line in facts.lines
    )  # fmt: skip
    claims = facts.claims
    sentences = (*facts.sentences(), *ServerReport(schedule).text().splitlines())
    return Proofs(claims.proved, claims.assumed, claims.not_checked, collectives, sentences)
