"""Edits of schedule files, and whether the accepted ones compute the same.

    python -m bench.edits --edits 60000 --seed 0           # all plans
    python -m bench.edits --edits 200 --plans loads,random # some

Schedules of plans with every verb and option are changed in one or two fields, saved and loaded. Those
that are accepted are compared with the unedited schedule: by fields, by the oracle, under JAX (see `judge`).
Ends with a table of accepted edits by field; exit 1 if one of them gives another result.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # Read by JAX when it is first imported.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    from bench.edits.generate import Generator  # noqa: PLC0415 - after the settings that JAX reads
    from bench.edits.judge import Judge  # noqa: PLC0415 - as above
    from bench.edits.plans import PLANS, bases  # noqa: PLC0415 - as above
    from commplan.diagnostics import CommplanError  # noqa: PLC0415 - as above
    from commplan.ir.serialization.canonical_json import encode  # noqa: PLC0415 - as above
    from commplan.verify import load_schedule  # noqa: PLC0415 - as above

    names = options.plans.split(",") if options.plans else [plan.name for plan in PLANS]
    known = list(bases(tuple(plan for plan in PLANS if plan.name in names)))
    generator = Generator([base.schedule for base in known], options.seed)
    share = -(-options.edits // len(known))
    refused: Counter[str] = Counter()
    decided: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    findings: Counter[tuple[str, str]] = Counter()
    count = 0
    start = time.monotonic()
    for number, base in enumerate(known):
        judge = Judge(base, options.runs)
        for edit in itertools.islice(generator.edits(base.schedule, number), share):
            count += 1
            try:
                loaded = load_schedule(encode(edit.schedule))
            except CommplanError as error:
                refused[error.diagnostics[0].code] += 1
                continue
            except Exception as error:  # noqa: BLE001 - a file must not do that
                findings[" ".join(edit.labels), f"loading: {type(error).__name__}"] += 1
                print(f"{base.name}: {edit.words}\n    {type(error).__name__}: {error}", flush=True)
                continue
            way, difference = judge(loaded, edit.labels)
            decided[way] += 1
            fields[" ".join(sorted(set(edit.labels)))] += 1
            if difference:
                findings[" ".join(edit.labels), difference.partition(":")[0].partition(" ")[2][:40]] += 1
                print(f"{base.name}: {edit.words}\n    {way}: {difference}", flush=True)
        failed = judge.by_jax.failed if base.schedule.backend == "jax" and options.runs else ""
        if failed:
            print(f"{base.name} does not run unedited: {failed}", flush=True)
        if options.verbose:
            seconds = time.monotonic() - start
            print(f"# {number + 1}/{len(known)} {base.name}, {count} edits, {seconds:.0f} s", file=sys.stderr)
    for label, times in fields.most_common(options.show):
        print(f"{times:6} accepted: {label}")
    for (label, kind), times in findings.most_common():
        print(f"{times:6} DIFFERENT: {label}: {kind}")
    print(
        f"edits: {count} of {len(known)} schedules, {sum(refused.values())} refused ({dict(refused)}),"
        f" {sum(decided.values())} accepted (decided by {dict(decided)}), {sum(findings.values())} different,"
        f" seed {options.seed}"
    )
    return 1 if findings else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.edits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--edits", type=int, default=2000, help="how many edits, of all schedules together (2000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the edits (0)")
    parser.add_argument("--plans", default="", help="names of plans, separated by commas (all)")
    parser.add_argument(
        "--runs", type=int, default=2, help="different programs run under JAX for each schedule and field (2)"
    )
    parser.add_argument("--show", type=int, default=40, help="how many fields to list (40)")
    parser.add_argument("--verbose", action="store_true", help="say after each schedule how far it is")
    return parser


if __name__ == "__main__":
    sys.exit(main())
