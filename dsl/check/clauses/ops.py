"""Checks of `by`: the operator of a reduction and its scalar arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from commplan.diagnostics import Fix, Span, listed
from commplan.dsl import ast
from commplan.dsl.check.context import CheckContext, is_scalar
from commplan.dsl.check.numbers import written
from commplan.dsl.check.scope import PhaseScope
from commplan.ir.plan import Reduction, Value
from commplan.ir.stages import rules
from commplan.ir.types import ArrayType, DType, Operator, TreeType

# The operators of reductions.
OPS: tuple[Operator, ...] = get_args(Operator)
# Names of these operators in other libraries.
SYNONYMS: dict[str, Operator] = {
    "average": "mean", "avg": "mean", "add": "sum", "plus": "sum", "maximum": "max", "minimum": "min",
}  # fmt: skip


class WrittenReduction(msgspec.Struct, frozen=True):
    """A reduction operator in the source.

    Attributes:
        op: The operator.
        span: Its location.
        weight: The scalar that weighs a weighted mean; None for other operators.
    """

    op: Reduction
    span: Span
    weight: Value | None = None


def written_call(
    ctx: CheckContext, by: ast.CallExpr | ast.Number | None, subject: str, names: Sequence[str]
) -> ast.CallExpr | None:
    """The call after `by`; None without one, or after reporting a number.

    Args:
        ctx: The state of the check.
        by: The clause; None if it is absent.
        subject: The kind of word that is expected, for messages.
        names: The valid words.
    """
    if isinstance(by, ast.Number):
        message = f"there is no {subject} `{written(by)}`"
        ctx.error("CP0404", message, by.span, f"the {subject}s are {listed(names)}")
        return None
    return by


def reduction(
    ctx: CheckContext, scope: PhaseScope, by: ast.CallExpr | ast.Number | None, span: Span
) -> WrittenReduction | None:
    """The operator after `by`; None after reporting errors, or if the weight has one.

    Args:
        ctx: The state of the check.
        scope: The phase.
        by: The clause; None if it is absent, which is an error.
        span: The location of the stage.
    """
    if by is None:
        message = "the stage does not say how terms are combined"
        return ctx.error("CP0402", message, span, f"add `by` with {listed(OPS, 'or')}")
    call = written_call(ctx, by, "operator", OPS)
    if call is None:
        return None
    message = f"there is no operator `{call.name.text}`"
    if suggestion := SYNONYMS.get(call.name.text.lower()):
        fix = Fix(f"write `{suggestion}`", call.name.span, suggestion)
        return ctx.error("CP0404", message, call.name.span, f"the operators are {listed(OPS)}", fix=fix)
    name = ctx.choose(call.name, OPS, "CP0404", message, f"the operators are {listed(OPS)}")
    if name is None:
        return None
    if not call.args:
        return WrittenReduction(Reduction(name), call.span)
    return _weighted_mean(ctx, scope, call, call.args, name)


def sum_or_mean(
    ctx: CheckContext, scope: PhaseScope, by: ast.CallExpr | ast.Number | None, span: Span, stage: str
) -> WrittenReduction | None:
    """The operator of a stage that can only add terms, or None after reporting errors.

    The arguments are those of `reduction`, and the verb of the stage for messages.
    """
    op = reduction(ctx, scope, by, span)
    if op is None or op.op.name in ("sum", "mean"):
        return op
    message = f"`{stage}` adds terms of a sum, and `{op.op.name}` does not"
    return ctx.error("CP0317", message, op.span, "use `sum` or `mean`")


def _weighted_mean(
    ctx: CheckContext, scope: PhaseScope, call: ast.CallExpr, args: tuple[ast.CallArg, ...], name: Operator
) -> WrittenReduction | None:
    """The operator of a call with arguments, which is valid only for `mean(weight = NAME)`.

    None after reporting an error, or if the weight has one.
    """
    first, *extra = args
    if name != "mean":
        note = "only `mean` does: `mean(weight = n)`"
        return ctx.error("CP0405", f"`{name}` takes no arguments", first.span, note)
    if extra or first.key is None or first.key.text != "weight":
        wrong = extra[0] if extra else first
        near = ctx.rename(first.key, ("weight",)) if first.key is not None and not extra else None
        message = "`mean` takes one argument, `weight`"
        return ctx.error("CP0405", message, wrong.span, "write `mean(weight = n)`", fix=near)
    if isinstance(first.value, ast.Number):
        message = f"the weight is a value, found the number `{written(first.value)}`"
        note = "a weight that is the same for all terms changes nothing: write `mean`"
        return ctx.error("CP0407", message, first.value.span, note)
    weight = scope.operand(first.value)
    if weight is None:
        return None
    kind = weight.type
    if not isinstance(kind, ArrayType) or not is_scalar(kind) or kind.dtype is DType.BOOL:
        message = f"the weight is a numeric scalar, found {kind}"
        return ctx.error("CP0407", message, first.value.span, weight)
    return WrittenReduction(Reduction("mean", weight.id), call.span, weight)


def check_operand(ctx: CheckContext, by: WrittenReduction, operand: Value) -> None:
    """Check that the operand's type and placement suit the operator.

    Raises:
        MistakeError: After reporting CP0406, CP0407 or CP0408.
    """
    if isinstance(operand.type, ArrayType):
        dtype, name, note = operand.type.dtype, f"`{operand.name}`", operand
        ctx.require("CP0408", rules.reducible_dtype(by.op.name, dtype, name), by.span, note)
        ctx.require("CP0406", rules.averageable_dtype(by.op.name, dtype, name), by.span, note)
    if by.weight is not None:
        check_scalar(ctx, by.weight, operand, by.span, "the weight")


def check_scalar(
    ctx: CheckContext, scalar: Value, operand: Value, span: Span, role: str, code: str = "CP0407"
) -> None:
    """Check that a scalar argument of a stage is on the workers, reduced, and does not vary too much.

    It may vary only over axes over which the operand varies, and not over axes that split a tree.

    Args:
        ctx: The state of the check.
        scalar: The scalar.
        operand: The operand of the stage.
        span: The location of the argument.
        role: The argument in words, for messages.
        code: The code of the error.

    Raises:
        MistakeError: After reporting an error.
    """
    if scalar.placement.partial:
        message = f"{role} is `{scalar.name}`, partial over {listed(scalar.placement.partial)}"
        note = "reduce it first, or declare it `per` if it is each rank's own number"
        ctx.fail(code, message, span, scalar, note)
    if scalar.placement.server is not None:
        ctx.fail(code, f"{role} is `{scalar.name}`, which is on a server", span, scalar)
    more = [axis for axis in scalar.placement.varying if not operand.placement.varies(axis)]
    if more:
        message = (
            f"{role} is `{scalar.name}`, which varies over {listed(more)}, where `{operand.name}` does not"
        )
        ctx.fail(code, message, span, scalar, operand)
    cut = [axis for axis in scalar.placement.varying if axis in operand.placement.split]
    if cut and isinstance(operand.type, TreeType):
        where = f"which varies over {listed(cut)}, where `{operand.name}` is split"
        note = f"scalars of a tree are not split: they must stay the same over {listed(cut)}"
        ctx.fail(code, f"{role} is `{scalar.name}`, {where}", span, scalar, operand, note)
