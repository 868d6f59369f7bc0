"""The example plans: their meaning, the oracle and JAX agree."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import interpreter
from support.agreement import Ways
from support.example_cases import AXES, example
from support.random_case import Case
from support.random_stages import Spec

from commplan.pytree import flatten


def agree(name: str) -> None:
    case = example(name)
    ways = Ways(case)
    answers = ways.check_oracle()
    compared = [leaf for outputs, state in answers.values() for leaf in flatten((outputs, state))[0]]
    assert compared, f"{name} gives nothing that could differ"
    ways.check_jax(answers)


@pytest.mark.parametrize("name", [name for name in AXES if name != "two_level"])
def test_examples_agree(name: str):
    agree(name)


LOADED = """
plan loaded
axis data = 4
source records : f32[3]
fn norm(f32[3]) -> f32 on device
input grads : tree partial data
each step {
    x, n  = load records batch 8 split data visit exactly_once seed 1
    sizes = map norm(x)
    grads = reduce grads over data by mean(weight = n)
    total = reduce n over data by sum
    output grads, total, sizes
}
"""


def test_a_count_that_was_loaded_weighs_a_mean():
    """The phase takes the source-only value `n`; an empty share of the last batch weighs nothing."""
    grads = {"w": np.arange(20, dtype=np.float32).reshape(4, 5)}
    for count in ([2, 2, 1, 0], [0, 0, 0, 0]):
        inputs = {"grads": grads, "n": np.array(count, np.int32)}
        varying = {"grads": ("data",), "n": ("data",)}
        trees = {"grads": {"w": Spec((5,), "float32")}}
        functions = {"norm": lambda record: (record * record).sum()}
        case = Case(
            0, LOADED, {"data": 4}, trees, inputs, varying, dict.fromkeys(inputs, ()), functions, {}, None
        )
        ways = Ways(case)
        answers = ways.check_oracle()
        ways.check_jax(answers)
        outputs = answers["step"][0]
        assert outputs.keys() == {"grads", "total"}
        expected = (np.array(count)[:, None] * grads["w"]).sum(0) / max(sum(count), 1)
        np.testing.assert_allclose(outputs["grads"]["w"], expected, rtol=1e-6)
        assert outputs["total"] == sum(count)


def test_two_level_agrees_on_its_thirty_two_devices():
    folder = Path(__file__).resolve().parent
    script = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]\n"
        "import test_agreement_examples as tests\n"
        "tests.agree('two_level')\n"
        "import jax; assert len(jax.devices()) == 32\n"
    )
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "32", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*interpreter.words(environment), "-c", script],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
