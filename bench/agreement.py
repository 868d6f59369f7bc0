"""The long agreement campaign: random plans through their meaning, the oracle and JAX.

    python -m bench.agreement --plans 2000 --seed 0            # JAX compared on every plan
    python -m bench.agreement --plans 20000 --jax-every 0      # meaning and oracle only: fast
    python -m bench.agreement --plans 2000 --jax-every 0 --machines   # compiled for machines too
    python -m bench.agreement --plans 500 --x64                # f64 and i64 leaves too

A case is a pure function of its seed, so a failure is repeated with `--seed N --plans 1`. Ends with
one summary line; exit 1 if any plan disagreed.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections import Counter
from collections.abc import Sequence

from bench.harness.arguments import program_parser

NARROW = ("f32", "bf16", "f16", "i32", "u8", "bool")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # Read by JAX when it is first imported, which the comparison does.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    if options.x64:
        os.environ["JAX_ENABLE_X64"] = "1"
    from tests.support.agreement import check  # noqa: PLC0415 - after the settings that JAX reads
    from tests.support.random_case import make_case  # noqa: PLC0415

    dtypes = (*NARROW, "f64", "i64") if options.x64 else NARROW
    failed: list[int] = []
    kinds: Counter[str] = Counter()
    under_jax = 0
    for count, seed in enumerate(range(options.seed, options.seed + options.plans)):
        jax = options.jax_every > 0 and count % options.jax_every == 0
        under_jax += jax
        case = make_case(seed, dtypes, builtins=seed % 2 == 0)
        try:
            check(case, jax=jax, machines=options.machines)
        except Exception as error:  # noqa: BLE001 - whatever a case raises is a finding
            failed.append(seed)
            kinds[f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"] += 1
            if len(failed) <= options.show:
                print(f"--- seed {seed}, passes {case.pipeline}\n{case.text}", file=sys.stderr)
                traceback.print_exc(limit=-6)
        if sys.stderr.isatty():
            print(f"\r{count + 1}/{options.plans}, {len(failed)} failed", end="", file=sys.stderr)
    for kind, number in kinds.most_common():
        print(f"{number} x {kind}")
    last = options.seed + options.plans - 1
    print(
        f"agreement: {options.plans - len(failed)} of {options.plans} plans agree ({under_jax} under JAX, all"
        f" under the oracle), seeds {options.seed}..{last}"
        + (f", failed: {' '.join(map(str, failed[:20]))}" if failed else "")
    )
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("agreement", __doc__)
    parser.add_argument("--plans", type=int, default=200, help="how many random plans (200)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument(
        "--jax-every", type=int, default=1, help="run every Nth plan under JAX too; 0: none (1)"
    )
    parser.add_argument(
        "--machines", action="store_true", help="compiled for random machines too, for JAX and for MPI"
    )
    parser.add_argument("--x64", action="store_true", help="64-bit leaves too, with jax_enable_x64")
    parser.add_argument("--show", type=int, default=3, help="how many failures to print in full (3)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
