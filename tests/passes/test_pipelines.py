"""Whatever passes run, a schedule means what its plan means: judged by the oracle on random plans."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.agreement import Ways
from support.random_case import make_case

from commplan.diagnostics import CommplanError
from commplan.passes.pipeline.manager import Pipeline


@st.composite
def pipelines(draw: st.DrawFn) -> str:
    """Any subset of the passes in their order, with any options."""
    size = draw(st.sampled_from([1, 5, 16, 40, 1000, 25 * 1024**2]))
    coalesce = draw(st.sampled_from(["true", "false"]))
    choices = [
        draw(st.sampled_from(["share", "share{design=none}", "share{design=duplicate}"])),
        f"bucket{{max={size}, coalesce={coalesce}}}",
        "decompose",
        "wire",
        draw(st.sampled_from(["overlap", "overlap{chain=false}"])),
    ]
    return ",".join(one for one in choices if draw(st.booleans()))


@settings(max_examples=60)
@example(2573, "decompose")  # a mean in another type, level by level, which nothing writes out
@given(st.integers(0, 10**9), pipelines())
def test_every_pipeline_keeps_the_meaning(seed: int, pipeline: str) -> None:
    try:
        ways = Ways(dataclasses.replace(make_case(seed), pipeline=pipeline))
    except CommplanError as error:  # without `wire` no sum is made in another type than its operand's
        assert "wire" not in pipeline
        assert {problem.code for problem in error.diagnostics} == {"CP0766"}
        assert "it is `wire` that makes sums in such types" in str(error)
        return
    assert ways.schedule.pipeline == ",".join(filter(None, ["lower", str(Pipeline.parse(pipeline))]))
    ways.check_oracle()


@pytest.mark.parametrize("seed", range(12))
def test_running_a_pass_again_changes_nothing_that_matters(seed: int) -> None:
    Ways(
        dataclasses.replace(make_case(seed), pipeline="bucket,bucket,decompose,decompose,wire,wire")
    ).check_oracle()
