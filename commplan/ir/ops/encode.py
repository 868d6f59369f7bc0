"""The ops `encode` and `decode`: floats to the bytes of a block format, and back."""

from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.codec import Codec
from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.transfer import Results, ValueTypes, Violations, flat
from commplan.ir.types import DType
from commplan.ir.values import Value


class Encode(BaseOp, frozen=True, tag="encode", gc=False):
    """Encode the rows of a flat float buffer separately: [rows * k] -> u8 [rows * codec.nbytes(k)].

    Only `Decode` and collectives that move whole rows read the result.

    Attributes:
        codec: The block format.
        rows: The number of rows, at least 1: one for each rank of an all-to-all.
    """

    result: Meaning[Ref]
    operand: Meaning[Ref]
    codec: Meaning[Codec]
    span: Presentation[Span]
    rows: Meaning[int] = 1
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        wrong = [*types.check_rows(self.operand, self.rows)]
        yield from wrong
        if self.codec.violation is not None:
            yield "CP0735", self.codec.violation
        elif not wrong and not types.values[self.operand].leaves[0].dtype.is_float:
            yield "CP0732", f"`{self.operand}` is encoded as {self.codec}, but has no floats"

    def transfer(self, types: ValueTypes) -> Results:
        operand = types.values[self.operand]
        nbytes = self.rows * self.codec.nbytes(operand.leaves[0].size // self.rows)
        return (flat(self.result, nbytes, DType.U8, operand.placement),)

    def meaning(self, env: Interpretation) -> None:
        operand, value = env.get(self.operand), env.values[self.result]
        env.put(self.result, steps.encoded(env, operand, value, self.codec, self.rows))

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        return Work("copy", self.title, nbytes.get(self.operand, 0))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"as {self.codec}"


class Decode(BaseOp, frozen=True, tag="decode", gc=False):
    """Decode the rows of a buffer of bytes: u8 [rows * codec.nbytes(width)] -> [rows * width].

    Attributes:
        codec: The block format.
        width: The number of elements of a row; their bytes alone do not determine it.
        dtype: The float type of the result.
        rows: The number of rows, at least 1.
    """

    result: Meaning[Ref]
    operand: Meaning[Ref]
    codec: Meaning[Codec]
    width: Meaning[int]
    dtype: Meaning[DType]
    span: Presentation[Span]
    rows: Meaning[int] = 1
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        operand = types.values[self.operand]
        if self.codec.violation is not None:
            yield "CP0735", self.codec.violation
        elif operand.kind != "flat" or operand.leaves[0].dtype is not DType.U8:
            yield "CP0731", f"`{self.operand}` is decoded, but is not a flat buffer of bytes"
        elif self.rows < 1 or self.width < 0 or self.rows * self.codec.nbytes(self.width) != operand.nbytes:
            rows = f"{self.rows} rows of {self.width} elements as {self.codec}"
            yield "CP0731", f"the {operand.nbytes} bytes of `{self.operand}` are not {rows}"
        if not self.dtype.is_float:
            yield "CP0732", f"`{self.operand}` is decoded to {self.dtype}"

    def transfer(self, types: ValueTypes) -> Results:
        placement = types.values[self.operand].placement
        return (flat(self.result, self.rows * self.width, self.dtype, placement),)

    def meaning(self, env: Interpretation) -> None:
        operand, value = env.get(self.operand), env.values[self.result]
        env.put(self.result, steps.decoded(env, operand, value, self.codec, self.width))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"{self.codec} to {self.dtype}"
