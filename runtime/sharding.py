"""`run.sharding`: the shardings of a value on the mesh of a run."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding

from commplan.lowering.jax.layout import leaf_specs
from commplan.lowering.jax.pytree import build
from commplan.runtime.context import Context


def sharding(context: Context, name: str) -> Any:
    """One sharding, or a tree of them for a tree; see `run.sharding`."""
    if context.machine.layout != "global":
        message = "a run on the ranks of a communicator has no shardings"
        context.fail(
            "CP0874", message, "each rank's arrays are on its own device; run.place has the rank's indices"
        )
    value = context.named(name)
    if value.placement.partial:
        message = f"`{name}` is {value.placement}, which a global array cannot represent"
        context.fail("CP0806", message, "use it inside run.spmd only, where a phase reduces it")
    shardings = [NamedSharding(context.machine.mesh, spec) for spec in leaf_specs(value)]
    if value.kind != "tree":
        return shardings[0]
    return build([leaf.path for leaf in value.leaves], shardings, context.structures)
