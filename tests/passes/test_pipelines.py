"""Whatever passes run, a schedule means what its plan means: judged by the oracle on random plans.

`python -m bench.agreement --machines --jax-every 0` runs many more of them.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agreement import Ways, check
from support.random_case import OPTIONS, make_case

from commplan.passes.pipeline.registry import PASSES


@st.composite
def pipelines(draw: st.DrawFn) -> str:
    """Any subset of the passes in their order, with any options."""
    choices = [name + draw(st.sampled_from(OPTIONS.get(name, ("",)))) for name in PASSES]
    return ",".join(choice for choice in choices if draw(st.booleans()))


@settings(max_examples=60)
@given(st.integers(0, 10**9), pipelines())
def test_every_pipeline_keeps_the_meaning(seed: int, pipeline: str) -> None:
    check(dataclasses.replace(make_case(seed), pipeline=pipeline), jax=False)


@pytest.mark.parametrize("seed", range(12))
def test_running_a_pass_again_changes_nothing_that_matters(seed: int) -> None:
    Ways(
        dataclasses.replace(make_case(seed), pipeline="bucket,bucket,decompose,decompose,wire,wire")
    ).check_oracle()
