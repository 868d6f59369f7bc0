"""The schedules of the example plans, as text: changes of the compiler's output appear here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

import commplan
from commplan.ir.serialization.text import print_schedule
from commplan.verify import verify

FOLDER = Path(__file__).parents[2] / "examples" / "plans"
NAMES = """
data_parallel diloco easgd_async easgd_hogwild easgd_round_robin easgd_sync ensemble_duplicated ensemble_rates
ensemble_readers ensemble_shared ensemble_training parameter_hub parameter_server_dedicated sharded_update
streaming_diloco two_level weighted_mean
"""
PLANS = [FOLDER / f"{name}.plan" for name in NAMES.split()]
TREE = {
    "b": {"shape": [5], "dtype": "f32"},
    "s": {"shape": [], "dtype": "f32"},
    "w": {"shape": [3, 4], "dtype": "f32"},
}


def compiled(path: Path) -> commplan.Program:
    plan = commplan.load(path)
    names = [ref.rpartition(".")[0] for ref in plan.graph.inputs if str(plan.graph.value(ref).type) == "tree"]
    divisible = {name: leaf for name, leaf in TREE.items() if leaf["shape"]}
    in_fragments = any(phase.fragments > 1 for phase in plan.graph.phases)
    return plan.compile(shapes=dict.fromkeys(names, divisible if in_fragments else TREE))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_schedule_of_an_example(path: Path, snapshot: SnapshotAssertion) -> None:
    schedule = compiled(path).schedule
    assert verify(schedule) == ()
    # Another test covers the plan that it carries.
    text = print_schedule(msgspec.structs.replace(schedule, origin=None))
    # Not covered here: digests of other contents, and the location of the file.
    lines = [line for line in text.splitlines() if not line.startswith(("  plan_digest", "  file"))]
    assert "\n".join(lines) == snapshot
