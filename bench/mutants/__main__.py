"""The campaign of mutants: programs with one mistake, all of which must be refused; and valid ones.

    python -m bench.mutants --count 2000 --seed 0        # every counter-example is replayed
    python -m bench.mutants --valid                      # all algorithms, kinds and 1 to 64 ranks are proved
    python -m bench.mutants --schedules --count 5000     # schedules with a mistake are refused
    python -m bench.mutants --sound --count 5000         # schedules of the compiler are not refused

A mutant is a valid program (any algorithm, kind, number of ranks, root and slices) with one mistake: a
transfer was dropped, doubled, misdirected, moved to another round, or got another chunk or operation, or two
rounds of one rank were exchanged; or one rank creates its communicators, or calls them, in another way. The
verifier must refuse it with a counter-example, and running the mutant must show exactly the situation of the
counter-example. An accepted mutant is run, without the verifier: if it still satisfies its postcondition it
is counted as equivalent, and another is drawn; if not, it has escaped. A mutant is a pure function of its
seed. Exit 1 if one escaped, a counter-example did not replay, or a valid program was refused.

Mutants of schedules are decoded, with new digests, and judged by the verifier and by the oracle in exact
arithmetic (`tests.support.schedule_oracle`). Exit 1 if a schedule with another effect is accepted, if some
op, stage verb or algorithm is not hit often enough, or a sound schedule is refused. With `--state FILE` an
interrupted campaign continues.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.harness.arguments import program_parser
from bench.mutants import schedules
from commplan.collectives.program import KINDS
from commplan.collectives.registry import algorithms, program
from commplan.ir.collective_kinds import ROOTED
from commplan.verify.programs.proof import prove
from tests.support.calls import check_calls
from tests.support.calls_mutation import mutate_calls
from tests.support.calls_replay import correct_calls, replay_calls
from tests.support.matching import prove as prove_projection
from tests.support.mutation import mutate, some_program
from tests.support.program_replay import correct, replay

REJECTED, EQUIVALENT, ESCAPED, UNREPLAYED = "rejected", "equivalent", "escaped", "not replayed"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.valid:
        return _valid(options.most)
    if options.sound:
        return _sound(options)
    if options.schedules:
        return _schedules(options)
    start = time.perf_counter()
    outcomes: Counter[tuple[str, str]] = Counter()
    failures: Counter[str] = Counter()
    seed, rejected, bad = options.seed, 0, 0
    while rejected + bad < options.count:
        kind, outcome, failure, text = one(seed, options.most)
        outcomes[kind, outcome] += 1
        rejected += outcome == REJECTED
        if outcome == REJECTED:
            failures[failure] += 1
        if outcome in (ESCAPED, UNREPLAYED):
            bad += 1
            print(f"{outcome}: seed {seed}: {text}")
        seed += 1
    for kind in sorted({kind for kind, _ in outcomes}):
        same = outcomes[kind, EQUIVALENT]
        more = f", {same} drawn again: still correct" if same else ""
        print(f"{kind}: {outcomes[kind, REJECTED]} rejected{more}")
    print("counter-examples:", ", ".join(f"{number} {name}" for name, number in failures.most_common()))
    same = sum(number for (_, outcome), number in outcomes.items() if outcome == EQUIVALENT)
    print(
        f"mutants: {rejected} of {rejected + bad} rejected with a counter-example that replays, seeds"
        f" {options.seed}..{seed - 1}, {same} no mutants but correct programs,"
        f" {time.perf_counter() - start:.0f} s"
    )
    return int(bad > 0)


def one(seed: int, most: int) -> tuple[str, str, str, str]:
    """Make and judge the mutant of one seed: its kind, the outcome, the kind of failure, and in words."""
    rng = random.Random(seed)
    if rng.random() < 1 / 8:
        calls = mutate_calls(rng)
        claim = check_calls(calls.sizes, calls.ranks)
        text = f"{calls.sizes}: {calls.kind}: {calls.what}: {claim.message if claim else 'accepted'}"
        if claim is None:
            good = correct_calls(calls.sizes, calls.ranks)
            return calls.kind, EQUIVALENT if good else ESCAPED, "", text
        shown = replay_calls(calls.sizes, calls.ranks, claim)
        return calls.kind, REJECTED if shown else UNREPLAYED, claim.failure, text
    of = some_program(rng, most)
    mutant = mutate(rng, of)
    counterexample = prove_projection(mutant.projection) if mutant.program is None else prove(mutant.program)
    title = f"{of.name} {of.kind}, {of.ranks} ranks, root {of.root}, {of.chunks} chunks: {mutant.what}"
    if not counterexample:
        return mutant.kind, EQUIVALENT if correct(mutant.projection) else ESCAPED, "", title
    shown = replay(mutant.projection, counterexample[0])
    text = f"{title}: {counterexample[0].message}"
    return mutant.kind, REJECTED if shown else UNREPLAYED, counterexample[0].failure, text


def _valid(most: int) -> int:
    start, count, bad = time.perf_counter(), 0, 0
    for kind in KINDS:
        for name in algorithms(kind):
            for ranks in range(1, most + 1):
                for root in sorted({0, ranks // 2, ranks - 1} if kind in ROOTED else {0}):
                    count += 1
                    for wrong in prove(program(name, kind, ranks, root=root)):
                        bad += 1
                        print(f"refused: {name} {kind} {ranks} ranks root {root}: {wrong.message}")
    print(
        f"mutants: {count - bad} of {count} valid programs proved, 1 to {most} ranks,"
        f" {time.perf_counter() - start:.0f} s"
    )
    return int(bad > 0)


def _schedules(options: argparse.Namespace) -> int:
    start, seed = time.perf_counter(), options.seed
    campaign = schedules.Campaign(seed, options.share)
    count, mode = options.count, f"--schedules --share {options.share}"
    least = min(50, count // 100) if count >= 1000 else 0
    print(f"{mode} --seed {seed}: {len(campaign.bases)} schedules", flush=True)
    numbers = [options.case] if options.case is not None else range(count)
    case = partial(schedules.mutant_case, campaign, folder=options.keep)
    wrong = campaign.unsound() if options.case is None else []
    for text in wrong:
        print(f"not sound: {text}")
    records = schedules.run_all(case, numbers, options.jobs, options.state, f"{mode} --seed {seed}")
    if options.case is not None:
        written = list(records)
        print("\n".join(f"{record.cell} {' '.join(record.codes)}: {record.text}" for record in written))
        return int(any(record.failed for record in written))
    again = f"python -m bench.mutants {mode} --seed {seed} --case"
    lines, good = schedules.summary(records, least, lambda n: f"{again} {n}")
    print("\n".join(lines))
    print(f"mutants of schedules: {'good' if good and not wrong else 'FAILED'}, {mode} --seed {seed},"
          f" {len(numbers)} cases, {time.perf_counter() - start:.0f} s")  # fmt: skip
    return int(not good or bool(wrong))


def _sound(options: argparse.Namespace) -> int:
    start, mode = time.perf_counter(), f"--sound --seed {options.seed}"
    numbers = [options.case] if options.case is not None else range(options.count)
    case = partial(schedules.sound_case, options.seed)
    cells: Counter[str] = Counter()
    for record in schedules.run_all(case, numbers, options.jobs, options.state, mode):
        cells[record.cell] += 1
        if record.cell in ("refused", "broken"):
            print(f"{record.cell}: case {record.number}: {record.text}")
    bad = cells["refused"] + cells["broken"]
    passed = time.perf_counter() - start
    print(f"sound schedules: {cells['accepted']} accepted, {bad} refused, {mode}, {passed:.0f} s")
    return int(bad > 0)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("mutants", __doc__)
    parser.add_argument("--count", type=int, default=2000, help="how many mutants (2000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--most", type=int, default=64, help="the most ranks of a program (64)")
    parser.add_argument("--valid", action="store_true", help="prove all valid programs instead")
    parser.add_argument("--schedules", action="store_true", help="mutants of schedules")
    parser.add_argument("--sound", action="store_true", help="schedules of the compiler instead of mutants")
    parser.add_argument("--jobs", type=int, default=2, help="processes, for schedules (2)")
    parser.add_argument("--share", type=float, default=1.0, help="of the schedules to break, how many (1.0)")
    parser.add_argument("--state", type=Path, help="what is done is kept in this file")
    parser.add_argument("--keep", type=Path, help="a folder for mutants that escape")
    parser.add_argument("--case", type=int, help="this case only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
