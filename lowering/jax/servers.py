"""What a worker sends to servers and gets from them, as arrays: leaves in flat buffers, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from commplan.diagnostics import Span, fail
from commplan.ir import schedule as ir
from commplan.lowering.jax import ops
from commplan.lowering.jax.trees import Tree
from commplan.lowering.jax.untyped import jnp
from commplan.protocol.sites import Buffer, Site
from commplan.protocol.survey import server_op

Array = Any
ServerOp = ir.Exchange | ir.Elastic | ir.Put | ir.Get


class Service(Protocol):
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


def asks(op: ir.Op, values: Mapping[str, ir.Value]) -> ServerOp | None:
    """`op`, where it talks with servers."""
    asking = isinstance(op, ir.Exchange | ir.Elastic | ir.Put | ir.Get) and server_op(op, dict(values))
    return op if asking else None  # pyright: ignore[reportReturnType]


def reads(op: ServerOp) -> tuple[str, ...]:
    """The operands that a worker holds itself."""
    match op:
        case ir.Exchange():
            held = op.states
        case ir.Elastic():
            held = (op.center,)
        case ir.Get():
            held = (op.operand,)
        case ir.Put():
            held = ()
    return tuple(ref for ref in ir.operands(op) if ref not in held)


def begin(
    service: Service, phase: str, op: ServerOp, values: Mapping[str, ir.Value], env: Mapping[str, Tree]
) -> Callable[[], dict[str, tuple[Array, ...]]]:
    """Start a request; what is returned waits for its answer: the leaves of each result that workers get."""
    site = service.site(phase, ir.results(op)[0])
    finish = service.begin(site, [packed(buffer, env) for buffer in service.up(site)])
    return lambda: unpacked(site.down, finish(), values)


def packed(buffer: Buffer, env: Mapping[str, Tree]) -> Array:
    """The flat array of `buffer`, [size] of its dtype."""
    dtype = ops.jax_dtype(buffer.dtype)
    if buffer.what == "token":
        return jnp.zeros((buffer.size,), dtype)
    leaves = env[buffer.value].leaves
    pieces = [leaves[place].reshape(-1).astype(dtype) for place in buffer.leaves]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def unpacked(
    buffers: Sequence[Buffer], arrays: Sequence[Array], values: Mapping[str, ir.Value]
) -> dict[str, tuple[Array, ...]]:
    """The leaves, by value, of what came in `buffers`; empty ones, which are never sent, besides."""
    found: dict[str, list[Array | None]] = {}
    for buffer, array in zip(buffers, arrays, strict=True):
        if buffer.what == "token":
            continue
        leaves = values[buffer.value].leaves
        own = found.setdefault(buffer.value, [None] * len(leaves))
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
        for ref, own in found.items()
    }


def refuse(span: Span, file: str) -> NoReturn:
    """Raises CP0851: on a mesh of devices there are no servers."""
    fail(
        "CP0851",
        "the plan keeps states on servers, which are processes of their own, and a mesh has none",
        "bind it to an mpi4py communicator, under mpirun: the workers' ranks first, then one for each server",
        "or declare the states without `on`: the devices of the mesh then keep them, in shards",
        span=span,
        file=file,
    )
