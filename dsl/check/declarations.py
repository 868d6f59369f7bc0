"""Checks of declarations: axes, sources, functions, inputs, states and the topology, each name once."""

from __future__ import annotations

from commplan.diagnostics import Note, listed
from commplan.dsl import ast
from commplan.dsl.check.context import FN, INPUT, KIND_WORDS, SOURCE, STATE, CheckContext, T
from commplan.dsl.check.numbers import integer
from commplan.dsl.check.placements import declared_placement
from commplan.dsl.check.types import declare_fn, element_type
from commplan.ir.plan import Axis, AxisKind, DeclaredTopology, Source
from commplan.ir.types import BytesType, Placement, Type

# The kind of an axis by the first word of its declaration.
_KINDS = {"axis": AxisKind.REPLICA, "ensemble": AxisKind.ENSEMBLE, "server": AxisKind.SERVER}

# The kinds of other declarations in words.
_WORDS = {ast.SourceDecl: SOURCE, ast.FnDecl: FN, ast.InputDecl: INPUT, ast.StateDecl: STATE}


def declare_all(ctx: CheckContext, items: tuple[ast.Decl, ...]) -> None:
    """Add all declarations to `ctx`, and report errors in them.

    Names are declared first, then axes, then everything else. The order in the file thus does not matter.
    """
    for item in items:
        _declare_name(ctx, item)
    for item in items:
        if isinstance(item, ast.AxisDecl):
            _declare_axis(ctx, item)
    for item in items:
        match item:
            case ast.SourceDecl():
                type_ = element_type(ctx, item.type)
                source = Source(item.name.text, type_, item.name.span) if type_ else None
                _declare(ctx, item.name, ctx.sources, source)
            case ast.FnDecl():
                _declare(ctx, item.name, ctx.fns, declare_fn(ctx, item))
            case ast.InputDecl() | ast.StateDecl():
                _declare_value(ctx, item)
            case ast.TopologyDecl():
                _declare_topology(ctx, item)
            case _:
                pass


def _declare_name(ctx: CheckContext, item: ast.Decl) -> None:
    """Record the name of a declaration. Reports a name that is declared twice."""
    if isinstance(item, ast.PhaseDecl | ast.TopologyDecl):
        return
    if isinstance(item, ast.BadStmt):
        names = ctx.recovery.declared(item)
        ctx.unknown.update(names)
        ctx.nameless = ctx.nameless or not names
        return
    kind = KIND_WORDS[_KINDS[item.kind]] if isinstance(item, ast.AxisDecl) else _WORDS[type(item)]
    name = item.name
    if name.text not in ctx.declared:
        ctx.declared[name.text] = (kind, name.span)
        return
    first, span = ctx.declared[name.text]
    message = f"`{name.text}` is declared twice"
    ctx.error("CP0101", message, name.span, Note(f"`{name.text}` is already {first}, declared here", span))
    ctx.unknown.add(name.text)


def _declare_topology(ctx: CheckContext, decl: ast.TopologyDecl) -> None:
    """Declare the topology. Reports a second one, and a path that cannot be a path."""
    if ctx.topology is not None:
        note = Note("the topology is already declared here", ctx.topology.span)
        ctx.error("CP0101", "`topology` is declared twice", decl.span, note)
        return
    if not decl.path.strip() or not decl.path.isprintable():
        ctx.error(
            "CP0712",
            f"{decl.path!r} is not a path of a topology",
            decl.span,
            'write `topology "cluster.toml"`',
        )
        return
    ctx.topology = DeclaredTopology(decl.path, decl.span)


def _declare_axis(ctx: CheckContext, decl: ast.AxisDecl) -> None:
    """Declare an axis. One with a wrong size has size None, as one with `?`."""
    name = decl.name.text
    size = None
    if decl.size is not None:
        size = integer(ctx, decl.size, f"the size of `{name}`", code="CP0108")
    if name in ctx.unknown:
        return
    ctx.axes[name] = Axis(name, _KINDS[decl.kind], size, decl.name.span)


def _declare(ctx: CheckContext, name: ast.Name, table: dict[str, T], declared: T | None) -> None:
    """Add a declaration to its table, or mark the name as unknown if the declaration is None."""
    if declared is None:
        ctx.unknown.add(name.text)
    elif name.text not in ctx.unknown:
        table[name.text] = declared


def _declare_value(ctx: CheckContext, decl: ast.InputDecl | ast.StateDecl) -> None:
    """Declare an input or a state."""
    name = decl.name
    is_state = isinstance(decl, ast.StateDecl)
    type_: Type | None = element_type(ctx, decl.type)
    if isinstance(type_, BytesType):
        message = f"{'a state' if is_state else 'an input'} cannot be `bytes`"
        note = "records of variable length come from a source, and a fn on the host turns them into arrays"
        ctx.error("CP0206", message, decl.type.span, note)
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


def _state_placement(ctx: CheckContext, decl: ast.StateDecl, placement: Placement) -> Placement | None:
    """The placement of a state, with its server; None after reporting an error.

    `placement` is the declared placement along the axes.
    """
    if placement.partial:
        item = next(item for item in decl.placement if item.kind == "partial")
        note = "a state outlives its phase, and an unreduced term may not: reduce it first"
        return ctx.error("CP0511", f"the state `{decl.name.text}` cannot be partial", item.span, note)
    if decl.server is None:
        return placement
    servers = {name: name for name, axis in ctx.axes.items() if axis.kind is AxisKind.SERVER}
    server = ctx.look_up(decl.server, servers, "CP0110", "server", "declare one: `server NAME = N`")
    if server is None:
        return None
    spread = (*placement.split, *(a for a in placement.per if ctx.axes[a].kind is AxisKind.REPLICA))
    if spread:
        item = next(i for i in decl.placement for name in i.axes if name.text in spread)
        message = (
            f"the state `{decl.name.text}` is on `{server}` and cannot be {item.kind} over {listed(spread)}"
        )
        note = "a server holds one copy for all ranks, apart from one `per` member of an ensemble"
        return ctx.error("CP0512", message, item.span, note)
    return Placement(placement.per, server=server)
