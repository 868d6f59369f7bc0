"""Whether the compiler's choice is the best by its prediction: random plans, every alternative pinned.

    python -m bench.choices --cases 2000
    python -m bench.choices --seed 17 --cases 1      # one case, every pin that is faster
    python -m bench.choices --seed 1000 --cases 1000     # the second half, in another process

A case is a pure function of its seed: a plan, shapes, a machine and a backend (`bench.choice_cases`). Each
`via`, order of levels, bucket size and message size is written into the plan of each stage, one at a time.
The exposed time of an alternative, as `commplan simulate` prints it, must not be more than 2% below that of
the choice. Ends with a summary; exit 1 if a pin is faster.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import commplan
from bench.choice_cases import BUCKETS, CHUNKS, Case, case
from commplan.cost import Predictor, predict
from commplan.diagnostics import CommplanError
from commplan.topology import Topology, parse_topology

MARGIN = 0.02
ALGORITHMS = (
    "native", "ring", "recursive_doubling", "halving_doubling", "binomial_tree", "double_tree", "torus",
    "bruck", "pairwise", "chain", "scatter_gather",
)  # fmt: skip
LEVEL_ALGORITHMS = ("ring", "native", "halving_doubling")


class Pin(NamedTuple):
    """One alternative: its stage, its text, and the exposed seconds with it and without."""

    seed: int
    stage: int
    text: str
    pinned: float
    chosen: float

    @property
    def gain(self) -> float:
        return 1 - self.pinned / self.chosen if self.chosen else 0.0


def alternatives(plan_case: Case) -> Iterator[tuple[int, str, str]]:
    """Stage, algorithm and option of every pin."""
    rng = random.Random(plan_case.seed)
    for stage in range(len(plan_case.stages)):
        for name in ALGORITHMS:
            yield stage, name, ""
        if len(plan_case.axes) > 1:
            for keys in permutations(plan_case.axes):
                yield stage, f"hierarchical({', '.join(keys)})", ""
                named = ", ".join(f"{key} = {rng.choice(LEVEL_ALGORITHMS)}" for key in keys)
                yield stage, f"hierarchical({named})", ""
        for size in BUCKETS:
            yield stage, "", f"bucket = {size}"
        for size in CHUNKS:
            yield stage, "", f"chunk = {size}"


def exposed(plan_case: Case, text: str, topology: Topology) -> float:
    """Seconds of the phase that are exposed, as compiled from `text`."""
    program = commplan.loads(text).compile(
        shapes=plan_case.shapes, topology=topology, backend=plan_case.backend
    )
    predictor = Predictor(topology, program.schedule.axes, backend=plan_case.backend)
    return predict(program.schedule, predictor).phases[0].exposed


def pins(plan_case: Case, sample: int | None = None) -> Iterator[Pin]:
    """Every pin that the plan may have, or a sample of so many."""
    every = list(alternatives(plan_case))
    tried = every if sample is None else random.Random(plan_case.seed).sample(every, sample)
    topology = parse_topology(plan_case.topology)
    chosen = exposed(plan_case, plan_case.text(), topology)
    for stage, via, option in tried:
        try:
            pinned = exposed(plan_case, plan_case.text(stage, via, option), topology)
        except CommplanError:  # no such algorithm for the stage
            continue
        yield Pin(plan_case.seed, stage, via or option, pinned, chosen)


def faster_pins(plan_case: Case, sample: int) -> list[Pin]:
    """Those of a sample of pins that are faster than the choice by more than `MARGIN`."""
    return [pin for pin in pins(plan_case, sample) if pin.gain > MARGIN]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tried, failed = 0, Counter[str]()
    worst: Pin | None = None
    cases = 0
    for seed in range(options.seed, options.seed + options.cases):
        tried_pins = list(pins(case(seed)))
        tried += len(tried_pins)
        best = max(tried_pins, key=lambda pin: pin.gain)
        worst = best if worst is None or best.gain > worst.gain else worst
        faster = [pin for pin in tried_pins if pin.gain > MARGIN]
        cases += bool(faster)
        failed.update(pin.text.partition("(")[0].partition(" ")[0] for pin in faster)
        for pin in faster:
            print(
                f"seed {pin.seed} stage {pin.stage}: {pin.text} exposes {pin.pinned:.6g} s, "
                f"the choice {pin.chosen:.6g} s: {pin.gain:.1%}",
                flush=True,
            )
    assert worst is not None
    print(f"{options.cases} cases, {tried} pins: a pin of {cases} cases is more than {MARGIN:.0%} faster")
    print(f"by kind: {dict(failed)}; the best is {worst.gain:.2%} faster (seed {worst.seed}: {worst.text})")
    return int(bool(cases))


if __name__ == "__main__":
    raise SystemExit(main())
