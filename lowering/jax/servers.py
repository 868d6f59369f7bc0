"""Packs a worker's requests to servers into flat arrays, and unpacks the responses.

`phase.Lowered` calls `begin` for each op that communicates with servers. The backend provides the
`ServerAccess`; only `lowering.mpi` has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

import jax.numpy as jnp
from jax import Array

from commplan.diagnostics import Span, fail
from commplan.ir import schedule as ir
from commplan.ir.analysis.server_ops import ServerOp
from commplan.lowering.jax import ops
from commplan.lowering.jax.pytree import Tree
from commplan.protocol.build_sites import sites
from commplan.protocol.sites import Buffer, Site


class ServerAccess(Protocol):
    """The servers of a plan, from the view of one worker."""

    def site(self, phase: str, result: str) -> Site:
        """The site of the op of `phase` whose first result is `result`."""
        ...

    def up(self, site: Site) -> tuple[Buffer, ...]:
        """The buffers that this worker sends."""
        ...

    def begin(self, site: Site, xs: Sequence[Array]) -> Callable[[], list[Array]]:
        """Send a request.

        Args:
            site: The site of the request.
            xs: The flat arrays to send, one for each buffer of `up`.

        Returns:
            A function that waits for the response: a flat array for each buffer of `site.down`.
        """
        ...

    def close(self, why: str = "") -> None:
        """Notify the servers that this worker is done.

        Args:
            why: The error that ends the worker; empty if it ended normally.
        """
        ...


def begin(
    service: ServerAccess,
    phase: str,
    op: ServerOp,
    values: Mapping[str, ir.Value],
    env: Mapping[str, Tree],
    file: str,
) -> Callable[[], dict[str, tuple[Array, ...]]]:
    """Start a request.

    Args:
        service: The servers.
        phase: The name of the phase.
        op: The op of the request.
        values: The values of the phase, by id.
        env: The values so far, by id.
        file: The plan's file, for errors.

    Returns:
        A function that waits for the response and returns the leaves of each result, by id.

    Raises:
        CommplanError: CP0805 for a buffer of a 64-bit dtype that is disabled in JAX; and the errors of
            `service.begin`.
    """
    site = service.site(phase, ir.results(op)[0])
    for buffer in (*service.up(site), *site.down):
        ops.checked_dtype(buffer.dtype, site.result, op.span, file)
    finish = service.begin(site, [packed(buffer, env) for buffer in service.up(site)])
    # Values without elements are in no message, but must be returned.
    expected = () if site.kind == "put" or any(b.content == "token" for b in site.down) else (site.result,)
    return lambda: unpacked(site.down, finish(), values, expected)


def packed(buffer: Buffer, env: Mapping[str, Tree]) -> Array:
    """The flat array of `buffer`, `buffer.size` elements of its dtype; zeros for a token."""
    dtype = ops.jax_dtype(buffer.dtype)
    if buffer.content == "token":
        return jnp.zeros((buffer.size,), dtype)
    leaves = env[buffer.value].leaves
    pieces = [leaves[index].reshape(-1).astype(dtype) for index in buffer.leaves]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def unpacked(
    buffers: Sequence[Buffer],
    arrays: Sequence[Array],
    values: Mapping[str, ir.Value],
    expected: Sequence[str],
) -> dict[str, tuple[Array, ...]]:
    """The leaves of the values in received buffers, by id.

    Args:
        buffers: The buffers of the response.
        arrays: The flat array of each buffer.
        values: The values of the phase, by id.
        expected: The values that are returned even if no buffer has them. Leaves that no buffer has are empty
            arrays, which are not sent.
    """
    leaves_of: dict[str, list[Array | None]] = {ref: [None] * len(values[ref].leaves) for ref in expected}
    for buffer, array in zip(buffers, arrays, strict=True):
        if buffer.content == "token":
            continue
        leaves = values[buffer.value].leaves
        received = leaves_of.setdefault(buffer.value, [None] * len(leaves))
        offset = 0
        for index in buffer.leaves:
            leaf = leaves[index]
            received[index] = (
                array[offset : offset + leaf.size].reshape(leaf.shape).astype(ops.jax_dtype(leaf.dtype))
            )
            offset += leaf.size
    return {
        ref: tuple(
            jnp.zeros(leaf.shape, ops.jax_dtype(leaf.dtype)) if x is None else x
            for x, leaf in zip(received, values[ref].leaves, strict=True)
        )
        for ref, received in leaves_of.items()
    }


def check_servers(schedule: ir.Schedule) -> None:
    """Raise CP0851 for a plan with states on servers: a mesh of devices has none."""
    roles = sites(schedule)
    if roles.all:
        refuse(roles.all[0].span, schedule.file)


def refuse(span: Span, file: str) -> NoReturn:
    """Raise CP0851: a mesh of devices has no servers."""
    message = "the plan has states on servers, which are separate processes; a mesh has none"
    note = "bind it to an mpi4py communicator, under mpirun: the ranks of the workers first, then the servers"
    remedy = "or declare the states without `on`: the devices of the mesh then store them, in shards"
    fail("CP0851", message, note, remedy, span=span, file=file)
