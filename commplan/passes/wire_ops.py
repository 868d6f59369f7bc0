"""The ops that convert values to the type or block format of a wire, and back."""

from __future__ import annotations

from typing import NamedTuple

from commplan.ir.codec import Codec
from commplan.ir.plan import Ref
from commplan.ir.schedule import Cast, Collective, Decode, Encode
from commplan.ir.types import DType
from commplan.passes.rewrite import Editor


class Wire(NamedTuple):
    """The form in which values are sent.

    Attributes:
        dtype: The type of the values.
        codec: The block format that they are encoded in; None if they are sent in `dtype`.
    """

    dtype: DType
    codec: Codec | None

    def __str__(self) -> str:
        return str(self.codec or self.dtype)

    def narrow(self, editor: Editor, op: Collective, operand: Ref, prefix: Ref, rows: int = 1) -> Ref:
        """Emit `operand` as it is sent.

        Args:
            editor: Receives the op.
            op: The collective that is lowered.
            operand: A flat buffer.
            prefix: The start of the result's name.
            rows: The number of rows that are encoded separately.

        Returns:
            The converted buffer.
        """
        if self.codec is None:
            return cast(editor, op, operand, self.dtype, f"{prefix}{self.dtype}")
        encode = Encode(op.result, operand, self.codec, op.span, rows)
        return editor.emit(encode, f"{prefix}{self.codec.name}")

    def widen(
        self,
        editor: Editor,
        op: Collective,
        operand: Ref,
        dtype: DType,
        name: Ref | None,
        rows: int,
        size: int,
    ) -> Ref:
        """Emit `operand`, as it is received, in another type.

        Args:
            editor: Receives the op.
            op: The collective that is lowered.
            operand: The received buffer.
            dtype: The type of the result.
            name: The name of the result; None if it is the result of `op`.
            rows: The number of rows of `operand`.
            size: The number of elements of all rows.

        Returns:
            The converted buffer.
        """
        if self.codec is None:
            return cast(editor, op, operand, dtype, name)
        return editor.emit(Decode(op.result, operand, self.codec, size // rows, dtype, op.span, rows), name)


def cast(editor: Editor, op: Collective, operand: Ref, dtype: DType, name: Ref | None) -> Ref:
    """Cast `operand` to `dtype`, unless it has this dtype. Without `name` this is the result of `op`."""
    if name is not None and editor.leaf(operand).dtype == dtype:
        return operand
    return editor.emit(Cast(op.result, operand, dtype, op.span), name)
