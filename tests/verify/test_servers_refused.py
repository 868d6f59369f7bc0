"""Operations that servers do not support are errors of the plan."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

import commplan
from commplan.diagnostics import CommplanError, Span
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType
from commplan.protocol import units

PLAN = """plan p
axis rack = 2
axis worker = 2
server hub = 1
input params : tree per rack, worker
input grads : tree partial rack, worker
state weights : tree on hub
fn sgd(tree, tree) -> tree on device elementwise
at start {
    weights = broadcast params over rack, worker from 0
}
each step {
    weights = exchange grads into weights with sgd over rack, worker by mean
    output weights
}
"""
MEETS = "pull, weights = elastic params with weights over rack, worker by async(eta = 0.1, rho = 0.1)\n"
CASES = {
    "CP0767": PLAN.replace("    output weights", f"    {MEETS}    output pull"),
    "CP0729": PLAN.replace("partial rack, worker", "partial worker").replace(
        "sgd over rack, worker", "sgd over worker"
    ),
}


def test_a_weight_may_be_called_as_what_an_optimizer_counts_in():
    weights = (Leaf("count", (), DType.F32), Leaf("w", (3,), DType.F32))
    state_leaves = (
        Leaf("0/count", (), DType.I32),
        *(replace(leaf, path=f"0/mu/{leaf.path}") for leaf in weights),
    )
    whole = units.layout_weights(weights, [leaf.dtype for leaf in weights], 1, None)
    matched = units.layout_auxiliary_state(state_leaves, weights, whole, Span(0, 0, 0, 0), "")
    assert (matched.scalars, [[part.leaves for part in slot] for slot in matched.slots]) == ((0,), [[(1, 2)]])


@pytest.mark.parametrize("code", CASES)
def test_it_has_its_own_code_and_line(code: str):
    tree = {"w": np.zeros(3, np.float32)}
    with pytest.raises(CommplanError) as error:
        commplan.loads(CASES[code]).compile(backend="mpi", shapes={"params": tree, "grads": tree})
    (diagnostic,) = error.value.diagnostics
    assert (diagnostic.code, diagnostic.span is not None and diagnostic.span.line > 12) == (code, True)
    assert "schedule" not in str(error.value)
