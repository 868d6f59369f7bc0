"""Declarations: axes, sources, functions, inputs and states, each name once."""

from __future__ import annotations

from commplan.diagnostics import Note, listed
from commplan.dsl import ast
from commplan.dsl.check.context import KIND_WORDS, Context
from commplan.dsl.check.numbers import integer
from commplan.dsl.check.placements import declared_placement
from commplan.dsl.check.types import declare_fn, element_type
from commplan.ir.plan import Axis, AxisKind, Source
from commplan.ir.types import BytesType, Placement, Type

_KINDS = {"axis": AxisKind.REPLICA, "ensemble": AxisKind.ENSEMBLE, "server": AxisKind.SERVER}


def declare_all(ctx: Context, items: tuple[ast.Decl, ...]) -> None:
    """Declare everything: names first, then axes, so that the order in the file does not matter."""
    for item in items:
        _declare_name(ctx, item)
    for item in items:
        if isinstance(item, ast.AxisDecl):
            _declare_axis(ctx, item)
    for item in items:
        match item:
            case ast.SourceDecl():
                _declare_source(ctx, item)
            case ast.FnDecl():
                fn = declare_fn(ctx, item)
                if fn is None:
                    ctx.unknown.add(item.name.text)
                elif item.name.text not in ctx.unknown:
                    ctx.fns[fn.name] = fn
            case ast.InputDecl() | ast.StateDecl():
                _declare_value(ctx, item)
            case _:
                pass


def _declare_name(ctx: Context, item: ast.Decl) -> None:
    match item:
        case ast.AxisDecl():
            kind = KIND_WORDS[_KINDS[item.kind]]
        case ast.SourceDecl():
            kind = "a source"
        case ast.FnDecl():
            kind = "a fn"
        case ast.InputDecl():
            kind = "an input"
        case ast.StateDecl():
            kind = "a state"
        case ast.BadStmt():
            names = ctx.unread.declared(item)
            ctx.unknown.update(names)
            ctx.nameless = ctx.nameless or not names
            return
        case ast.PhaseDecl():
            return
    name = item.name
    if name.text not in ctx.declared:
        ctx.declared[name.text] = (kind, name.span)
        return
    first, span = ctx.declared[name.text]
    ctx.error(
        "CP0101",
        f"`{name.text}` is declared twice",
        name.span,
        Note(f"`{name.text}` is already {first}, declared here", span),
    )
    ctx.unknown.add(name.text)


def _declare_axis(ctx: Context, decl: ast.AxisDecl) -> None:
    name = decl.name.text
    size = None
    if decl.size is not None:
        size = integer(ctx, decl.size, f"the size of `{name}`", code="CP0108")
    if name in ctx.unknown:
        return
    ctx.axes[name] = Axis(name, _KINDS[decl.kind], size, decl.name.span)


def _declare_source(ctx: Context, decl: ast.SourceDecl) -> None:
    type_ = element_type(ctx, decl.type)
    if type_ is None:
        ctx.unknown.add(decl.name.text)
    elif decl.name.text not in ctx.unknown:
        ctx.sources[decl.name.text] = Source(decl.name.text, type_, decl.name.span)


def _declare_value(ctx: Context, decl: ast.InputDecl | ast.StateDecl) -> None:
    name = decl.name
    is_state = isinstance(decl, ast.StateDecl)
    type_: Type | None = element_type(ctx, decl.type)
    if isinstance(type_, BytesType):
        ctx.error(
            "CP0206",
            f"{'a state' if is_state else 'an input'} cannot be `bytes`",
            decl.type.span,
            "records of variable length come from a source, and a fn on the host turns them into arrays",
        )
        type_ = None
    placement = declared_placement(ctx, decl.placement, type_, decl.type.span)
    if isinstance(decl, ast.StateDecl) and placement is not None:
        placement = _state_placement(ctx, decl, placement)
    if type_ is None or placement is None:
        ctx.unknown.add(name.text)
        return
    if name.text in ctx.unknown:
        return
    value = ctx.new_value(name, type_, placement)
    (ctx.states if is_state else ctx.inputs)[name.text] = value


def _state_placement(ctx: Context, decl: ast.StateDecl, placement: Placement) -> Placement | None:
    if placement.partial:
        item = next(item for item in decl.placement if item.kind == "partial")
        ctx.error(
            "CP0511",
            f"the state `{decl.name.text}` cannot be partial",
            item.span,
            "a state outlives its phase, and an unreduced term may not: reduce it first",
        )
        return None
    if decl.server is None:
        return placement
    server = _server(ctx, decl.server)
    if server is None:
        return None
    spread = (*placement.split, *(a for a in placement.per if ctx.axes[a].kind is AxisKind.REPLICA))
    if spread:
        item = next(i for i in decl.placement for name in i.axes if name.text in spread)
        ctx.error(
            "CP0512",
            f"the state `{decl.name.text}` lives on `{server}` and cannot be {item.kind} "
            f"over {listed(spread)}",
            item.span,
            "a server holds one copy for all ranks, apart from one `per` member of an ensemble",
        )
        return None
    return Placement(placement.per, server=server)


def _server(ctx: Context, name: ast.Name) -> str | None:
    if name.text in ctx.unknown:
        return None
    axis = ctx.axes.get(name.text)
    if axis is not None and axis.kind is AxisKind.SERVER:
        return axis.name
    servers = [axis.name for axis in ctx.axes.values() if axis.kind is AxisKind.SERVER]
    kind = ctx.kind_of(name.text)
    if kind is None and ctx.is_settled(name.text):
        return None
    ctx.error(
        "CP0110",
        f"`{name.text}` is {kind}, expected a server" if kind else f"there is no server `{name.text}`",
        name.span,
        f"declared: {listed(servers)}" if servers else "declare one: `server NAME = N`",
        fix=None if kind else ctx.rename(name, servers),
    )
    return None
