"""Pack elision: runs collectives of a bucket on its arrays, without creating the bucket's buffer.

`execution.Execution` calls `PackElision.begin` before it runs an op. The backend decides whether it can run
the collective without the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.collective_kinds import NATIVE_KINDS
from commplan.ir.shard_shapes import row_size
from commplan.lowering.jax import ops
from commplan.lowering.jax.backend import Array, Backend, BufferLayout, BufferRun
from commplan.lowering.jax.pytree import LEAF, Tree

Env = dict[str, Tree]


class UnpackedPart(NamedTuple):
    """A part of a buffer.

    Attributes:
        op: The op that unpacks it.
        part: The part: its position in the buffer, and its leaf and position in the result of `op`.
    """

    op: ir.Unpack
    part: ir.Part


@dataclass
class PackElision:
    """The buffers of a phase that need not be created.

    A buffer is packed for one collective only, or it is the result of a collective and only unpacked.

    Attributes:
        backend: The backend.
        values: The values of the phase by id.
        packs: The pack of each operand buffer, by the id of the buffer.
        parts: The parts that are unpacked from each result buffer, in the order of their offsets, by the id
            of the buffer.
        received: The arrays of each result buffer that was received in parts, by the id of the buffer and the
            offset of the part in the buffer.
    """

    backend: Backend
    values: Mapping[str, ir.Value]
    packs: Mapping[str, ir.Pack]
    parts: Mapping[str, tuple[UnpackedPart, ...]]
    received: dict[str, dict[int, Array]] = field(default_factory=dict[str, dict[int, Array]])

    def defers(self, op: ir.Op, env: Env) -> bool:
        """Whether `op` is a pack that its collective may replace. If so, adds an empty buffer to `env`."""
        if not isinstance(op, ir.Pack) or op.result not in self.packs:
            return False
        env[op.result] = Tree((), LEAF)
        return True

    def ordered_after(self, op: ir.Collective, xs: Sequence[Array], env: Env) -> list[Array]:
        """`xs`, the operands of `op`, ordered after the ops in `op.after`.

        The results of these ops are replaced in `env` and `received`, so that later ops preserve the order.
        """
        refs = [ref for ref in op.after if ref in env and env[ref].leaves]
        if not refs:
            return list(xs)
        tied, previous = self.backend.ordered_after(xs, [env[ref].leaves[-1] for ref in refs], op.axes)
        for ref, leaf in zip(refs, previous, strict=True):
            env[ref] = env[ref].like([*env[ref].leaves[:-1], leaf])
            for offset in list(self.received.get(ref, ()))[-1:]:
                self.received[ref][offset] = leaf
        return tied

    def begin(self, op: ir.Op, env: Env) -> Callable[[], Env] | None:
        """Begin a collective without its buffers.

        Args:
            op: Any op of the phase.
            env: The values so far, by id.

        Returns:
            A function that completes the collective and returns its result by id. None if `op` must run
            normally; its operand buffer is then in `env`.
        """
        if not isinstance(op, ir.Collective) or not (op.operand in self.packs or op.result in self.parts):
            return None
        pack, parts = self.packs.get(op.operand), self.parts.get(op.result)
        if pack is None:
            xs, operand_layout = env[op.operand].leaves, _flat(self.values[op.operand])
        else:
            xs = _leaves(pack, env)
            operand_layout = _operand_layout(pack, self.values)
        result_layout = (
            _flat(self.values[op.result]) if parts is None else _result_layout(op, parts, self.values)
        )
        if self.backend.variadic:
            xs = self.ordered_after(op, xs, env)
        complete = self.backend.start_packed(xs, op, operand_layout, result_layout)
        if complete is None:
            if pack is not None:
                env[op.operand] = ops.pack(pack, self.values, env)
            return None

        def finish() -> Env:
            results = complete()
            if parts is not None:
                offsets = (unpacked.part.offset for unpacked in parts)
                self.received[op.result] = dict(zip(offsets, results, strict=True))
            return {op.result: Tree(tuple(results), LEAF)}

        return finish


def pack_elision(sequence: Sequence[ir.Op], values: Mapping[str, ir.Value], backend: Backend) -> PackElision:
    """Find the buffers that need not be created.

    Args:
        sequence: All ops that will run, in order.
        values: The values of the phase by id.
        backend: The backend.
    """
    uses = DefUse(sequence)
    packs: dict[str, ir.Pack] = {}
    parts: dict[str, tuple[UnpackedPart, ...]] = {}
    for op in sequence:
        if not isinstance(op, ir.Collective) or op.form == "rounds" or op.kind not in NATIVE_KINDS:
            continue
        pack = uses.maker(op.operand)
        is_only_reader = len(uses.readers(op.operand)) == 1
        if isinstance(pack, ir.Pack) and is_only_reader and any(part.size for part in pack.parts):
            packs[op.operand] = pack
        unpacked = _unpacked_parts(op.result, uses.readers(op.result))
        if unpacked:
            parts[op.result] = unpacked
    return PackElision(backend, values, packs, parts)


def _unpacked_parts(buffer: str, readers: Sequence[ir.Op]) -> tuple[UnpackedPart, ...]:
    """The parts of `buffer` that its readers unpack, in the order of their offsets.

    Empty if a reader does not unpack it, if the readers view it as different numbers of rows, or if parts
    overlap.
    """
    unpacks = [op for op in readers if isinstance(op, ir.Unpack)]
    if len(unpacks) < len(readers) or len({op.ways for op in unpacks}) != 1:
        return ()
    parts = [
        UnpackedPart(op, part) for op in unpacks for part in op.parts if part.value == buffer and part.size
    ]
    parts.sort(key=lambda unpacked: unpacked.part.offset)
    ends = [part.offset + part.size for _, part in parts]
    are_disjoint = all(end <= part.offset for end, (_, part) in zip(ends, parts[1:], strict=False))
    return tuple(parts) if are_disjoint else ()


def _sources(pack: ir.Pack) -> dict[tuple[str, int], int]:
    """The indices in the operand arrays of the distinct leaves that `pack` reads.

    A leaf is the id of a value and the index of the leaf in this value.
    """
    leaves = dict.fromkeys((part.value, part.leaf) for part in pack.parts if part.size)
    return {leaf: number for number, leaf in enumerate(leaves)}


def _leaves(pack: ir.Pack, env: Mapping[str, Tree]) -> tuple[Array, ...]:
    return tuple(env[ref].leaves[index] for ref, index in _sources(pack))


def _flat(value: ir.Value) -> BufferLayout:
    """The layout of a buffer that is one array."""
    (leaf,) = value.leaves
    return BufferLayout(leaf.size, (BufferRun(0, 0, 0, leaf.size),), (leaf.shape,))


def _operand_layout(pack: ir.Pack, values: Mapping[str, ir.Value]) -> BufferLayout:
    """The layout of the buffer of `pack`: row by row, as in `ops.pack`."""
    size, sources = values[pack.result].leaves[0].size, _sources(pack)
    width = size // pack.ways
    runs: list[BufferRun] = []
    for part in pack.parts:
        value = values[part.value]
        leaf = value.leaves[part.leaf]
        row = row_size("array" if value.kind == "array" else "tree", leaf, pack.ways)
        for number in range(pack.ways):
            low = number * row + part.start
            count = min(part.size, leaf.size - low)  # without the padding of the last rows
            if count > 0:
                runs.append(
                    BufferRun(number * width + part.offset, sources[part.value, part.leaf], low, count)
                )
    shapes = tuple(values[ref].leaves[index].shape for ref, index in sources)
    return BufferLayout(size, tuple(sorted(runs)), shapes)


def _result_layout(
    op: ir.Collective, parts: Sequence[UnpackedPart], values: Mapping[str, ir.Value]
) -> BufferLayout:
    """The layout of a result buffer, with one array for each part.

    A leaf that is in one part is an array of the leaf's shape. Other parts are flat arrays of their rows.
    """
    size, ways = values[op.result].leaves[0].size, parts[0].op.ways
    width = size // ways
    runs: list[BufferRun] = []
    shapes: list[tuple[int, ...]] = []
    for array, (unpack, part) in enumerate(parts):
        leaf = values[unpack.result].leaves[part.leaf]
        is_whole_leaf = sum(sibling.leaf == part.leaf and sibling.size > 0 for sibling in unpack.parts) == 1
        nelements = min(leaf.size, part.size * ways) if is_whole_leaf else part.size * ways
        shapes.append(leaf.shape if is_whole_leaf and nelements == leaf.size else (nelements,))
        for number in range(ways):
            count = min(part.size, nelements - number * part.size)
            if count > 0:
                runs.append(BufferRun(number * width + part.offset, array, number * part.size, count))
    return BufferLayout(size, tuple(sorted(runs)), tuple(shapes))
