"""Checks of number literals, and their valid ranges."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from commplan.diagnostics import Fix
from commplan.dsl import ast
from commplan.dsl.check.context import CheckContext

if TYPE_CHECKING:
    from fractions import Fraction

BYTES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}  # bytes of each unit of sizes
LARGEST = (1 << 63) - 1  # the largest valid whole number, which fits in 64 bits


def written(value: ast.Name | ast.Number | ast.Location | ast.CallExpr) -> str:
    """The source text of a name, of a number with its unit, of a file with its size, or of a call."""
    if isinstance(value, ast.CallExpr):
        args = (
            f"{arg.key.text} = {written(arg.value)}" if arg.key else written(arg.value)
            for arg in value.args or ()
        )
        return f"{value.name.text}({', '.join(args)})"
    if isinstance(value, ast.Location):
        return f'{value.name.text}("{value.path}", {written(value.size)})'
    text = value.text.strip()
    unit = value.unit if isinstance(value, ast.Number) else None
    return f"{text} {unit}" if unit and not text.endswith(unit) else text


def exact(number: ast.Number) -> Fraction:
    """The value of a finite literal as a decimal fraction, without the error of its nearest binary float.

    Exact for literals of up to 15 significant digits.
    """
    from fractions import Fraction  # noqa: PLC0415  (slow to import, and rarely needed)

    return Fraction(repr(number.value))


def integer(
    ctx: CheckContext, number: ast.Number, role: str, *, least: int = 1, code: str = "CP0112"
) -> int | None:
    """The value of a whole number without a unit, from `least` to `LARGEST`; None after reporting an error.

    Args:
        ctx: The state of the check.
        number: The literal.
        role: The number in words, as the subject of the message.
        least: The smallest valid value.
        code: The code of the error.
    """
    fix = None
    if number.unit is not None:
        bare = number.text.strip().removesuffix(number.unit).strip()
        fix = Fix(f"write `{bare}`", number.span, bare) if isinstance(number.value, int) else None
        expected = "has no unit"
    elif not isinstance(number.value, int):
        expected = "is a whole number"
    elif number.value < least:
        expected = f"is at least {least}"
    elif number.value > LARGEST:
        expected = f"is at most {LARGEST}"
    else:
        return number.value
    return ctx.error(code, f"{role} {expected}, found `{written(number)}`", number.span, fix=fix)


def nbytes(ctx: CheckContext, number: ast.Number, role: str, *, code: str) -> int | None:
    """The value of a size in bytes, from 1 to `LARGEST`; None after reporting an error.

    Args:
        ctx: The state of the check.
        number: The literal, without a unit or with one of `BYTES`. It may have decimals with a unit.
        role: The size in words, as the subject of the message.
        code: The code of the error.
    """
    if number.unit is not None and number.unit not in BYTES:
        note = "its units are KiB, MiB and GiB; without a unit it counts bytes"
        return ctx.error(code, f"{role} is a size in bytes, found `{written(number)}`", number.span, note)
    value, factor = number.value, BYTES.get(number.unit or "", 1)
    if not isinstance(value, int):
        size = exact(number) * factor if math.isfinite(value) else 0
    else:
        size = value * factor
    if size.denominator != 1 or not 0 < size <= LARGEST:
        message = f"{role} is a positive whole number of bytes, found `{written(number)}`"
        return ctx.error(code, message, number.span)
    return int(size)
