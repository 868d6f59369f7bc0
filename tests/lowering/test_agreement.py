"""Random plans: their meaning, the oracle and JAX agree, bitwise for integers.

`python -m bench.agreement` runs many more of them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support import interpreter
from support.agreement import DisagreementError, Ways, check
from support.campaign import parameters
from support.random_case import Case, make_case

from commplan.ir import schedule as ir

pytestmark = pytest.mark.usefixtures("short_search")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("block", parameters(range(1), range(1, 5)))
def test_the_oracle_does_what_random_plans_mean(block: int):
    for seed in range(block * 50, (block + 1) * 50):
        case = make_case(seed, builtins=True)
        try:
            check(case, jax=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}, passes {case.pipeline}\n{case.text}") from error


@pytest.mark.parametrize("seed", parameters(range(1000, 1012), range(1012, 1060)))
def test_jax_agrees_with_the_oracle(seed: int):
    case = make_case(seed, builtins=True)
    try:
        check(case, jax=True)
    except Exception as error:
        raise AssertionError(f"seed {seed}, passes {case.pipeline}\n{case.text}") from error


def test_schedules_for_machines_mean_the_same():
    for seed in range(5000, 5040):
        case = make_case(seed, builtins=True)
        try:
            check(case, jax=False, machines=True)
        except Exception as error:
            raise AssertionError(f"seed {seed}, passes {case.pipeline}\n{case.text}") from error


def test_cases_depend_on_their_seed_alone():
    first, second = make_case(5), make_case(5)
    assert (first.text, first.pipeline, first.order) == (second.text, second.pipeline, second.order)
    assert len({make_case(seed).text for seed in range(30)}) == 30


def test_a_wrong_schedule_is_noticed():
    """The judge detects errors: a maximum instead of a sum, a wrong root and a wrong divisor."""
    text = """
plan judged
axis a = 3
input x : f32[4] per a
each step {
    y = reduce x over a by mean
    z = broadcast x over a from 2
    output y, z
}
at start { }
"""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    case = Case(0, text, {"a": 3}, {}, {"x": x}, {"x": ("a",)}, {"x": ()}, {}, {}, None)
    check(case, jax=False)
    changes = [
        lambda op: isinstance(op, ir.Collective) and op.kind == "all_reduce" and {"op": "max"},
        lambda op: isinstance(op, ir.Collective) and op.kind == "broadcast" and {"root": 1},
        lambda op: isinstance(op, ir.Scale) and {"by": 4.0},
    ]
    for change in changes:
        ways = Ways(case)
        phases = [
            replace(phase, ops=tuple(replace(op, **(change(op) or {})) for op in phase.ops))
            for phase in ways.schedule.phases
        ]
        ways.schedule = replace(ways.schedule, phases=tuple(phases))
        with pytest.raises(DisagreementError, match="step: output"):
            ways.check_oracle()


def test_the_campaign_sums_up():
    words = ["-m", "bench.agreement", "--plans", "5", "--seed", "7", "--jax-every", "5"]
    done = subprocess.run(
        [*interpreter.words(), *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = "agreement: 5 of 5 plans agree (1 under JAX, all under the oracle), seeds 7..11"
    assert done.stdout.splitlines()[-1] == summary
