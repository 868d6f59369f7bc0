"""Checks of types in the source, and of declarations of functions."""

from __future__ import annotations

from typing import get_args

from commplan.diagnostics import Fix, listed
from commplan.dsl import ast
from commplan.dsl.check.builtins import declare_builtin
from commplan.dsl.check.context import CheckContext, all_known
from commplan.dsl.check.numbers import integer
from commplan.ir.plan import Fn
from commplan.ir.types import ArrayType, BytesType, DType, Element, FnElement, Processor, TreeType

DTYPES = tuple(str(dtype) for dtype in DType)  # element types
TYPES = (*DTYPES, "bytes", "tree")  # all names of types
PLACES: tuple[Processor, ...] = get_args(Processor)  # the words after `on` in a declaration of a function
FLAGS = ("elementwise", "linear", "random")  # the words after these, in the order of the fields of `Fn`
# Names of types in other libraries, and the name in this language.
FOREIGN = {
    "float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16", "float64": "f64",
    "double": "f64", "int32": "i32", "int": "i32", "int64": "i64", "long": "i64", "uint8": "u8", "byte": "u8",
    "int8": "i8", "int16": "i16", "short": "i16", "uint16": "u16", "uint32": "u32", "uint": "u32",
    "boolean": "bool", "pytree": "tree",
}  # fmt: skip


def element_type(ctx: CheckContext, expr: ast.TypeExpr) -> Element | None:
    """The type that `expr` denotes, or None after reporting an error.

    An element type without brackets is a scalar.
    """
    name = expr.name.text
    if name not in TYPES:
        near, span = FOREIGN.get(name.lower()) or ctx.near(name, TYPES), expr.name.span
        fix = Fix(f"write `{near}`", span, near) if near else None
        return ctx.error(
            "CP0201", f"there is no type `{name}`", span, f"the types are {listed(TYPES)}", fix=fix
        )
    if name in ("bytes", "tree"):
        if expr.dims is not None:
            return ctx.error("CP0202", f"`{name}` has no dimensions", expr.span, "only arrays have")
        return BytesType() if name == "bytes" else TreeType()
    dims = all_known([integer(ctx, dim, "a dimension", code="CP0202") for dim in expr.dims or ()])
    return None if dims is None else ArrayType(DType(name), dims)


def declare_fn(ctx: CheckContext, decl: ast.FnDecl) -> Fn | None:
    """The declared function, or None after reporting errors."""
    operands = all_known([element_type(ctx, expr) for expr in decl.operands])
    results = all_known([element_type(ctx, expr) for expr in decl.results])
    if decl.body is not None:
        if operands is None or results is None:
            return None
        return declare_builtin(ctx, decl, decl.body, (operands, results))
    where = _where(ctx, decl)
    flags = _flags(ctx, decl)
    if where is None or flags is None or operands is None or results is None:
        return None
    fn = Fn(decl.name.text, operands, results, where, decl.name.span, *flags)
    valid = _bytes_stay_on_host(ctx, decl, fn) and _elementwise_shapes(ctx, decl, fn)
    if where == "host" and not decl.operands:
        note = "a host fn is applied record by record: its operands are the record's parts"
        return ctx.error("CP0215", f"`{fn.name}` runs on the host and takes nothing", decl.name.span, note)
    return fn if valid else None


def _where(ctx: CheckContext, decl: ast.FnDecl) -> Processor | None:
    """The processor of a function, or None after reporting an error."""
    if decl.where is None:
        note = "end its declaration with `on host` or `on device`"
        message = f"`fn {decl.name.text}` lacks `on host` or `on device`"
        return ctx.error("CP0203", message, decl.name.span, note)
    message = f"a fn runs on `host` or on `device`, found `{decl.where.text}`"
    return ctx.choose(decl.where, PLACES, "CP0203", message)


def _flags(ctx: CheckContext, decl: ast.FnDecl) -> tuple[bool, bool, bool] | None:
    """Whether a function has each of `FLAGS`, or None after reporting an unknown flag."""
    names: set[str] = set()
    valid = True
    for flag in decl.flags:
        message = f"a fn is {listed(FLAGS, 'or')}, found `{flag.text}`"
        if ctx.choose(flag, FLAGS, "CP0204", message) is None:
            valid = False
        elif flag.text in names:
            ctx.error("CP0204", f"`{flag.text}` is repeated", flag.span)
        names.add(flag.text)
    return ("elementwise" in names, "linear" in names, "random" in names) if valid else None


def _bytes_stay_on_host(ctx: CheckContext, decl: ast.FnDecl, fn: Fn) -> bool:
    """Check that a function on the device has no `bytes`; False after reporting an error."""
    if fn.where == "host":
        return True
    pairs = zip((*decl.operands, *decl.results), (*fn.operands, *fn.results), strict=True)
    for expr, type_ in pairs:
        if isinstance(type_, BytesType):
            message = f"`{fn.name}` runs on the device, which has no `bytes`"
            note = "a record of variable length has no shape: turn it into an array with a fn on the host"
            ctx.error("CP0206", message, expr.span, note)
            return False
    return True


def _elementwise_shapes(ctx: CheckContext, decl: ast.FnDecl, fn: Fn) -> bool:
    """Check that an elementwise function has one shape; False after reporting an error.

    All results have the shape of the operands that are not scalars, or are scalars if there are none.
    """
    if not fn.elementwise:
        return True
    shapes = [(expr, _shape(type_)) for expr, type_ in zip(decl.operands, fn.operands, strict=True)]
    whole = [(expr, shape) for expr, shape in shapes if shape != ()]
    expected = whole[0][1] if whole else ()
    results = [(expr, _shape(type_)) for expr, type_ in zip(decl.results, fn.results, strict=True)]
    for expr, shape in (*whole, *results):
        if shape is None or shape != expected:
            note = (
                "an elementwise fn computes each element separately: operands that are not scalars, "
                "and all results, have one shape"
            )
            ctx.error("CP0205", f"`{fn.name}` cannot be elementwise with `{_text(expr)}`", expr.span, note)
            return False
    return True


def _shape(type_: FnElement) -> tuple[int, ...] | str | None:
    """The dimensions of an array, "tree" for a tree, None for types without elements."""
    if isinstance(type_, ArrayType):
        return type_.shape
    return "tree" if isinstance(type_, TreeType) else None


def _text(expr: ast.TypeExpr) -> str:
    """The type as in the source, without empty brackets."""
    dims = f"[{', '.join(dim.text for dim in expr.dims)}]" if expr.dims else ""
    return f"{expr.name.text}{dims}"
