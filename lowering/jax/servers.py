"""What a worker sends to servers and gets from them, as arrays: leaves in flat buffers, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from commplan.diagnostics import Span, fail
from commplan.ir import schedule as ir
from commplan.ir.analysis.server_ops import ServerOp
from commplan.lowering.jax import ops
from commplan.lowering.jax.pytree import Tree
from commplan.lowering.jax.typing_shim import jnp
from commplan.protocol.sites import Buffer, Site

Array = Any


class ServerAccess(Protocol):
    """The servers of a plan, as one worker reaches them."""

    def site(self, phase: str, result: str) -> Site:
        """The site of the op of `phase` that makes `result` first."""
        ...

    def up(self, site: Site) -> tuple[Buffer, ...]:
        """What this worker sends there."""
        ...

    def begin(self, site: Site, xs: Sequence[Array]) -> Callable[[], list[Array]]:
        """Send the flat arrays `xs`, as `up` says; what is returned waits for those of the site's `down`."""
        ...

    def close(self, why: str = "") -> None:
        """Tell the servers that this worker is done."""
        ...


def begin(
    service: ServerAccess,
    phase: str,
    op: ServerOp,
    values: Mapping[str, ir.Value],
    env: Mapping[str, Tree],
    file: str,
) -> Callable[[], dict[str, tuple[Array, ...]]]:
    """Start a request; what is returned waits for its answer: the leaves of each result that workers get.

    Raises CP0805 for a buffer of 64-bit numbers if JAX has none.
    """
    site = service.site(phase, ir.results(op)[0])
    for buffer in (*service.up(site), *site.down):
        ops.checked_dtype(buffer.dtype, site.result, op.span, file)
    finish = service.begin(site, [packed(buffer, env) for buffer in service.up(site)])
    # What has no elements is in no message, and comes back all the same.
    given = () if site.kind == "put" or any(b.what == "token" for b in site.down) else (site.result,)
    return lambda: unpacked(site.down, finish(), values, given)


def packed(buffer: Buffer, env: Mapping[str, Tree]) -> Array:
    """The flat array of `buffer`, [size] of its dtype."""
    dtype = ops.jax_dtype(buffer.dtype)
    if buffer.what == "token":
        return jnp.zeros((buffer.size,), dtype)
    leaves = env[buffer.value].leaves
    pieces = [leaves[place].reshape(-1).astype(dtype) for place in buffer.leaves]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def unpacked(
    buffers: Sequence[Buffer], arrays: Sequence[Array], values: Mapping[str, ir.Value], given: Sequence[str]
) -> dict[str, tuple[Array, ...]]:
    """The leaves, by value, of what came in `buffers`, of the values `given` at least; empty ones, which are
    never sent, besides."""
    leaves_of: dict[str, list[Array | None]] = {ref: [None] * len(values[ref].leaves) for ref in given}
    for buffer, array in zip(buffers, arrays, strict=True):
        if buffer.what == "token":
            continue
        leaves = values[buffer.value].leaves
        own = leaves_of.setdefault(buffer.value, [None] * len(leaves))
        at = 0
        for place in buffer.leaves:
            leaf = leaves[place]
            own[place] = array[at : at + leaf.size].reshape(leaf.shape).astype(ops.jax_dtype(leaf.dtype))
            at += leaf.size
    return {
        ref: tuple(
            jnp.zeros(leaf.shape, ops.jax_dtype(leaf.dtype)) if x is None else x
            for x, leaf in zip(own, values[ref].leaves, strict=True)
        )
        for ref, own in leaves_of.items()
    }


def refuse(span: Span, file: str) -> NoReturn:
    """Raises CP0851: on a mesh of devices there are no servers."""
    message = "the plan keeps states on servers, which are processes of their own, and a mesh has none"
    note = (
        "bind it to an mpi4py communicator, under mpirun: the workers' ranks first, then one for each server"
    )
    remedy = "or declare the states without `on`: the devices of the mesh then keep them, in shards"
    fail("CP0851", message, note, remedy, span=span, file=file)
