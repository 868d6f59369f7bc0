"""Checks of options in braces: the stages that take each one, and its values."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from commplan.diagnostics import Fix, Note, Span, listed
from commplan.dsl import ast
from commplan.dsl.check.context import CheckContext
from commplan.dsl.check.numbers import integer, nbytes, written
from commplan.dsl.check.types import FOREIGN
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
            type, `cache` for a size or `WORD("PATH", SIZE)` with one of `words`.
        least: The smallest value of a `count`.
        words: The words of a `word` or `cache`.
    """

    stages: tuple[str, ...]
    kind: Literal["bytes", "count", "word", "dtype", "cache"]
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
    "wire": OptionRule((*COLLECTIVES, "exchange", "elastic sync", *ASYNC), "dtype"),
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
        if value is not None and _suits(ctx, option, type_):
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
        case "dtype", ast.Name() as name if name.text in FLOATS:
            return DType(name.text)
        case _:
            return _report_value(ctx, option, rule)


def _report_value(ctx: CheckContext, option: ast.Option, rule: OptionRule) -> None:
    """Report a value of the wrong kind."""
    expected = {
        "bytes": "a size such as `25 MiB`",
        "count": "a whole number",
        "word": listed(rule.words, "or"),
        "dtype": f"a float type: {listed(FLOATS, 'or')}",
        "cache": 'a size such as `8 GiB`, or `disk("PATH", 200 GiB)`',
    }[rule.kind]
    words = {"word": rule.words, "dtype": FLOATS}.get(rule.kind, ())
    message = f"`{option.key.text}` is {expected}, found `{written(option.value)}`"
    fix = None if isinstance(option.value, ast.Location) else ctx.rename(option.value, words)
    translated = FOREIGN.get(option.value.text.lower()) if isinstance(option.value, ast.Name) else None
    if translated in words:
        fix = Fix(f"write `{translated}`", option.value.span, translated)
    ctx.error("CP0612", message, option.value.span, fix=fix)


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
