"""Pack elision: collectives that read from, or write to, the arrays that would be packed into a buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from commplan.ir import schedule as ir
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.shard_shapes import row_size
from commplan.lowering.jax import ops
from commplan.lowering.jax.backend import Array, Backend, BufferLayout, Run
from commplan.lowering.jax.pytree import LEAF, Tree

KINDS = ("all_reduce", "broadcast", "reduce_scatter", "all_gather")
Env = dict[str, Tree]


@dataclass
class PackElision:
    """Of a phase while it runs: buffers that are packed for one collective alone, or only unpacked after one.

    packs: by buffer what it would be packed of. parts: by buffer what is unpacked of it, by offset. arrived:
    of those buffers that did arrive in parts each part, by where it would lie.
    """

    backend: Backend
    values: Mapping[str, ir.Value]
    packs: Mapping[str, ir.Pack]
    parts: Mapping[str, tuple[tuple[ir.Unpack, ir.Part], ...]]
    arrived: dict[str, dict[int, Array]] = field(default_factory=dict[str, dict[int, Array]])

    def defers(self, op: ir.Op, env: Env) -> bool:
        """Whether `op` is a pack that is left to its collective."""
        if not isinstance(op, ir.Pack) or op.result not in self.packs:
            return False
        env[op.result] = Tree((), LEAF)
        return True

    def behind(self, op: ir.Collective, xs: Sequence[Array], env: Env) -> list[Array]:
        """`xs`, but not before what `op` is to come after exists. That goes on as what was ordered."""
        refs = [ref for ref in op.after if ref in env and env[ref].leaves]
        if not refs:
            return list(xs)
        tied, previous = self.backend.behind(xs, [env[ref].leaves[-1] for ref in refs], op.axes)
        for ref, leaf in zip(refs, previous, strict=True):
            env[ref] = env[ref].like([*env[ref].leaves[:-1], leaf])
            for offset in list(self.arrived.get(ref, ()))[-1:]:
                self.arrived[ref][offset] = leaf
        return tied

    def begin(self, op: ir.Op, env: Env) -> Callable[[], Env] | None:
        """Begin `op` on the leaves of its buffers; None where it is to be run as always: another op, or a
        backend that wants the buffer, which is made then."""
        if not isinstance(op, ir.Collective) or not (op.operand in self.packs or op.result in self.parts):
            return None
        pack, parts = self.packs.get(op.operand), self.parts.get(op.result)
        if pack is None:
            xs, taken = env[op.operand].leaves, _flat(self.values[op.operand])
        else:
            xs, taken = _leaves(pack, env), _taken(pack, self.values)
        given = _flat(self.values[op.result]) if parts is None else _given(op, parts, self.values)
        if self.backend.variadic:
            xs = self.behind(op, xs, env)
        going = self.backend.start_packed(xs, op, taken, given)
        if going is None:
            if pack is not None:
                env[op.operand] = ops.pack(pack, self.values, env)
            return None

        def finished() -> Env:
            results = going()
            if parts is not None:
                self.arrived[op.result] = dict(zip((part.offset for _, part in parts), results, strict=True))
            return {op.result: Tree(tuple(results), LEAF)}

        return finished


def pack_elision(chosen: Sequence[ir.Op], values: Mapping[str, ir.Value], backend: Backend) -> PackElision:
    """What of `chosen` needs no buffers."""
    uses = DefUse(chosen)
    packs: dict[str, ir.Pack] = {}
    parts: dict[str, tuple[tuple[ir.Unpack, ir.Part], ...]] = {}
    for op in chosen:
        if not isinstance(op, ir.Collective) or op.form == "rounds" or op.kind not in KINDS:
            continue
        pack, alone = uses.maker(op.operand), len(uses.readers(op.operand)) == 1
        if isinstance(pack, ir.Pack) and alone and any(part.size for part in pack.parts):
            packs[op.operand] = pack
        taken = _unpacked(op.result, uses.readers(op.result))
        if taken:
            parts[op.result] = taken
    return PackElision(backend, values, packs, parts)


def _unpacked(buffer: str, readers: Sequence[ir.Op]) -> tuple[tuple[ir.Unpack, ir.Part], ...]:
    """What the readers of `buffer` take of it, if all of them unpack it alike and none what another does."""
    unpacks = [op for op in readers if isinstance(op, ir.Unpack)]
    if len(unpacks) < len(readers) or len({op.ways for op in unpacks}) != 1:
        return ()
    parts = [(op, part) for op in unpacks for part in op.parts if part.value == buffer and part.size]
    parts.sort(key=lambda pair: pair[1].offset)
    ends = [part.offset + part.size for _, part in parts]
    apart = all(end <= part.offset for end, (_, part) in zip(ends, parts[1:], strict=False))
    return tuple(parts) if apart else ()


def _sources(pack: ir.Pack) -> dict[tuple[str, int], int]:
    """The leaves that `pack` reads, numbered."""
    leaves = dict.fromkeys((part.value, part.leaf) for part in pack.parts if part.size)
    return {leaf: number for number, leaf in enumerate(leaves)}


def _leaves(pack: ir.Pack, env: Mapping[str, Tree]) -> tuple[Array, ...]:
    return tuple(env[value].leaves[leaf] for value, leaf in _sources(pack))


def _flat(value: ir.Value) -> BufferLayout:
    (leaf,) = value.leaves
    return BufferLayout(leaf.size, (Run(0, 0, 0, leaf.size),), (leaf.shape,))


def _taken(pack: ir.Pack, values: Mapping[str, ir.Value]) -> BufferLayout:
    """How leaves lie in the buffer of `pack`: row by row, as `ops.pack` has them."""
    size, sources = values[pack.result].leaves[0].size, _sources(pack)
    width, runs = size // pack.ways, list[Run]()
    for part in pack.parts:
        value = values[part.value]
        leaf = value.leaves[part.leaf]
        row = row_size("array" if value.kind == "array" else "tree", leaf, pack.ways)
        for number in range(pack.ways):
            low = number * row + part.start
            count = min(part.size, leaf.size - low)
            if count > 0:
                runs.append(Run(number * width + part.offset, sources[part.value, part.leaf], low, count))
    shapes = tuple(values[value].leaves[leaf].shape for value, leaf in sources)
    return BufferLayout(size, tuple(sorted(runs)), shapes)


def _given(
    op: ir.Collective, parts: Sequence[tuple[ir.Unpack, ir.Part]], values: Mapping[str, ir.Value]
) -> BufferLayout:
    """An array for each part: the leaf itself where it is one part, else its rows."""
    size, ways = values[op.result].leaves[0].size, parts[0][0].ways
    width, runs, shapes = size // ways, list[Run](), list[tuple[int, ...]]()
    for array, (unpack, part) in enumerate(parts):
        leaf = values[unpack.result].leaves[part.leaf]
        alone = sum(sibling.leaf == part.leaf and sibling.size > 0 for sibling in unpack.parts) == 1
        most = min(leaf.size, part.size * ways) if alone else part.size * ways
        shapes.append(leaf.shape if alone and most == leaf.size else (most,))
        for number in range(ways):
            count = min(part.size, most - number * part.size)
            if count > 0:
                runs.append(Run(number * width + part.offset, array, number * part.size, count))
    return BufferLayout(size, tuple(sorted(runs)), tuple(shapes))
