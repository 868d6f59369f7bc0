"""`run.sharding`: how the arrays of a value lie on the mesh of a run."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding

from commplan.lowering.jax.layout import leaf_specs
from commplan.lowering.jax.pytree import build
from commplan.runtime.context import Context


def sharding(context: Context, name: str) -> Any:
    """One sharding, or of a value of type tree a tree of them; raises what `run.sharding` does."""
    if context.machine.layout != "global":
        message = "a run on the ranks of a communicator has no shardings"
        context.fail(
            "CP0874", message, "each rank's arrays are on its own device: run.place says which it is"
        )
    value = context.named(name)
    if value.placement.partial:
        message = f"`{name}` is {value.placement}, and a global array has no place for that"
        context.fail("CP0806", message, "it is there inside run.spmd alone, where a phase reduces it")
    own = [NamedSharding(context.machine.mesh, spec) for spec in leaf_specs(value)]
    if value.kind != "tree":
        return own[0]
    return build([leaf.path for leaf in value.leaves], own, context.structures)
