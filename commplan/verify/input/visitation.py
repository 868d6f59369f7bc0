"""The visitation contract: what each member is given in an epoch is what its load promises.

How many records a source has is known when it is bound, and the batch may be any number: so the functions
that runs go by (`commplan.input`) are proved for all of them at once. Every length is q whole batches and a
rest that is 0 or lies between 1 and the batch less one; in each of the two cases `Order` is run on symbols
(`commplan.verify.programs.polynomial`) for a step among the whole ones and for the one behind them. So is the
cut of a batch into parts, for any number of rows and of parts. What is then left of a schedule, who makes
which part and what moves between hosts, is run for the processes that may share, and for who may be left of
them. That the order itself is a permutation rests on its construction, a Feistel network that walks its
cycles, and on tests.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, cast

from commplan.diagnostics import Diagnostic, Note, Span
from commplan.input.order import Order, Tail, Visit
from commplan.input.rates import Rates
from commplan.input.work_partition import Division, HostTransfer, Turns, failover
from commplan.verify.programs.polynomial import Term, UndecidedError, symbol

_LOOKED_AT = 4096  # a batch as large as this is counted through, for a counter-example
Orders = Callable[[int, int, int, Visit, Tail], Order]
Adopter = Callable[[Division, Collection[int]], Division]


class Broken(NamedTuple):
    """Why a promise does not hold: one case in which it is broken. code: CP0760 a visit, CP0761 a division of
    work, CP0762 members' clocks."""

    code: str
    message: str
    expected: str
    found: str

    def diagnostic(self, subject: str, span: Span | None, file: str) -> Diagnostic:
        notes = (Note(f"expected {self.expected}"), Note(f"found {self.found}"))
        return Diagnostic(self.code, f"{subject}: {self.message}", span, notes, file=file)


# --- one member's visits ---


@functools.lru_cache(maxsize=128)
def prove_order(visit: Visit, tail: Tail, batch: int, orders: Orders = Order) -> Broken | None:
    """That `visit` holds with `tail`, for every length and every batch; None where it does.

    batch: the plan's, which a counter-example is looked for with first. orders: what makes an order.
    """
    try:
        why = _whole_batches(visit, tail, orders) or _rest(visit, tail, orders)
    except UndecidedError as undecided:
        why = f"whether {undecided} depends on the numbers"
    if why is None:
        return None
    return next(_broken_visits(visit, tail, batch, orders), None) or Broken(
        "CP0760", f"{visit} with tail {tail} cannot be proved", "every length to be visited as promised", why
    )


def _whole_batches(visit: Visit, tail: Tail, orders: Orders) -> str | None:
    """A step k of q = k + 1 + s whole batches, with and without a rest behind them."""
    k, s, c, more = symbol("k"), symbol("s"), symbol("c"), symbol("r")
    whole = k + 1 + s
    for rest, batch in ((Term({}), c + 1), (more + 1, more + 2 + c)):
        length = whole * batch + rest
        order = orders(*cast("tuple[int, int]", (length, batch)), 0, visit, tail)
        last = 1 if rest.positive() else 0
        wrong = _steps(visit, cast("Any", order.steps), whole, last)
        wrong = wrong or _step(visit, order, k, (k * batch, (k + 1) * batch), length)
        if wrong:
            return wrong
    return None


def _rest(visit: Visit, tail: Tail, orders: Orders) -> str | None:
    """The step behind q whole batches, where a rest of 1 to batch - 1 records is left."""
    q, c, more = symbol("q"), symbol("c"), symbol("r")
    rest, batch = more + 1, more + 2 + c
    length = q * batch + rest
    order = orders(*cast("tuple[int, int]", (length, batch)), 0, visit, tail)
    if cast("Any", order.steps) <= q:
        return None  # there is no such step: that whole batches suffice is looked at with them
    return _step(visit, order, q, (q * batch, length), length)


def _steps(visit: Visit, steps: Term, whole: Term, last: int) -> str | None:
    """Whether an epoch has as many steps as its records need, at least or at most."""
    needed = whole + last
    return None if _fits(visit, steps, needed) else f"{steps} steps an epoch where {needed} are needed"


def _fits(visit: Visit, count: Term, needed: Term) -> bool:
    if visit == "exactly_once":
        return count == needed
    return count >= needed if visit == "at_least_once" else count <= needed


def _step(visit: Visit, order: Order, step: Term, own: tuple[Term, Term], length: Term) -> str | None:
    """Whether `step` counts the positions [low, high) of `own` as promised, and no position of other
    steps."""
    low, high = cast("tuple[Term, Term]", order.span(cast("Any", step)))
    counted, needed = cast("Term", order.counted(cast("Any", step))), own[1] - own[0]
    if not low.same(own[0]):
        return f"step {step} begins at {low}, not at {own[0]}"
    if counted < 0 or counted > high - low:
        return f"step {step} counts {counted} of {high - low} slots"
    if not _fits(visit, counted, needed):
        return f"step {step} counts {counted} records of {needed}"
    return f"step {step} goes past the end" if visit != "at_least_once" and low + counted > length else None


def _broken_visits(visit: Visit, tail: Tail, batch: int, orders: Orders) -> Iterator[Broken]:
    """Lengths and batches for which the promise is broken, the plan's batch first."""
    for size in dict.fromkeys((*((batch,) if batch <= _LOOKED_AT else ()), 1, 2, 3, 5)):
        lengths = (1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size + 2)
        for length in dict.fromkeys(n for n in lengths if n > 0):
            wrong = _visited_wrongly(orders(length, size, 0, visit, tail), visit)
            if wrong is not None:
                yield wrong


def _visited_wrongly(order: Order, visit: Visit) -> Broken | None:
    visits: Counter[int] = Counter()
    last: dict[int, int] = {}
    for step in range(order.steps):
        low = order.span(step)[0]
        for position in range(low, low + order.counted(step)):
            visits[position % order.length] += 1
            last[position % order.length] = step
    for position in range(order.length):
        times = visits[position]
        if times == 1 or (times > 1 and visit == "at_least_once") or (not times and visit == "at_most_once"):
            continue
        where = f"step {last[position]} visits it again" if times else f"none of its {order.steps} steps does"
        epoch = f"an epoch of {order.length} records in batches of {order.batch}"
        message = f"{epoch} visits the record at position {position} {_times(times)}"
        return Broken("CP0760", message, visit.replace("_", " "), f"{_times(times)}: {where}")
    return None


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")


# --- who makes which rows ---


def prove_parts(kind: type[Division] = Division) -> Broken | None:
    """That the parts of a batch are its rows, each once, for every number of rows and of parts."""
    try:
        if _parts_fit(kind):
            return None
    except UndecidedError:
        pass
    for parts in range(1, 9):
        work = kind("all_shared", tuple(range(parts)), (0,) * parts)
        for rows in range(3 * parts + 2):
            makers = Counter(row for part in range(parts) for row in range(*work.part(rows, part)))
            for row in sorted({*range(rows), *makers}):
                if makers[row] != (row < rows):
                    message = f"of {rows} rows in {parts} parts row {row} is made {_times(makers[row])}"
                    cuts = (work.part(rows, part) for part in range(parts))
                    shown = ", ".join(f"[{low}, {high})" for low, high in cuts)
                    return Broken("CP0761", message, "every row in one part", shown)
    return Broken("CP0761", "the parts of a batch cannot be proved", "every row in one part", "no proof")


def _parts_fit(kind: type[Division]) -> bool:
    """Part p of P = p + 1 + t: the first begins with 0, each where the one before ends, and the last ends
    with the batch."""
    p, t, rows = symbol("p"), symbol("t"), symbol("n")

    def part(parts: Term, number: Term) -> tuple[Term, Term]:
        of_many = type(kind.__name__, (kind,), {"parts": parts})  # as many as a tuple cannot be long
        return cast("Any", of_many)("all_shared", (0,), (0,)).part(rows, number)

    low, high = part(p + 1 + t, p)
    return (
        part(t + 1, Term({}))[0].same(0)
        and part(t + 1, t)[1].same(rows)
        and part(p + 2 + t, p)[1].same(part(p + 2 + t, p + 1)[0])
        and (high - low).natural()
    )


def prove_division(
    work: Division, rows: int, alive: Collection[int] | None = None, adopter: Adopter = failover
) -> Broken | None:
    """That every part is made once, and that every host with a living process then gets every part once.

    rows: of a batch, for the message. alive: who is left; None: all of them. adopter: who says what holds
    then. It is run for this very division: its time grows with the number of hosts times that of parts.
    """
    living = tuple(range(len(work.hosts))) if alive is None else tuple(sorted(alive))
    left = work if alive is None else adopter(work, living)
    who = "" if alive is None else f", with only processes {', '.join(map(str, living))} left"
    if work.design == "duplicate":
        short = next(
            (process for process in living if left.parts_of(process) != tuple(range(work.parts))), None
        )
        if short is None:
            return None
        message = f"process {short} makes parts {list(left.parts_of(short))} for itself, of {work.parts}"
        return Broken("CP0761", message, "every process to make all rows", "some that are not made")
    makers: dict[int, list[int]] = {part: [] for part in range(work.parts)}
    for process in living:
        for part in left.parts_of(process):
            makers.setdefault(part, []).append(process)
    for part, processes in makers.items():
        if len(processes) != 1 or part >= work.parts:
            by = f"processes {', '.join(map(str, processes))} make" if processes else "nobody makes"
            message = f"{by} {_part(work, rows, part)}{who}"
            return Broken("CP0761", message, "one maker of each row", f"{len(processes)} makers")
    return _moved_wrongly(left, rows, living, who)


def prove_turns(turns: Turns, rows: int) -> Broken | None:
    """That every part of every batch is made once, that all readers make as many parts, and that each is told
    its next turn. rows: of a batch, for the message."""
    counts: Counter[int] = Counter()
    for number in range(turns.period):
        turn = turns.at(number)
        wrong = prove_division(turn, rows)
        if wrong is not None:
            return wrong._replace(message=f"batch {number} of {turns.period}: {wrong.message}")
        counts.update(turn.readers)
        for reader in turns.division.readers:
            answer = turns.next(reader, number)
            if (answer == number) != (reader in turn.readers) or answer is None or answer < number:
                message = f"process {reader} asks at batch {number} for its next turn"
                return Broken("CP0761", message, "that batch, if it makes a part of it", f"batch {answer}")
    if len(set(counts.values())) > 1 or set(counts) != set(turns.division.readers):
        message = f"over {turns.period} batches readers make unequal numbers of parts"
        return Broken("CP0761", message, "as many for each", f"{dict(sorted(counts.items()))}")
    return None


def _part(work: Division, rows: int, part: int) -> str:
    if part >= work.parts:
        return f"part {part}, of {work.parts}"
    low, high = work.part(rows, part)
    which = f"row {low}" if high == low + 1 else f"rows {low} to {high - 1}"
    return f"{which} of {rows} (part {part} of {work.parts})"


def _moved_wrongly(work: Division, rows: int, living: tuple[int, ...], who: str) -> Broken | None:
    held = {work.hosts[process]: Counter[int]() for process in living}
    for process in living:
        held[work.hosts[process]].update(work.parts_of(process))
    for number, move in enumerate(work.moves(None if len(living) == len(work.hosts) else living)):
        wrong = _move_wrong(work, move, held, rows)
        if wrong is not None:
            return Broken("CP0761", f"move {number} ({move.kind}): {wrong.message}{who}", *wrong[2:])
        brought = [part for parts in move.parts for part in parts]
        for place, host in enumerate(move.hosts):
            gathers = move.kind == "all_gather"
            own = move.parts[place] if gathers else brought if place == move.root else ()
            held[host].update(brought)
            held[host].subtract(own)
    for host, parts in held.items():
        for part in sorted({*range(work.parts), *parts}):
            if parts[part] != 1 or part >= work.parts:
                message = f"host {host} is given {_part(work, rows, part)} {_times(parts[part])}{who}"
                given = sorted(parts.elements())
                return Broken("CP0761", message, "every part once on every host", f"parts {given}")
    return None


def _move_wrong(
    work: Division, move: HostTransfer, held: dict[int, Counter[int]], rows: int
) -> Broken | None:
    """Whether all that take part in a move live, and those that send have what they send."""
    nobody = next((host for host in move.hosts if host not in held), None)
    if nobody is not None:
        return Broken("", f"it waits for host {nobody}", "hosts with a living process", f"{list(move.hosts)}")
    roots = (move.hosts[move.root],) if move.kind == "broadcast" else move.hosts
    for root, parts in zip(roots, move.parts, strict=True):
        absent = next((part for part in parts if not held[root][part]), None)
        if absent is not None:
            message = f"host {root} is to send {_part(work, rows, absent)}, which it does not have"
            return Broken("", message, f"host {root} to have parts {list(parts)}", f"{sorted(held[root])}")
    return None


def survivors(work: Division, adopter: Adopter = failover) -> Iterator[tuple[int, ...]]:
    """Who may be left: everyone but one, one alone, one host alone, all hosts but one; and whoever is left
    while those die who make the first part, the middle one or the last, one after another.

    These are what the functions of a division tell apart. A part is made by the first living process in an
    order of its own (its reader, the others of that host, those elsewhere), which the deaths of its makers
    walk through to the end; what moves depends on which hosts live.
    """
    everyone = tuple(range(len(work.hosts)))
    sets = [tuple(p for p in everyone if p != dead) for dead in everyone] + [(p,) for p in everyone]
    for host in dict.fromkeys(work.hosts):
        sets.append(tuple(p for p in everyone if work.hosts[p] == host))
        sets.append(tuple(p for p in everyone if work.hosts[p] != host))
    for part in (0, work.parts // 2, work.parts - 1):
        alive = everyone
        while len(alive) > 1:
            maker = adopter(work, alive).readers[part]
            if maker not in alive:
                break  # what is wrong shows with those who are left
            alive = tuple(p for p in alive if p != maker)
            sets.append(alive)
    yield from (alive for alive in dict.fromkeys(sets) if alive)


# --- members by their own clocks ---


def prove_rates(rates: Rates) -> Broken | None:
    """That a member's step is whole units of the stream, that an epoch has units enough, and that what is
    kept suffices.

    The lag and what must be kept are those of an instant, which is computed and looked at: i begins a batch
    when j is one common divisor short of beginning one. No instant asks for more (`commplan.input.rates`).
    """
    unit, step = rates.unit, symbol("k")
    for member, batch in _first_members(rates):
        low, high = cast("tuple[Term, Term]", rates.units_of(member, cast("Any", step)))
        if not (low * unit).same(step * batch) or not (high * unit).same((step + 1) * batch):
            message = f"step k of member {member} takes units {low} to {high} of {unit} records"
            return Broken("CP0762", message, f"records k*{batch} to k*{batch} + {batch}", "others")
    return _epoch_wrong(rates) or _kept_wrong(rates)


def _first_members(rates: Rates) -> list[tuple[int, int]]:
    """A member with each batch size: those with the same go alike."""
    return [(rates.batches.index(batch), batch) for batch in dict.fromkeys(rates.batches)]


def _epoch_wrong(rates: Rates) -> Broken | None:
    """An epoch has the units that each member takes, at the ends of batches and around them."""
    sizes = (rates.unit, *rates.batches)
    ends = sorted({n for size in sizes for n in (size - 1, size, size + 1, 2 * size + 1)})
    for tail in ("pad", "short", "drop"):
        for length in (n for n in ends if n > 0):
            units = rates.epoch(length, "exactly_once", tail)
            for member, _ in _first_members(rates):
                order = rates.order_of(member, length, 0, "exactly_once", tail)
                last = order.span(order.steps - 1)[1] if order.steps else 0
                if units * rates.unit < last:
                    epoch = f"an epoch of {length} records with tail {tail}"
                    message = f"{epoch} ends before member {member} does"
                    return Broken("CP0762", message, f"{last} records", f"{units} units of {rates.unit}")
    return None


def _kept_wrong(rates: Rates) -> Broken | None:
    sizes = sorted(set(rates.batches))
    lag = max(_ahead(i, j, 1) - _ahead(j, i, 1, at=_instant(i, j)) for i in sizes for j in sizes)
    kept = max(_ahead(i, j, rates.prefetch + 1) - _instant(i, j) // j * j for i in sizes for j in sizes)
    if rates.lag != lag:
        return Broken("CP0762", f"the largest lag is {lag} records", f"a lag of {lag}", f"{rates.lag}")
    least = max(kept, 2 * sizes[-1])
    if rates.bound < least or rates.bound % rates.unit:
        message = f"members that keep pace need {kept} records kept, and a batch that is shown one more"
        return Broken("CP0762", message, f"{least} records at least, in units", f"{rates.bound}")
    return None


def _instant(own: int, peer: int) -> int:
    """A time, in records, when a batch of `own` begins and a batch of `peer` is to begin gcd(own, peer)
    later."""
    common = math.gcd(own, peer)
    way = peer // common
    return (-pow(own // common, -1, way) % way if way > 1 else 0) * own


def _ahead(own: int, peer: int, batches: int, at: int | None = None) -> int:
    """The end of the `batches`-th batch of a member from the one that it works on at an instant."""
    now = _instant(own, peer) if at is None else at
    return (now // own + batches) * own
