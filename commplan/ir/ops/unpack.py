from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.values import Part


class Unpack(BaseOp, frozen=True, tag="unpack", gc=False):
    """The way back: make `result` from parts of flat buffers.

    Part.value names the buffer and Part.leaf the leaf of `result`; `ways` rows as in `Pack`,
    padding dropped.
    """

    READS = ("parts",)

    result: Ref
    parts: tuple[Part, ...]
    span: Span
    ways: int = 1
    after: tuple[Ref, ...] = ()
    lane: str = "device"
