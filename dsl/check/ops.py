"""`by`: the mathematics of a reduction, and the scalars that it takes."""

from __future__ import annotations

from typing import Literal

import msgspec

from commplan.diagnostics import Span, listed
from commplan.dsl import ast
from commplan.dsl.check.context import Context, described, is_scalar
from commplan.dsl.check.numbers import written
from commplan.dsl.check.scope import Scope
from commplan.ir.plan import Reduction, Value
from commplan.ir.stages import rules
from commplan.ir.types import ArrayType, DType, Type

OpName = Literal["sum", "mean", "max", "min"]
OPS: dict[str, OpName] = {"sum": "sum", "mean": "mean", "max": "max", "min": "min"}


class WrittenReduction(msgspec.Struct, frozen=True):
    """The operator that was written, and the weight of a weighted mean as a value."""

    op: Reduction
    span: Span
    weight: Value | None = None


def reduction(ctx: Context, scope: Scope, call: ast.Call | None, span: Span) -> WrittenReduction | None:
    """The operator behind `by`, or None with the error reported. `span` is the stage's."""
    if call is None:
        ctx.error(
            "CP0402",
            "the stage does not say how terms are combined",
            span,
            f"add `by` with {listed(OPS, 'or')}",
        )
        return None
    name = OPS.get(call.name.text)
    if name is None:
        ctx.error(
            "CP0404",
            f"there is no operator `{call.name.text}`",
            call.name.span,
            f"the operators are {listed(OPS)}",
            fix=ctx.rename(call.name, OPS),
        )
        return None
    if not call.args:
        return WrittenReduction(Reduction(name), call.span)
    return _weighted(ctx, scope, call, call.args, name)


def _weighted(
    ctx: Context, scope: Scope, call: ast.Call, args: tuple[ast.CallArg, ...], name: OpName
) -> WrittenReduction | None:
    first, *rest = args
    if name != "mean":
        ctx.error(
            "CP0405", f"`{name}` takes no arguments", first.span, "only `mean` does: `mean(weight = n)`"
        )
        return None
    if rest or first.key is None or first.key.text != "weight":
        wrong = rest[0] if rest else first
        near = ctx.rename(first.key, ("weight",)) if first.key is not None and not rest else None
        ctx.error(
            "CP0405", "`mean` takes one argument, `weight`", wrong.span, "write `mean(weight = n)`", fix=near
        )
        return None
    if isinstance(first.value, ast.Number):
        ctx.error(
            "CP0407", f"the weight is a value, found the number `{written(first.value)}`", first.value.span,
            "a weight that is the same for all terms changes nothing: write `mean`",
        )  # fmt: skip
        return None
    weight = scope.operand(first.value)
    if weight is None:
        return None
    if not _is_number(weight.type):
        ctx.error(
            "CP0407",
            f"the weight is a numeric scalar, found {weight.type}",
            first.value.span,
            described(weight),
        )
        return None
    if isinstance(weight.type, ArrayType) and weight.type.dtype is DType.U8:
        ctx.error(
            "CP0407",
            "the weights are added, and a sum of u8 wraps around at 256",
            first.value.span,
            described(weight),
            "declare it i32 or f32",
        )
        return None
    return WrittenReduction(Reduction("mean", weight.id), call.span, weight)


def _is_number(type_: Type) -> bool:
    return isinstance(type_, ArrayType) and is_scalar(type_) and type_.dtype is not DType.BOOL


def operand_suits(ctx: Context, found: WrittenReduction, operand: Value) -> bool:
    """Whether the operand's type and placement suit the operator; what does not is reported."""
    if isinstance(operand.type, ArrayType):
        dtype, what = operand.type.dtype, f"`{operand.name}`"
        for code, broken in (
            ("CP0408", rules.numbers(found.op.name, dtype, what)),
            ("CP0406", rules.floats(found.op.name, dtype, what)),
        ):
            if ctx.refuse(code, broken, found.span, described(operand)):
                return False
    return found.weight is None or scalar_follows(ctx, found.weight, operand, found.span, "the weight")


def scalar_follows(
    ctx: Context, scalar: Value, operand: Value, span: Span, what: str, code: str = "CP0407"
) -> bool:
    """Whether a scalar varies at most where the operand does, and is no unreduced term."""
    if scalar.placement.partial:
        ctx.error(
            code,
            f"{what} is `{scalar.name}`, partial over {listed(scalar.placement.partial)}",
            span,
            described(scalar),
            "reduce it first, or declare it `per` if it is each rank's own number",
        )
        return False
    if scalar.placement.server is not None:
        ctx.error(code, f"{what} is `{scalar.name}`, which lives on a server", span, described(scalar))
        return False
    more = [axis for axis in scalar.placement.varying if not operand.placement.varies(axis)]
    if more:
        ctx.error(
            code,
            f"{what} is `{scalar.name}`, which varies over {listed(more)}, where `{operand.name}` does not",
            span,
            described(scalar),
            described(operand),
        )
    return not more
