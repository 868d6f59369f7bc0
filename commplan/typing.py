"""Types used by the classes that `commplan stubs` generates, for type checkers only.

A generated class derives from `TypedRun` and has the phases of one plan as attributes, so that
`run.step(..)`, `out.params` and `run.every[4]` complete and type-check:

    plan: commplan.Plan[plans.Linear] = commplan.load("linear.plan")
    run = plan.compile(mesh, shapes=shapes).bind(mesh)
"""

from commplan.runtime.input.device.batches import Batches
from commplan.runtime.phases import PhaseRun
from commplan.runtime.run import TypedRun

__all__ = ["Batches", "PhaseRun", "TypedRun"]
