from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.values import Part


class Unpack(BaseOp, frozen=True, tag="unpack", gc=False):
    """The way back: make `result` from parts of flat buffers.

    Part.value names the buffer and Part.leaf the leaf of `result`; `ways` rows as in `Pack`,
    padding dropped.
    """

    READS = ("parts",)
    CONVERTS = True

    result: Ref
    parts: tuple[Part, ...]
    span: Span
    ways: int = 1
    after: tuple[Ref, ...] = ()
    lane: str = "device"

    def meaning(self, env: Interpretation) -> None:
        parts = [(part.value, part.leaf, part.start, part.size, part.offset) for part in self.parts]
        env.put(self.result, env.unpacked(parts, self.ways, env.values[self.result]))
