"""Checks of `via`: the algorithms that implement each stage, and their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from commplan.diagnostics import listed
from commplan.dsl import ast
from commplan.dsl.check.context import Axes, CheckContext
from commplan.dsl.check.numbers import integer, written
from commplan.ir.plan import Algorithm, Arg, Hints, Value
from commplan.ir.remark import DESIGNS
from commplan.ir.stages import rules
from commplan.ir.types import ArrayType

# Names of stages in the tables below.
BROADCAST = "broadcast"
REDUCE = "reduce"
SCATTER = "scatter"
GATHER = "gather"
SYNC = "elastic sync"
SWAP = "swap"

# The stages that each chunk program can implement. An elastic `sync` is an all-reduce of its pull.
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "native": (BROADCAST, REDUCE, SCATTER, GATHER, SYNC, SWAP),
    "ring": (BROADCAST, REDUCE, SCATTER, GATHER, SYNC),
    "recursive_doubling": (REDUCE, GATHER, SYNC),
    "halving_doubling": (REDUCE, SCATTER, GATHER, SYNC),
    "binomial_tree": (BROADCAST, REDUCE, SYNC),
    "double_tree": (BROADCAST, REDUCE, SYNC),
    "torus": (BROADCAST, REDUCE, SCATTER, GATHER, SYNC),
    "bruck": (SCATTER, GATHER, SWAP),
    "pairwise": (SWAP,),
    "chain": (BROADCAST, REDUCE, SYNC),
    "scatter_gather": (BROADCAST,),
    "hierarchical": (BROADCAST, REDUCE, SCATTER, GATHER, SYNC),
}
# The stages that each word after `via` can implement.
ALGORITHMS: dict[str, tuple[str, ...]] = (
    COLLECTIVES | {"parameter_server": ("exchange",)} | dict.fromkeys(DESIGNS, ("share",))
)
# The stages that take `via`, in the order of messages.
STAGES_WITH_VIA = (BROADCAST, "share", REDUCE, SCATTER, GATHER, "exchange", SYNC, SWAP)
# The keyword arguments of each algorithm; none for others. The levels of `hierarchical` are checked
# separately.
KEYS: dict[str, tuple[str, ...]] = {
    "single_broadcast": ("readers",),
    "multi_broadcast": ("readers",),
    "parameter_server": ("owners", "within"),
}


def algorithm(
    ctx: CheckContext, call: ast.CallExpr | None, stage: str, over: Axes | None, server: str | None = None
) -> Algorithm | None:
    """The algorithm after `via`; None without the clause, after reporting an error, or if `over` is needed.

    Args:
        ctx: The state of the check.
        call: The clause; None if it is absent.
        stage: The name of the stage, such as `reduce` or `elastic sync`.
        over: The axes of the stage; None if they have errors.
        server: The server of the states of an exchange; None for states on workers, and other stages.
    """
    if call is None:
        return None
    if stage not in STAGES_WITH_VIA:
        note = f"`via` chooses how {listed(STAGES_WITH_VIA, 'or')} is carried out"
        return ctx.error("CP0602", f"`{stage}` takes no `via`", call.span, note)
    name = call.name.text
    if name not in ALGORITHMS:
        candidates = carrying(stage)
        message = f"there is no algorithm `{name}`"
        note = f"`{stage}` takes {listed(candidates)}"
        return ctx.error("CP0601", message, call.name.span, note, fix=ctx.rename(call.name, candidates))
    if stage not in ALGORITHMS[name]:
        message = f"`{name}` does not carry out `{stage}`"
        return ctx.error("CP0603", message, call.name.span, f"`{stage}` takes {listed(carrying(stage))}")
    if name == "hierarchical":
        return _hierarchical(ctx, call, stage, over)
    args = ctx.keyed(call, KEYS.get(name, ()), "CP0604")
    if args is None:
        return None
    match name:
        case "single_broadcast" | "multi_broadcast":
            return _readers(ctx, call, args, over)
        case "parameter_server":
            return _parameter_server(ctx, call, args, over, server)
        case _:
            return Algorithm(name)


def carrying(stage: str) -> tuple[str, ...]:
    """The algorithms that implement `stage`."""
    return tuple(name for name, stages in ALGORITHMS.items() if stage in stages)


def carrying_a_level(stage: str) -> tuple[str, ...]:
    """The algorithms that implement `stage` at one level of a hierarchy.

    A level of a sum may be a scatter followed by a gather, so an algorithm that implements both qualifies.
    """
    is_sum = stage in (REDUCE, SYNC)
    return tuple(
        name
        for name, stages in COLLECTIVES.items()
        if name != "hierarchical" and (stage in stages or (is_sum and {SCATTER, GATHER} <= set(stages)))
    )


def _count(
    ctx: CheckContext, arg: ast.CallArg, role: Literal["readers", "owners"], code: str, over: Axes | None
) -> int | None:
    """The number of readers or owners, or None after reporting an error with `code`."""
    if not isinstance(arg.value, ast.Number):
        message = f"the number of {role} is a whole number, found `{arg.value.text}`"
        return ctx.error(code, message, arg.value.span)
    count = integer(ctx, arg.value, f"the number of {role}", code=code)
    violation = rules.reader_or_owner_count(role, count, over, ctx.size) if over else None
    return None if ctx.refuse(code, violation, arg.value.span) else count


def _readers(
    ctx: CheckContext, call: ast.CallExpr, args: dict[str, ast.CallArg], over: Axes | None
) -> Algorithm | None:
    """An algorithm of `share` with readers, or None after reporting an error."""
    name = call.name.text
    arg = args.get("readers")
    if arg is None:
        message = f"`{name}` needs the number of its readers"
        return ctx.error("CP0604", message, call.span, f"write `{name}(readers = 2)`")
    readers = _count(ctx, arg, "readers", "CP0607", over)
    return None if readers is None else Algorithm(name, (Arg(readers, "readers"),))


def _parameter_server(
    ctx: CheckContext, call: ast.CallExpr, args: dict[str, ast.CallArg], over: Axes | None, server: str | None
) -> Algorithm | None:
    """`parameter_server` with its optional arguments; None after reporting an error or without `over`."""
    arguments: list[Arg] = []
    if "owners" in args:
        arg = args["owners"]
        if server is not None:
            message = f"the states are on `{server}`, so there are no `owners` to choose"
            note = "owners are workers that hold a share of the states"
            return ctx.error("CP0608", message, arg.span, note)
        owners = _count(ctx, arg, "owners", "CP0608", over)
        if owners is None:
            return None
        arguments.append(Arg(owners, "owners"))
    if "within" in args:
        value = args["within"].value
        if over is None:
            return None
        if not isinstance(value, ast.Name) or value.text not in over:
            message = f"`within` is an axis of this exchange, found `{written(value)}`"
            note = f"it runs over {listed(over)}"
            return ctx.error("CP0608", message, value.span, note, fix=ctx.rename(value, over))
        arguments.append(Arg(value.text, "within"))
    return Algorithm("parameter_server", tuple(arguments))


def _hierarchical(ctx: CheckContext, call: ast.CallExpr, stage: str, over: Axes | None) -> Algorithm | None:
    """`hierarchical(gpu, node)` or `hierarchical(gpu = native, node = ring)`.

    None after reporting an error, or without `over`.
    """
    levels: list[Arg] = []
    names: list[ast.Name] = []
    for arg in call.args or ():
        axis = arg.key if arg.key is not None else arg.value
        if not isinstance(axis, ast.Name):
            return ctx.error("CP0605", f"a level is an axis, found `{written(axis)}`", axis.span)
        names.append(axis)
        if arg.key is None:
            levels.append(Arg(axis.text))
            continue
        level = _level(ctx, arg.value, stage)
        if level is None:
            return None
        levels.append(Arg(level, axis.text))
    if over is None:
        return None
    return Algorithm("hierarchical", tuple(levels)) if _levels_match(ctx, call, names, over) else None


def _level(ctx: CheckContext, value: ast.Name | ast.Number, stage: str) -> str | None:
    """The algorithm of one level, or None after reporting an error."""
    candidates = carrying_a_level(stage)
    if isinstance(value, ast.Name) and value.text in candidates:
        return value.text
    message = (
        f"a level of `{stage}` is carried out by one of {listed(candidates, 'or')}, found `{written(value)}`"
    )
    return ctx.error("CP0605", message, value.span, fix=ctx.rename(value, candidates))


def _levels_match(ctx: CheckContext, call: ast.CallExpr, names: Sequence[ast.Name], over: Axes) -> bool:
    """Check that the levels `names` are the axes `over`; False after reporting an error."""
    texts = [name.text for name in names]
    violation = rules.hierarchy_levels(texts, over)
    if violation is None:
        return True
    fix, span = None, call.span
    if violation.at < len(names):
        wrong = names[violation.at]
        near = ctx.near(wrong.text, [axis for axis in over if axis not in texts[: violation.at]])
        fix, span = ctx.rename(wrong, [near]) if near and wrong.text not in over else None, wrong.span
    return not ctx.refuse("CP0605", violation, span, fix=fix)


def check_accumulation(
    ctx: CheckContext, call: ast.CallExpr | None, how: str | None, via: Algorithm | None, hints: Hints,
    operand: Value | None,
) -> None:  # fmt: skip
    """Report an accumulation type that the algorithm after `via` cannot provide.

    Args:
        ctx: The state of the check.
        call: The clause `via`; None if it is absent.
        how: The operator of the stage; None if it combines nothing, or has an error.
        via: The algorithm; None if it has an error.
        hints: The options of the stage.
        operand: The operand; None if it has an error.
    """
    if call is None or how is None or operand is None:
        return
    dtype = operand.type.dtype if isinstance(operand.type, ArrayType) else None
    ctx.refuse("CP0606", rules.native_accumulator(how, via, hints, dtype, f"`{operand.name}`"), call.span)
