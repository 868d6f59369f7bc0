"""Edits of schedule files, and whether the accepted ones compute the same.

    python -m bench.edits --edits 60000 --seed 0            # all plans
    python -m bench.edits --edits 200 --plans loads,moves   # some
    python -m bench.edits --edits 60000 --part 1/3          # every third schedule

Schedules of plans without servers are changed in one or two fields, saved and loaded. Accepted edits are
compared with the unedited schedule (`judge`). Parts of a campaign share nothing and may run at the same time.
Ends with a table of accepted edits by field; exit 1 if one of them gives another result.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="edits-") as folder:
        # Read by JAX when it is first imported. Edits often compile to the same program: a cache keeps it.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        if os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled") == f"{folder}/compiled":
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # JAX warns of f64 values, which it makes f32
            return _campaign(options)


def _campaign(options: argparse.Namespace) -> int:
    from bench.edits.generate import Generator  # noqa: PLC0415 - after the settings that JAX reads
    from bench.edits.judge import Judge  # noqa: PLC0415 - as above
    from bench.edits.plans import PLANS, bases  # noqa: PLC0415 - as above
    from commplan.diagnostics import CommplanError  # noqa: PLC0415 - as above
    from commplan.ir.serialization.canonical_json import encode  # noqa: PLC0415 - as above
    from commplan.verify import load_schedule  # noqa: PLC0415 - as above

    names = options.plans.split(",") if options.plans else [plan.name for plan in PLANS]
    known = list(bases(tuple(plan for plan in PLANS if plan.name in names)))
    generator = Generator([base.schedule for base in known], options.seed)
    part, parts = map(int, options.part.split("/"))
    refused, decided, fields = Counter[str](), Counter[str](), Counter[str]()
    findings: Counter[tuple[str, str]] = Counter()
    count = programs = 0
    start = time.monotonic()

    def found(label: str, words: str, difference: str) -> None:
        findings[label, difference.partition(":")[0].partition(" ")[2][:40]] += 1
        print(f"{words}\n    {difference}", flush=True)

    for number, base in enumerate(known):
        if number < options.first or number % parts != part - 1:
            continue
        judge, before = Judge(base), (count, Counter(decided), findings.total())
        for edit in itertools.islice(generator.edits(base.schedule, number), -(-options.edits // len(known))):
            count += 1
            words, label = f"{base.name}: {edit.words}", " ".join(sorted(set(edit.labels)))
            try:
                loaded = load_schedule(encode(edit.schedule))
            except CommplanError as error:
                refused[error.diagnostics[0].code] += 1
                continue
            except Exception as error:  # noqa: BLE001 - a file must not do that
                found(label, words, f"loading fails: {type(error).__name__}: {error}")
                continue
            way, difference = judge(loaded)
            decided[way] += 1
            fields[label] += 1
            if difference:
                found(label, words, f"{way}: {difference}")
        programs += judge.programs
        if judge.by_jax.failed:
            found("unedited", base.name, f"does not run unedited: {judge.by_jax.failed}")
        if options.verbose:
            print(
                f"# {number} of {len(known)}, {base.name}: {count - before[0]} edits, accepted:"
                f" {dict(decided - before[1])}, {findings.total() - before[2]} different;"
                f" {time.monotonic() - start:.0f} s",
                flush=True,
            )  # fmt: skip
    for label, times in fields.most_common(options.show):
        print(f"{times:6} accepted: {label}")
    for (label, kind), times in findings.most_common():
        print(f"{times:6} DIFFERENT: {label}: {kind}")
    print(
        f"edits: {count} of {len(known)} schedules, {sum(refused.values())} refused ({dict(refused)}),"
        f" {sum(decided.values())} accepted (decided by {dict(decided)}; {programs} different programs under"
        f" JAX), {sum(findings.values())} different,"
        f" seed {options.seed}, part {options.part}"
    )
    return 1 if findings else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.edits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--edits", type=int, default=2000, help="how many edits, of all schedules together (2000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the edits (0)")
    parser.add_argument("--plans", default="", help="names of plans, separated by commas (all)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first schedule (0)")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th schedule of every N (1/1)")
    parser.add_argument("--show", type=int, default=40, help="how many fields to list (40)")
    parser.add_argument("--verbose", action="store_true", help="report progress after each schedule")
    return parser


if __name__ == "__main__":
    sys.exit(main())
