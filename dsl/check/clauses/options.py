"""Checks of options in braces: the stages that take each one, and its values."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from commplan.diagnostics import Fix, Note, Span, listed
from commplan.dsl import ast
from commplan.dsl.check.context import CheckContext
from commplan.dsl.check.numbers import integer, nbytes, written
from commplan.dsl.check.types import FOREIGN
from commplan.ir.codec import Codec, CodecName
from commplan.ir.hints import NO_HINTS, Cache
from commplan.ir.plan import Algorithm, Hints
from commplan.ir.stages import OVER_AXES, rules
from commplan.ir.stages.base import BaseStage
from commplan.ir.types import ArrayType, DType, ServedMode, Type


class OptionRule(msgspec.Struct, frozen=True):
    """The stages that take an option, and its range of values.

    Attributes:
        stages: The stages: verbs, `elastic MODE`, or `host map` for a `map` on the host.
        kind: `bytes` for a size, `count` for a whole number, `word` for one of `words`, `dtype` for a float
            type, `wire` for a float type or a block format `WORD(block = SIZE)`, `cache` for a size or
            `WORD("PATH", SIZE)`, both with one of `words`.
        least: The smallest value of a `count`.
        words: The words of a `word`, `wire` or `cache`.
    """

    stages: tuple[str, ...]
    kind: Literal["bytes", "count", "word", "dtype", "wire", "cache"]
    least: int = 1
    words: tuple[str, ...] = ()


# The stages that are collectives of the workers.
COLLECTIVES = tuple(verb for verb, stage in OVER_AXES.items() if stage.COLLECTIVE is not None)
# The stages that add values of the workers.
SUMS = ("reduce", "scatter", "exchange", "elastic sync")
# The stages of elastic averaging with servers.
ASYNC = tuple(f"elastic {mode}" for mode in get_args(ServedMode))

# The options by name.
OPTIONS: dict[str, OptionRule] = {
    "bucket": OptionRule((*COLLECTIVES, "elastic sync"), "bytes"),
    "overlap": OptionRule(SUMS, "word", words=("backward",)),
    "wire": OptionRule((*COLLECTIVES, "exchange", "elastic sync", *ASYNC), "wire", words=get_args(CodecName)),
    "accumulate": OptionRule(SUMS, "dtype"),
    "integers": OptionRule(("reduce",), "word", words=("max", "first")),
    "chunk": OptionRule((*COLLECTIVES, "exchange", "elastic sync", *ASYNC), "bytes"),
    "staleness": OptionRule(("exchange", *ASYNC), "count", least=0),
    "on_error": OptionRule(("load", "host map"), "word", words=("stop", "skip")),
    "on_failure": OptionRule(("load", "share"), "word", words=("stop", "continue")),
    "cores": OptionRule(("load", "host map"), "count"),
    "prefetch": OptionRule(("load", "gather"), "count"),
    "device_prefetch": OptionRule(("load",), "count"),
    "cache": OptionRule(("host map",), "cache", words=("disk",)),
}
FLOATS = tuple(str(dtype) for dtype in DType if dtype.is_float)  # the values of options of kind `dtype`


def hints(ctx: CheckContext, options: ast.Options | None, stage: str, type_: Type | None = None) -> Hints:
    """The valid options of a stage. Options with errors are reported and skipped.

    Args:
        ctx: The state of the check.
        options: The braces in the source; None without braces.
        stage: The name of the stage, as in `OptionRule.stages`.
        type_: The type of the values that are sent; None if it is unknown.
    """
    takes = f"`{stage}` takes {listed(options_of(stage)) or 'none'}"
    values: dict[str, Any] = {}
    first_spans: dict[str, Span] = {}
    for option in options.items if options else ():
        key = option.key.text
        rule = OPTIONS.get(key)
        if rule is None:
            message = f"there is no option `{key}`"
            ctx.error("CP0609", message, option.key.span, takes, fix=ctx.rename(option.key, OPTIONS))
            continue
        if key in first_spans:
            ctx.error("CP0611", f"`{key}` is repeated", option.key.span, Note("first here", first_spans[key]))
            continue
        first_spans[key] = option.key.span
        if stage not in rule.stages:
            message = f"`{key}` is not an option of `{stage}`"
            ctx.error("CP0610", message, option.key.span, f"it belongs to {listed(rule.stages, 'or')}", takes)
            continue
        value = _value(ctx, option, rule)
        if value is None or not _suits(ctx, option, type_):
            continue
        if isinstance(value, Codec):
            is_scalar = isinstance(type_, ArrayType) and not type_.shape
            violation = rules.block_format(stage, None, None, value, is_scalar=is_scalar)
            key = "codec"
            if ctx.refuse("CP0616", violation, option.key.span):
                continue
        values[key] = value
    return Hints(**values)


def check_effects(ctx: CheckContext, options: ast.Options | None, stage: BaseStage, kind: str) -> None:
    """Report options of a stage that have no effect, as far as types are known.

    Args:
        ctx: The state of the check.
        options: The braces in the source; None without braces.
        stage: The checked stage.
        kind: The kind of its phase.
    """
    sent = stage.sends()
    if options is None or sent is None:
        return
    ref, how = sent
    type_ = ctx.values[ref].type
    dtypes = (type_.dtype,) if isinstance(type_, ArrayType) else None
    collective: str | None = getattr(stage, "COLLECTIVE", None)
    via: Algorithm | None = getattr(stage, "via", None)
    hints: Hints = getattr(stage, "hints", NO_HINTS)
    idle = rules.options_without_effect(how, collective, via, hints, dtypes)
    if hints.overlap is not None and kind == "start":
        note = "leave `overlap` out"
        idle["overlap"] = rules.Violation("`at start` has no backward pass to overlap with", (note,))
    for option in options.items:
        violation = idle.get(option.key.text)
        if violation is not None:
            message = f"`{option.key.text} = {written(option.value)}` has no effect: {violation.message}"
            ctx.error("CP0614", message, option.key.span, *violation.notes)


def options_of(stage: str) -> tuple[str, ...]:
    """The options that `stage` takes, a name as in `OptionRule.stages`."""
    return tuple(key for key, rule in OPTIONS.items() if stage in rule.stages)


def _value(ctx: CheckContext, option: ast.Option, rule: OptionRule) -> object:
    """The value of an option, for the field of `Hints` with its name; None after reporting an error."""
    key = f"`{option.key.text}`"
    match rule.kind, option.value:
        case "bytes", ast.Number() as number:
            return nbytes(ctx, number, key, code="CP0612")
        case "cache", ast.Number() as number:
            size = nbytes(ctx, number, key, code="CP0612")
            return None if size is None else Cache(size)
        case "cache", ast.Location(size=ast.Number() as number) as file if file.name.text in rule.words:
            size = nbytes(ctx, number, key, code="CP0612")
            return None if size is None else Cache(size, file.path)
        case "count", ast.Number() as number:
            return integer(ctx, number, key, least=rule.least, code="CP0612")
        case "word", ast.Name() as name if name.text in rule.words:
            return name.text
        case "dtype" | "wire", ast.Name() as name if name.text in FLOATS:
            return DType(name.text)
        case "wire", ast.CallExpr() as call:
            return _codec(ctx, call, rule)
        case _:
            return _report_value(ctx, option, rule)


def _report_value(ctx: CheckContext, option: ast.Option, rule: OptionRule) -> None:
    """Report a value of the wrong kind."""
    expected = {
        "bytes": "a size such as `25 MiB`",
        "count": "a whole number",
        "word": listed(rule.words, "or"),
        "dtype": f"a float type: {listed(FLOATS, 'or')}",
        "wire": f"a float type, {listed(FLOATS, 'or')}, or a block format such as `int8(block = 32)`",
        "cache": 'a size such as `8 GiB`, or `disk("PATH", 200 GiB)`',
    }[rule.kind]
    words = {"word": rule.words, "dtype": FLOATS, "wire": FLOATS}.get(rule.kind, ())
    message = f"`{option.key.text}` is {expected}, found `{written(option.value)}`"
    fix = ctx.rename(option.value, words) if isinstance(option.value, ast.Name | ast.Number) else None
    text = option.value.text if isinstance(option.value, ast.Name) else ""
    translated = FOREIGN.get(text.lower())
    if rule.kind == "wire" and text in rule.words:
        translated = f"{text}(block = 32)"
    if translated in (*words, f"{text}(block = 32)"):
        fix = Fix(f"write `{translated}`", option.value.span, translated)
    ctx.error("CP0612", message, option.value.span, fix=fix)


def _codec(ctx: CheckContext, call: ast.CallExpr, rule: OptionRule) -> Codec | None:
    """The block format `int8(block = 32)`, or None after reporting an error."""
    message = f"there is no block format `{call.name.text}`"
    name = ctx.choose(call.name, get_args(CodecName), "CP0612", message, f"there are {listed(rule.words)}")
    args = name and ctx.keyed(call, ("block",), "CP0612")
    if name is None or args is None:
        return None
    if "block" not in args:
        note = f"write `{name}(block = 32)`"
        return ctx.error("CP0612", f"`{name}` lacks the size of its blocks", call.span, note)
    number = args["block"].value
    if not isinstance(number, ast.Number):
        message = f"`block` is a number of elements, found `{written(number)}`"
        return ctx.error("CP0612", message, number.span)
    size = integer(ctx, number, "`block`", code="CP0612")
    codec = Codec(name, size or 8)
    if codec.violation is not None:
        return ctx.error("CP0612", codec.violation, number.span)
    return codec if size is not None else None


def _suits(ctx: CheckContext, option: ast.Option, type_: Type | None) -> bool:
    """Whether an option suits the type of the values; reports if it does not.

    `wire` and `accumulate` would round integers. A tree or an unknown type suits every option.
    """
    if option.key.text not in ("wire", "accumulate"):
        return True
    if not isinstance(type_, ArrayType) or type_.dtype.is_float:
        return True
    message = f"`{option.key.text}` is for float values, found {type_}"
    ctx.error("CP0613", message, option.key.span, "integers are sent and added as they are")
    return False
