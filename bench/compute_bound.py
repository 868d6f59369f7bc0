"""A step that takes longer than its input: sharing should be declined, and should cost nothing where it is
forced.

    python -m bench.compute_bound [--members 4] [--slack 2.0] [--records 512] [--rounds 5] [--out FILE.json]

Members are processes on one host whose step runs on an accelerator, played by a sleep: the host's cores are
free for the input. A step takes `slack` times what all cores need to make a batch for every member, so that
preprocessing is not the bottleneck even where each member does it for itself. In turns: batches that lie
ready (nothing is made), duplicated and shared input. And what the compiler chooses, given what one decode,
one copy and the step were measured to cost."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from bench.input import cells
from bench.input.members import BATCH
from bench.input.records import SHAPE, pack
from bench.input.team import Block, Team
from commplan import compiler, dsl
from commplan.cost.calibration import only_input
from commplan.input.measured_costs import ConsumerCost, FnCost, InputCosts, SourceCost
from commplan.ir.remark import Choice
from commplan.ir.schedule import Share

MOST_SLOWER = 0.02
WAYS = ("consuming", "duplicate", "all_shared")
PLAN = """
plan compute_bound
ensemble member = {members}
source images : bytes
fn decode(bytes) -> u8[224, 224, 3] on host
each step {{
    raw    = load images batch {batch} visit exactly_once seed 17 tail short
    pixels = map decode(raw)
    output pixels
}}
"""


class Results(msgspec.Struct, frozen=True):
    """A run's JSON file. seconds: of a step, one median per round and way. cpu_s: of all processes, per
    record and member. choice: what the compiler says of the input; designs: of the shares that it put in.
    """

    members: int
    cores: int
    step: float
    decode_s: float
    seconds: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    designs: list[str]
    choice: str


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    results = measure(options)
    print(text(results))
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def measure(options: argparse.Namespace) -> Results:
    cores = tuple(sorted(os.sched_getaffinity(0)))[: options.cores]
    with tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder:
        records = Path(folder) / "records.bin"
        pack(records, options.records)
        decode = _decode(records, Path(folder), cores, options)
        step = options.slack * options.members * BATCH * decode / len(cores)
        asked = cells.Asked(options.members, cores, repr(step), options.rounds, WAYS)
        blocks = _turns(asked, records, Path(folder), options.timeout)
    choices, designs = chosen(options.members, len(cores), decode, step)
    return Results(
        options.members,
        len(cores),
        step,
        decode,
        {name: [_step(block) for block in own] for name, own in blocks.items()},
        {name: [block.cpu_per_record for block in own] for name, own in blocks.items()},
        designs,
        "; ".join(choice.why for choice in choices),
    )


def _decode(records: Path, folder: Path, cores: tuple[int, ...], options: argparse.Namespace) -> float:
    """CPU seconds of one decode, all cores decoding."""
    asked = cells.Asked(options.members, cores, "ids", 1, ())
    team = cells.team("decoding", asked, records, folder / "decoding", "", options.timeout)
    try:
        block = team.block()
        return block.cpu_per_record
    finally:
        team.close()


def _turns(asked: cells.Asked, records: Path, folder: Path, timeout: float) -> dict[str, list[Block]]:
    teams: dict[str, Team] = {}
    blocks: dict[str, list[Block]] = {name: [] for name in WAYS}
    try:
        for name in WAYS:
            teams[name] = cells.team(name, asked, records, folder / name, "", timeout)
        for round_ in range(asked.rounds):
            for name in WAYS[round_ % len(WAYS) :] + WAYS[: round_ % len(WAYS)]:
                blocks[name].append(teams[name].block())
    finally:
        for team in teams.values():
            team.close()
    return blocks


def _step(block: Block) -> float:
    """Seconds of a step of the slowest member."""
    return max(statistics.median(answer["steps"]) for answer in block.answers)


def chosen(members: int, cores: int, decode: float, step: float) -> tuple[list[Choice], list[str]]:
    """What the compiler chooses, and the designs of the shares that it puts in."""
    plan, problems = dsl.load(PLAN.format(members=members, batch=BATCH), "compute_bound.plan")
    if plan is None:
        raise SystemExit("\n".join(map(str, problems)))
    nbytes = int(np.prod(SHAPE))
    costs = InputCosts(
        "today",
        cores,
        _copy(nbytes),
        source=(SourceCost("images", 0.0),),
        fn=(FnCost("decode", decode, nbytes_out=nbytes),),
        consumer=(ConsumerCost("compute_bound", "step", step),),
    )
    schedule = compiler.compile_plan(plan, {}, calibration=only_input("today", costs))
    shares = [op.design for phase in schedule.phases for op in phase.ops if isinstance(op, Share)]
    return [choice for choice in schedule.choices if choice.by == "share"], list(shares)


def _copy(nbytes: int) -> float:
    """CPU seconds of copying one byte."""
    row, room = np.ones(nbytes, np.uint8), np.zeros((BATCH, nbytes), np.uint8)
    start = time.thread_time()
    for place in range(BATCH):
        room[place] = row
    return (time.thread_time() - start) / (BATCH * nbytes)


def text(results: Results) -> str:
    """For people."""
    alone = statistics.median(results.seconds["consuming"])
    head = (
        f"{results.members} members on {results.cores} cores; decoding {results.decode_s * 1e3:.3f} ms CPU; "
        f"the accelerator takes {results.step * 1e3:.1f} ms a step"
    )
    lines = [head, f"  {'':<14}{'step ms':>9}{'slower':>9}{'CPU ms per record and member':>31}"]
    for name, title in zip(WAYS, ("ready-made", "duplicated", "shared"), strict=True):
        step, cpu = statistics.median(results.seconds[name]), statistics.median(results.cpu_s[name])
        lines.append(f"  {title:<14}{step * 1e3:>9.2f}{step / alone - 1:>9.2%}{cpu * 1e3:>31.3f}")
    shared = (
        statistics.median(results.seconds["all_shared"]) / statistics.median(results.seconds["duplicate"]) - 1
    )
    declined = not set(results.designs) - {"duplicate"}
    lines.append(f"the compiler {'declines to share' if declined else 'SHARES'}: {results.choice}")
    lines.append(f"sharing anyway changes the time of a step by {shared:+.2%}")
    if shared > MOST_SLOWER:
        lines.append(f"  more than {MOST_SLOWER:.0%}")
    return "\n".join(lines)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--slack", type=float, default=2.0, help="the step, in times of what its input takes")
    parser.add_argument("--records", type=int, default=512, help=f"a multiple of {BATCH}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(argv)
    if options.records % BATCH or options.records < 3 * BATCH:
        parser.error(f"--records must be a multiple of {BATCH}, {3 * BATCH} at least")
    return options


if __name__ == "__main__":
    main()
