"""Buffers that are never made: where a collective takes arrays as if they lay one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commplan.ir import schedule as ir
from commplan.lowering.jax import ops
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.trees import LEAF, Tree

KINDS = ("all_reduce", "broadcast")  # whose results are like their operands


def loose(chosen: Sequence[ir.Op], values: Mapping[str, ir.Value]) -> frozenset[str]:
    """The buffers, packed and reduced or broadcast, that are only packed for that and only unpacked after it.

    They hold whole leaves without gaps, and the collective is one call.
    """
    readers: dict[str, list[ir.Op]] = {}
    for op in chosen:
        for ref in ir.operands(op):
            readers.setdefault(ref, []).append(op)
    packs = {op.result: op for op in chosen if isinstance(op, ir.Pack)}
    found: set[str] = set()
    for op in chosen:
        if not isinstance(op, ir.Collective) or op.form != "call" or op.kind not in KINDS:
            continue
        pack, after = packs.get(op.operand), readers.get(op.result, [])
        if pack is None or len(readers[op.operand]) > 1 or not _holds_leaves(pack, values):
            continue
        if after and all(isinstance(one, ir.Unpack) and one.ways == 1 for one in after):
            found |= {op.operand, op.result}
    return frozenset(found)


def _holds_leaves(pack: ir.Pack, values: Mapping[str, ir.Value]) -> bool:
    """Whether a buffer is several whole leaves and nothing else."""
    whole = all(
        part.start == 0 and part.size == values[part.value].leaves[part.leaf].size for part in pack.parts
    )
    filled = sum(part.size for part in pack.parts) == values[pack.result].leaves[0].size
    return pack.ways == 1 and whole and filled and sum(part.size > 0 for part in pack.parts) > 1


def run(op: ir.Op, env: dict[str, Tree], loose: frozenset[str], backend: Backend) -> bool:
    """Run `op` on the leaves of a buffer in `loose`; False where it is to be run as always: another op, or a
    backend that wants the buffer, which is made then."""
    if isinstance(op, ir.Pack) and op.result in loose:
        env[op.result] = Tree(ops.packed(op, env), LEAF)
        return True
    if not isinstance(op, ir.Collective) or op.operand not in loose:
        return False
    leaves = env[op.operand].leaves
    done = backend.together(leaves, op)
    if done is None:
        env[op.operand] = Tree((ops.joined(leaves),), LEAF)
        return False
    env[op.result] = Tree(tuple(done), LEAF)
    return True
