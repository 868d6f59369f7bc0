"""`commplan report`: one HTML page of what a plan became, when, why, and what is proved of it."""

from __future__ import annotations

from argparse import Namespace

from commplan.cli.console import STDIN, Console, name_of
from commplan.cli.verb_simulate import schedule_of
from commplan.cli.verb_verify import Facts, show_lines
from commplan.cli.verify_servers import Served
from commplan.cost import Predictor, load_calibration, simulate
from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Schedule
from commplan.report.document import Collective, Proofs
from commplan.report.gather import Timed, gather
from commplan.report.page import page
from commplan.report.trace import read_trace
from commplan.topology import Topology, load_topology


def run(args: Namespace, console: Console) -> int:
    """Gather, and write the page. Raises what compiling, simulating and verifying raise, and CP1113."""
    topology = load_topology(args.topology) if args.topology else None
    trace = None
    if args.trace:
        trace = read_trace(console.read(args.trace), name_of(args.trace))
    schedule, lines = schedule_of(args, topology, console)
    if not lines:
        show_lines(schedule, console)
    timed = _timed(schedule, topology, args) if topology else None
    text = console.texts.get(schedule.file) if schedule.file else None
    data = page(gather(schedule, text, _proofs(schedule), timed, trace)).encode()
    console.write(args.output, data)
    if args.output != STDIN:
        console.note(f"wrote {args.output}: {len(data) / 1e6:.2f} MB, open it in a browser")
        if not console.human:
            console.document(plan=schedule.plan, output=args.output, nbytes=len(data))
    return 0


def _timed(schedule: Schedule, topology: Topology, args: Namespace) -> Timed:
    calibration = load_calibration(args.calibration) if args.calibration else None
    if calibration is not None:
        calibration.check_backend(schedule.backend, args.calibration)
    links = calibration.links if calibration else None
    predictor = Predictor(topology, schedule.axes, calibration=links, backend=schedule.backend)
    measured = calibration.input if calibration else None
    return Timed(predictor, simulate(schedule, predictor, dict(args.cost), measured))


def _proofs(schedule: Schedule) -> Proofs:
    """What `commplan verify` says of a schedule that holds. Raises CommplanError where its servers do not."""
    served = Served(schedule)
    if served.wrong:
        raise CommplanError(*served.wrong)
    facts = Facts(schedule, [])
    collectives = tuple(
        Collective(
            line.line, line.kind, line.number, line.axes, line.ranks, line.via, line.proved,
            line.proof.cost.rounds if line.proof else None, line.busiest, line.least,
        )
        for line in facts.lines
    )  # fmt: skip
    claims = facts.claims
    sentences = (*facts.sentences(), *served.text().splitlines())
    return Proofs(claims.proved, claims.believed, claims.not_looked_at, collectives, sentences)
