"""Checks of states on servers: single ownership, message tags, and ops that communicate with servers.

Verified: the units of a state cover it without overlap; no server exceeds the mean load by more than one
unit; each message of a call site has its own tag; and messages carry exactly the units of their state. The
module also bounds the memory of servers and workers.

`verify.structural` calls `check_server_op` for each op, `check_served` for each phase and `check_servers` for
the schedule.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from commplan.diagnostics import CommplanError
from commplan.ir.analysis.server_ops import ServerOp, server_op, server_results, worker_operands
from commplan.ir.plan import name_of
from commplan.ir.schedule import Elastic, Exchange, Get, Op, Put, Schedule, results
from commplan.ir.stages import rules
from commplan.protocol.build_sites import sites
from commplan.protocol.sites import FIRST_TAG, Site, Sites, StateDistribution, nbytes_of
from commplan.protocol.units import StateLayout
from commplan.verify.scope import DiagnosticReport, OpScope

_NEEDS_GET = "which is stored on servers: an op `get` must fetch it"  # the end of a message


class ServerMemory(NamedTuple):
    """Upper bounds in bytes for one server and one worker.

    A worker has at most staleness + 1 unanswered requests of an exchange and one of every other call, since
    it waits for the reply: arriving = sum over sites of (staleness + 1) * workers * bytes per request.
    Workers that only `put` are not throttled; one put per site is counted.

    Attributes:
        states: states of the server.
        arriving: requests received but not yet processed.
        answers: replies in flight.
        worker: data that a worker sends and receives at one call site.
        staleness: largest staleness of any exchange: the number of exchanges that a worker may be ahead.
    """

    states: int
    arriving: int
    answers: int
    worker: int
    staleness: int


def owned_states(schedule: Schedule) -> tuple[tuple[Site, StateDistribution], ...]:
    """Return each state on servers once, with the first call site that uses it.

    Raises:
        CommplanError: CP0726, CP0729 or CP0767, as `commplan.protocol.build_sites.sites`.
    """
    owners: dict[str, tuple[Site, StateDistribution]] = {}
    for site in sites(schedule).all:
        for owned_state in site.distributions:
            owners.setdefault(owned_state.state, (site, owned_state))
    return tuple(owners.values())


def server_memory(schedule: Schedule) -> ServerMemory | None:
    """Return the bounds for the busiest server and for a worker, or None if no op uses a server.

    Raises:
        CommplanError: CP0726, CP0729 or CP0767, as `commplan.protocol.build_sites.sites`.
    """
    call_sites = sites(schedule)
    if not call_sites.all:
        return None
    states, arriving, answers = ([0] * call_sites.servers for _ in range(3))
    counted: set[str] = set()
    for site in call_sites.all:
        groups = len(call_sites.members(site))
        for owned_state in site.distributions:
            if owned_state.state not in counted:
                counted.add(owned_state.state)
                for server, nbytes in enumerate(owned_state.nbytes):
                    states[site.first + server] += nbytes * groups
        unanswered = (site.staleness or 0) + 1 if site.kind == "exchange" else 1  # of one sender
        senders = groups if site.kind == "put" else call_sites.workers
        for server in range(site.servers):
            arriving[site.first + server] += unanswered * senders * nbytes_of(site.up, server)
            answers[site.first + server] += call_sites.workers * nbytes_of(site.down, server)
    busiest = max(range(call_sites.servers), key=lambda server: states[server] + arriving[server])
    worker = max(nbytes_of(site.up) + nbytes_of(site.down) for site in call_sites.all)
    stale = max((site.staleness or 0 for site in call_sites.all), default=0)
    return ServerMemory(states[busiest], arriving[busiest], answers[busiest], worker, stale)


def check_servers(schedule: Schedule, report: DiagnosticReport) -> None:
    """Report invalid states on servers, for a schedule whose ops are valid."""
    try:
        call_sites = sites(schedule)
    except CommplanError as error:
        report.diagnostics.extend(error.diagnostics)
        return
    _tags(call_sites, report)
    for site in call_sites.all:
        for name, layout in zip(site.states, site.layouts, strict=True):
            wrong = ownership_error(layout)
            if wrong:
                report.add("CP0764", f"`{name}` on `{site.server}`: {wrong}", site.span)
        if not 0 <= site.first <= call_sites.servers - site.servers:
            report.add("CP0764", f"`{site.server}` has servers that the plan does not have", site.span)
        _messages(site, report)


def ownership_error(layout: StateLayout) -> str:
    """Describe an error in the ownership of a state.

    Returns:
        An empty string if each element has one owner and the load is balanced.
    """
    if not layout.slots:  # only scalars, which are stored with the units of the weights
        return ""
    for number, part in enumerate(layout.parts):
        end = 0
        for unit in sorted((u for u in layout.units if u.part == number), key=lambda u: u.start):
            if unit.start != end or unit.size < 1:
                reason = "is owned twice" if unit.start < end else "has no owner"
                return f"element {min(unit.start, end)} of its part {number} ({part.dtype}) {reason}"
            if not 0 <= unit.server < layout.servers:
                return f"unit {unit.number} belongs to server {unit.server} of {layout.servers}"
            end += unit.size
        if end != part.size:
            return f"element {min(end, part.size)} of its part {number} ({part.dtype}) has no owner"
    if len({unit.number for unit in layout.units}) != len(layout.units):
        return "two of its units have one number"
    mean = sum(layout.loads) / layout.servers
    largest = max((layout.nbytes(unit) for unit in layout.units), default=0)
    if max(layout.loads) > mean + largest:
        return f"a server has {max(layout.loads)} bytes, the mean is {mean:.0f} and a unit at most {largest}"
    return ""


def _tags(call_sites: Sites, report: DiagnosticReport) -> None:
    """Report the first tag that two messages of a plan have, or that is below `FIRST_TAG`."""
    site_of_tag: dict[int, Site] = {}
    for site in call_sites.all:
        for buffer in (*site.up, *site.down, *site.token):
            for chunk in buffer.chunks:
                if chunk.tag < FIRST_TAG or chunk.tag in site_of_tag:
                    report.add("CP0764", f"two messages have the tag {chunk.tag}", site.span)
                    return
                site_of_tag[chunk.tag] = site


def _messages(site: Site, report: DiagnosticReport) -> None:
    """Report a call site whose data messages are not exactly the units of its first state."""
    units = {(u.number, u.part, u.start, u.size, u.server) for u in site.layout.units}
    for verb, buffers in (("sent", site.up), ("got", site.down)):
        data = [buffer for buffer in buffers if buffer.content == "data" and buffer.slot == 0]
        moved = [(c.unit, b.part, c.start, c.size, c.server) for b in data for c in b.chunks]
        if data and (len(moved) != len(units) or set(moved) != units):
            state = site.states[0]
            report.add(
                "CP0764", f"the units {verb} of `{state}` are not all of its units, once each", site.span
            )


# Single ops.


def check_server_op(scope: OpScope, op: ServerOp) -> None:
    """Report an invalid op that may communicate with servers. Shapes are checked elsewhere."""
    match op:
        case Exchange():
            _hints(scope, op)
            _exchange(scope, op)
        case Elastic():
            _hints(scope, op)
            _elastic(scope, op)
        case Put():
            _on_server(scope, op, op.result, "put to")
        case Get():
            _on_server(scope, op, op.operand, "got from")


def _hints(scope: OpScope, op: Exchange | Elastic) -> None:
    """Report options that are too small, and an op without ranks."""
    for name, number, least in (("staleness", op.hints.staleness, 0), ("chunk", op.hints.chunk, 1)):
        if number is not None and number < least:
            scope.report.add("CP0735", f"{name} = {number} is less than {least}", op.span)
    if not op.axes or math.prod(scope.sizes.get(axis, 0) for axis in op.axes) < 1:
        scope.report.add("CP0734", "workers meet over no axis", op.span)


def check_served(scope: OpScope) -> None:
    """Report ops that read server values without fetching them, and updates of them by other ops."""
    phase, report, values = scope.phase, scope.report, scope.values
    served = {ref for ref in phase.states if values[ref].placement.server is not None}
    unread = {*served}
    for op in phase.ops:
        if (request := server_op(op, values)) is not None:
            unread.update(server_results(request))
            served.update(results(op))
        for ref in worker_operands(op, values):
            if ref in unread:
                report.add("CP0764", f"`{results(op)[0]}` reads `{ref}`, {_NEEDS_GET}", op.span)
    for binding in phase.outputs:
        if binding.value in unread:
            report.add("CP0764", f"output `{binding.name}` is `{binding.value}`, {_NEEDS_GET}", phase.span)
    for binding in phase.updates:
        on_server = values[binding.value].placement.server is not None
        if on_server and (binding.value not in served or name_of(binding.value) != binding.name):
            message = f"no op makes `{binding.value}` the state `{binding.name}` of servers"
            report.add("CP0764", message, phase.span)


def _on_server(scope: OpScope, op: Op, ref: str, action: str) -> None:
    """Report a value `ref` that is not on a server, or not derived from a state on the same server."""
    state = scope.values.get(scope.declarations.states.get(name_of(ref).partition("/")[0], ""))
    server = scope.values[ref].placement.server
    if server is None:
        scope.report.add("CP0735", f"`{ref}` is not on a server", op.span)
    elif state is None:
        scope.report.add("CP0730", f"`{ref}` is {action} server `{server}`, but is not a state", op.span)
    elif state.placement.server != server:
        home = state.placement.server or "no server"
        scope.report.add("CP0734", f"`{ref}` is {action} `{server}`, but its state is on {home}", op.span)


def _exchange(scope: OpScope, op: Exchange) -> None:
    """Report states on different servers, and gradients or update functions that do not fit them."""
    if len(op.results) != len(op.states) or not op.states:
        return  # already reported
    values = scope.values
    homes = [(name_of(ref), values[ref].placement.server) for ref in (*op.states, *op.results)]
    scope.report.refuse("CP0734", rules.common_home(homes), op.span)
    owners = op.algorithm and op.algorithm.get("owners")
    scope.report.refuse(
        "CP0735", rules.reader_or_owner_count("owners", owners, op.axes, scope.ranks), op.span
    )
    shapes = [[leaf.shape for leaf in values[ref].leaves] for ref in (op.gradient, op.states[0])]
    if shapes[0] != shapes[1]:
        scope.report.add("CP0731", f"`{op.gradient}` does not have the shapes of `{op.states[0]}`", op.span)
    scope.report.refuse(
        "CP0735", rules.reducible_leaves(op.op, values[op.gradient].leaves, op.gradient, op.hints), op.span
    )
    if values[op.gradient].placement.server is not None:
        scope.report.add("CP0734", f"`{op.gradient}` is on a server, but workers send it", op.span)
    fn = scope.declarations.fns.get(op.fn)
    if fn is None:
        return  # already reported
    count = len(op.states)
    scope.report.refuse("CP0731", rules.operand_count(fn.name, len(fn.operands), count + 1), op.span)
    scope.report.refuse("CP0731", rules.result_count(fn.name, len(fn.results), count), op.span)
    broken = rules.update_function(fn.name, fn.where, elementwise=fn.elementwise, random=fn.random)
    scope.report.refuse("CP0735", broken, op.span)


def _elastic(scope: OpScope, op: Elastic) -> None:
    """Report a center whose location does not fit the mode, and invalid leaves and coefficients."""
    home = scope.values[op.center].placement.server
    scope.report.refuse("CP0734", rules.center_home(op.mode, name_of(op.center), home), op.span)
    if op.result is not None and op.mode != "sync":
        result = scope.values[op.result]
        if result.placement.server != home:
            scope.report.add("CP0734", f"`{op.result}` is not on the server of its center", op.span)
    leaves = scope.values[op.operand].leaves
    scope.report.refuse("CP0735", rules.reducible_leaves("elastic", leaves, op.operand, op.hints), op.span)
    broken = rules.coefficients(op.eta, op.rho) or rules.stability(
        op.mode, op.eta, op.rho, op.axes, scope.ranks
    )
    scope.report.refuse("CP0735", broken, op.span)
