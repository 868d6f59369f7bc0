"""Checks of built-in functions: their declarations, their use without one, and the types of a call.

`commplan.ir.stages.builtins` defines the functions. `types` calls `declare_builtin`, and `stages.maps` and
`stages.servers` the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from commplan.diagnostics import listed
from commplan.dsl import ast
from commplan.dsl.check.context import CheckContext
from commplan.dsl.check.numbers import written
from commplan.ir.plan import Fn, Value
from commplan.ir.stages import rules
from commplan.ir.stages.builtins import BUILTIN_NAMES, DEFINITIONS, Builtin, BuiltinName
from commplan.ir.stages.rules import Violation
from commplan.ir.types import AnyType, ArrayType, DType, Element, RecordsType, TreeType
from commplan.ir.values import Leaf

# The keyword arguments of each function: numbers, or the dtype of `cast`.
KEYS = {name: definition.keys or ("dtype",) * (name == "cast") for name, definition in DEFINITIONS.items()}
# The functions without arguments, by name. They need no declaration.
BARE: Mapping[str, BuiltinName] = {name: name for name in BUILTIN_NAMES if not KEYS[name]}


def declare_builtin(
    ctx: CheckContext, decl: ast.FnDecl, call: ast.CallExpr, types: tuple[tuple[Element, ...], ...]
) -> Fn | None:
    """Check `fn NAME [(TYPES) -> TYPES] = BUILTIN(..)`.

    Args:
        ctx: The state of the check.
        decl: The declaration.
        call: The call of the built-in function.
        types: The types of the operands and of the results; both empty without types.

    Returns:
        The function, or None after reporting an error.
    """
    body = _body(ctx, call)
    if body is None or not decl.results:
        return body and _fn(decl.name, body)
    definition, (operands, results) = body.definition, types
    violation = rules.operand_count(body.name, len(definition.operands), len(operands))
    violation = violation or rules.result_count(body.name, definition.results, len(results))
    outcome = violation or _applied(body, tuple(zip(definition.operands, operands, strict=True)))
    if not isinstance(outcome, Violation) and outcome != results:
        declared, expected = (", ".join(map(str, kinds)) for kinds in (results, outcome))
        outcome = Violation(f"the results of `{body}` here are {expected}, found {declared}")
    if isinstance(outcome, Violation):
        ctx.refuse("CP0218", outcome, decl.name.span)
        return None
    return replace(_fn(decl.name, body), operands=operands, results=results)


def undeclared_builtin(ctx: CheckContext, name: ast.Name) -> Fn | None:
    """The built-in function `name`, which is used without a declaration; None after reporting an error.

    Declares the function, for further uses.
    """
    bare = BARE.get(name.text)
    if bare is None:
        ctx.unknown.add(name.text)
        message = f"`{name.text}` takes {listed(KEYS[name.text])}"
        return ctx.error("CP0217", message, name.span, f"declare it: `fn NAME = {_usage(name.text)}`")
    fn = ctx.fns[bare] = _fn(name, Builtin(bare))
    return fn


class Signature(NamedTuple):
    """The types of the operands and results of a call, without the batch of records."""

    operands: tuple[Element, ...]
    results: tuple[Element, ...]


def signature(ctx: CheckContext, fn: Fn, names: Sequence[ast.Name], operands: Sequence[Value]) -> Signature:
    """The declared types of `fn`, or those of this call of a built-in function without types.

    Args:
        ctx: The state of the check.
        fn: The function.
        names: The names of the operands in the call.
        operands: Their values, as many as the function takes.

    Raises:
        MistakeError: After reporting CP0218, if a built-in function without types does not take the operands.
    """
    if fn.body is None or not isinstance(fn.operands[0], AnyType):
        # A declared function has no `AnyType`; the filter is for the type checker.
        return Signature(
            *(tuple(x for x in each if not isinstance(x, AnyType)) for each in (fn.operands, fn.results))
        )
    types = [x.type.element if isinstance(x.type, RecordsType) else x.type for x in operands]
    pairs = [(name.text, type_) for name, type_ in zip(names, types, strict=True)]
    outcome = _applied(fn.body, pairs)
    if isinstance(outcome, Violation):
        values = dict.fromkeys((operands[outcome.at], operands[0]))
        ctx.fail("CP0218", outcome.message, names[outcome.at].span, *values, *outcome.notes)
    return Signature(tuple(x for x in types if not isinstance(x, RecordsType)), outcome)


def _fn(name: ast.Name, body: Builtin) -> Fn:
    """The function `name` with this body, for operands of any types."""
    definition = body.definition
    operands, results = (AnyType(),) * len(definition.operands), (AnyType(),) * definition.results
    return Fn(
        name.text, operands, results, "device", name.span, elementwise=True, linear=body.linear, body=body
    )


def _body(ctx: CheckContext, call: ast.CallExpr) -> Builtin | None:
    """The built-in function and its arguments; None after reporting an error."""
    message = f"there is no built-in function `{call.name.text}`"
    note = f"the built-in functions are {listed(BUILTIN_NAMES)}"
    name = ctx.choose(call.name, BUILTIN_NAMES, "CP0216", message, note)
    args = name and ctx.keyed(call, KEYS[name], "CP0217")
    if name is None or args is None:
        return None
    keys = KEYS[name]
    missing = [key for key in keys if key not in args]
    if missing:
        return ctx.error("CP0217", f"`{name}` lacks {listed(missing)}", call.span, f"write `{_usage(name)}`")
    if name == "cast":
        return _cast(ctx, args["dtype"])
    factors = [_factor(ctx, name, key, args[key]) for key in keys]
    body = Builtin(name, tuple(factor for factor in factors if factor is not None))
    if len(body.factors) < len(keys):
        return None
    violation = body.violation()
    span = args[keys[violation.at]].value.span if violation else call.span
    return None if ctx.refuse("CP0217", violation, span) else body


def _usage(name: str) -> str:
    """The call with its arguments, such as `blend(alpha = ..)`, for notes."""
    return f"{name}({', '.join(f'{key} = ..' for key in KEYS[name])})"


def _factor(ctx: CheckContext, name: str, key: str, arg: ast.CallArg) -> float | None:
    """The number of argument `key` of function `name`; None after reporting an error."""
    value = arg.value
    if isinstance(value, ast.Number) and value.unit is None:
        return float(value.value)
    message = f"`{key}` of `{name}` is a number without a unit, found `{written(value)}`"
    note = "a rate that changes is an operand of a fn of your own" if isinstance(value, ast.Name) else None
    return ctx.error("CP0217", message, value.span, note)


def _cast(ctx: CheckContext, arg: ast.CallArg) -> Builtin | None:
    """The function `cast` to the dtype in `arg`; None after reporting an error."""
    value, dtypes = arg.value, tuple(str(dtype) for dtype in DType if not dtype.is_only_moved)
    message = f"`dtype` of `cast` is an element type, found `{written(value)}`"
    if isinstance(value, ast.Number):
        return ctx.error("CP0217", message, value.span, f"the element types are {listed(dtypes)}")
    name = ctx.choose(value, dtypes, "CP0217", message, f"the element types are {listed(dtypes)}")
    return None if name is None else Builtin("cast", dtype=DType(name))


def _applied(body: Builtin, operands: Sequence[tuple[str, Element]]) -> tuple[Element, ...] | Violation:
    """The types of the results for operands, given by name and type; a violation if it does not take them."""
    first, kind = operands[0]
    for index, (name, type_) in enumerate(operands):
        if not isinstance(type_, ArrayType | TreeType):
            return Violation(f"`{name}` is `{type_}`, and `{body.name}` takes arrays and trees", at=index)
        if type(type_) is not type(kind):
            message = f"`{name}` is {type_}, and `{first}` is {kind}"
            return Violation(message, ("the operands are all trees, or all arrays of one shape",), index)
    leaves = [(name, _leaves(type_)) for name, type_ in operands]
    violation = body.misfit(leaves)
    if violation is not None:
        return violation
    if isinstance(kind, TreeType):
        return (TreeType(),) * body.definition.results
    results = body.results([each for _, each in leaves])
    return tuple(ArrayType(leaf.dtype, leaf.shape) for (leaf,) in results)


def _leaves(type_: Element) -> tuple[Leaf, ...]:
    """The leaf of an array; those of a tree are not known yet."""
    return (Leaf("", type_.shape, type_.dtype),) if isinstance(type_, ArrayType) else ()
