"""The op `unpack`: builds a value from buffers."""

import msgspec

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.shard_shapes import row_size
from commplan.ir.symbolic.deferred import Interpretation
from commplan.ir.transfer import Results, ValueTypes, Violations, value_like
from commplan.ir.values import Part


class Unpack(BaseOp, frozen=True, tag="unpack", gc=False):
    """The inverse of `Pack`: build `result` from parts of flat buffers. Padding is dropped.

    Attributes:
        parts: The parts, which cover every leaf exactly once. `Part.value` is the buffer, and `Part.leaf` the
            index of the leaf in `result`.
        ways: The number of rows of each buffer, at least 1.
        like: An earlier value with the same leaf paths, whose pytree structure the result gets. If it is
            None, the structure is one that the caller of the phase supplied.
    """

    READS = ("parts",)
    SHAPED_BY = ("like",)
    CONVERTS = True

    result: Meaning[Ref]
    parts: Meaning[tuple[Part, ...]]
    span: Presentation[Span]
    ways: Meaning[int] = 1
    like: Execution[Ref | None] = None
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        result = types.values[self.result]
        if self.ways < 1:
            yield "CP0735", f"a buffer has no {self.ways} rows"
            return
        if result.kind not in ("tree", "array"):
            yield "CP0731", f"`{self.result}` is unpacked, but is {result.kind}"
        if self.like is not None:
            like = types.values[self.like]
            if [leaf.path for leaf in like.leaves] != [leaf.path for leaf in result.leaves]:
                yield "CP0731", f"`{self.result}` is shaped like `{self.like}`, which has other leaves"
        runs: list[set[tuple[int, int]]] = [set() for _ in result.leaves]
        for part in self.parts:
            wrong = [*types.check_rows(part.value, self.ways)]
            buffer = types.values[part.value].leaves
            wrong = wrong or [*types.check_part(part, self.result, self.ways, buffer[0].size // self.ways)]
            yield from wrong
            if wrong:
                return
            dtype = result.leaves[part.leaf].dtype
            if buffer[0].dtype != dtype:
                yield "CP0732", f"a leaf of {dtype} is unpacked from {buffer[0].dtype}"
            runs[part.leaf].add((part.start, part.start + part.size))
        for leaf, spans in zip(result.leaves, runs, strict=True):
            end = 0
            for start, stop in sorted(spans):
                end = stop if start == end else -1
            if end != row_size(result.kind, leaf, self.ways):
                yield "CP0731", f"leaf `{leaf.path}` of `{self.result}` is not unpacked exactly once"
        if sum(map(len, runs)) != len(self.parts):
            yield "CP0731", f"a leaf of `{self.result}` is not unpacked exactly once"
        yield from types.check_terms(part.value for part in self.parts)

    def transfer(self, types: ValueTypes) -> Results:
        """The leaves are declared, and the placement is that of the buffers.

        If the result has no leaf that can be split, the axes along which it is split are declared too.
        Without parts the whole placement is.
        """
        result = types.values[self.result]
        placement = types.join(types.values[part.value].placement for part in self.parts)
        if not self.parts:
            placement = result.placement
        elif not any(leaf.shape and leaf.size for leaf in result.leaves):
            placement = msgspec.structs.replace(placement, split=result.placement.split)
        return (value_like(result, self.result, placement),)

    def meaning(self, env: Interpretation) -> None:
        env.put(self.result, env.unpacked(self.parts, self.ways, env.values[self.result]))
