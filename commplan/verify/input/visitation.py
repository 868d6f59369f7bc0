"""The visitation contract: the records delivered to each member in an epoch match the promise of their load.

The length of a source is known only when it is bound, and batch sizes are arbitrary, so the functions used at
run time (`commplan.input`) are proved for all lengths. A length is q whole batches plus a remainder that is 0
or between 1 and the batch size minus one. For both cases `Order` is executed on polynomials
(`commplan.verify.programs.polynomial`), for a step within the whole batches and for the step after them. The
split of a batch into parts is proved in the same way for all numbers of rows and parts.

The rest, which process builds each part and how parts move between hosts, is simulated for the processes that
may share and for their possible survivors. That the order is a permutation follows from its construction, a
cycle-walking Feistel network, and is tested but not proved here.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, cast

from commplan.diagnostics import Diagnostic, Note, Span
from commplan.input.order import Order, Tail, Visit
from commplan.input.rates import Rates
from commplan.input.work_partition import Division, HostTransfer, dealt, failover
from commplan.verify.programs.polynomial import Polynomial, UndecidedError, symbol

_LARGEST_ENUMERATED = 4096  # largest batch size that the search for a counterexample enumerates
# The functions to prove; tests replace them by wrong ones.
Orders = Callable[[int, int, int, Visit, Tail], Order]  # as `Order`
Adopter = Callable[[Division, Collection[int]], Division]  # as `failover`
Deal = Callable[[int, int, int, Sequence[int]], int]  # as `dealt`


class BrokenPromise(NamedTuple):
    """A case that violates a promise.

    Attributes:
        code: CP0760 for visits, CP0761 for a work partition, CP0762 for rates of members; empty for a
            transfer until `_transfer_violation` adds it.
        message: description of the case.
        expected: the promised behavior.
        found: the actual behavior.
    """

    code: str
    message: str
    expected: str
    found: str

    def diagnostic(self, subject: str, span: Span | None, file: str) -> Diagnostic:
        """Convert to a diagnostic; `subject` is a prefix of its message, such as the name of the load."""
        notes = (Note(f"expected {self.expected}"), Note(f"found {self.found}"))
        return Diagnostic(self.code, f"{subject}: {self.message}", span, notes, file=file)


# --- one member's visits ---


@functools.lru_cache(maxsize=128)
def prove_order(visit: Visit, tail: Tail, batch: int, orders: Orders = Order) -> BrokenPromise | None:
    """Prove that `visit` holds with `tail` for every length and batch size.

    Args:
        visit: the visitation promise.
        tail: how an incomplete last batch is treated.
        batch: the plan's batch size, the first candidate in the search for a counterexample.
        orders: constructs an `Order`.

    Returns:
        None if proved, otherwise a counterexample.
    """
    try:
        why = _whole_batches(visit, tail, orders) or _rest(visit, tail, orders)
    except UndecidedError as undecided:
        why = f"whether {undecided} depends on the numbers"
    if why is None:
        return None
    return next(_broken_visits(visit, tail, batch, orders), None) or BrokenPromise(
        "CP0760", f"{visit} with tail {tail} cannot be proved", "every length to be visited as promised", why
    )


def _whole_batches(visit: Visit, tail: Tail, orders: Orders) -> str | None:
    """Check step k of q = k + 1 + s whole batches, with and without a remainder.

    Returns:
        Why the promise is broken, or None. The functions below do the same.
    """
    k, s, c, r = symbol("k"), symbol("s"), symbol("c"), symbol("r")
    whole = k + 1 + s
    for remainder, batch in ((Polynomial({}), c + 1), (r + 1, r + 2 + c)):
        length = whole * batch + remainder
        order = orders(*cast("tuple[int, int]", (length, batch)), 0, visit, tail)
        last = 1 if remainder.positive() else 0
        wrong = _steps(visit, cast("Any", order.steps), whole, last)
        wrong = wrong or _step(visit, order, k, (k * batch, (k + 1) * batch), length)
        if wrong:
            return wrong
    return None


def _rest(visit: Visit, tail: Tail, orders: Orders) -> str | None:
    """Check the step after q whole batches if a remainder of 1 to batch - 1 records exists."""
    q, c, r = symbol("q"), symbol("c"), symbol("r")
    remainder, batch = r + 1, r + 2 + c
    length = q * batch + remainder
    order = orders(*cast("tuple[int, int]", (length, batch)), 0, visit, tail)
    if cast("Any", order.steps) <= q:
        return None  # no such step exists; `_steps` checks that the whole batches suffice
    return _step(visit, order, q, (q * batch, length), length)


def _steps(visit: Visit, steps: Polynomial, whole: Polynomial, last: int) -> str | None:
    """Check the number of steps of an epoch of `whole` batches and `last` (0 or 1) incomplete ones."""
    needed = whole + last
    return None if _fits(visit, steps, needed) else f"{steps} steps an epoch, but {needed} are needed"


def _fits(visit: Visit, count: Polynomial, needed: Polynomial) -> bool:
    """Whether `count` steps or records satisfy `visit` if there are `needed`."""
    if visit == "exactly_once":
        return count == needed
    return count >= needed if visit == "at_least_once" else count <= needed


def _step(
    visit: Visit, order: Order, step: Polynomial, bounds: tuple[Polynomial, Polynomial], length: Polynomial
) -> str | None:
    """Check that `step` counts exactly the positions in the half-open range `bounds`, as promised."""
    low, high = cast("tuple[Polynomial, Polynomial]", order.span(cast("Any", step)))
    counted, needed = cast("Polynomial", order.counted(cast("Any", step))), bounds[1] - bounds[0]
    if not low.same(bounds[0]):
        return f"step {step} begins at {low}, not at {bounds[0]}"
    if counted < 0 or counted > high - low:
        return f"step {step} counts {counted} of {high - low} slots"
    if not _fits(visit, counted, needed):
        return f"step {step} counts {counted} records of {needed}"
    return f"step {step} goes past the end" if visit != "at_least_once" and low + counted > length else None


def _broken_visits(visit: Visit, tail: Tail, batch: int, orders: Orders) -> Iterator[BrokenPromise]:
    """Search small lengths and batch sizes for violations, starting with the plan's batch size."""
    for size in dict.fromkeys((*((batch,) if batch <= _LARGEST_ENUMERATED else ()), 1, 2, 3, 5)):
        lengths = (1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size + 2)
        for length in dict.fromkeys(n for n in lengths if n > 0):
            wrong = _visited_wrongly(orders(length, size, 0, visit, tail), visit)
            if wrong is not None:
                yield wrong


def _visited_wrongly(order: Order, visit: Visit) -> BrokenPromise | None:
    """The first record that an epoch does not visit as promised; None if there is none."""
    visits: Counter[int] = Counter()
    last: dict[int, int] = {}  # the last step that visits a position
    for step in range(order.steps):
        low = order.span(step)[0]
        for position in range(low, low + order.counted(step)):
            visits[position % order.length] += 1
            last[position % order.length] = step
    for position in range(order.length):
        times = visits[position]
        if times == 1 or (times > 1 and visit == "at_least_once") or (not times and visit == "at_most_once"):
            continue
        detail = (
            f"step {last[position]} visits it again" if times else f"none of its {order.steps} steps does"
        )
        epoch = f"an epoch of {order.length} records in batches of {order.batch}"
        message = f"{epoch} visits the record at position {position} {_times(times)}"
        return BrokenPromise("CP0760", message, visit.replace("_", " "), f"{_times(times)}: {detail}")
    return None


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")


# --- work partitions ---


def prove_parts(kind: type[Division] = Division) -> BrokenPromise | None:
    """Prove that the parts of a batch cover each row once, for all numbers of rows and parts.

    Returns:
        None if proved, otherwise a counterexample, with at most 8 parts if there is a small one.
    """
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
                    return BrokenPromise("CP0761", message, "every row in one part", shown)
    return BrokenPromise(
        "CP0761", "the parts of a batch cannot be proved", "every row in one part", "no proof"
    )


def _parts_fit(kind: type[Division]) -> bool:
    """Check that parts are contiguous, the first starts at 0 and the last ends with the batch.

    Part p of P = p + 1 + t is examined.
    """
    p, t, rows = symbol("p"), symbol("t"), symbol("n")

    def part(parts: Polynomial, number: Polynomial) -> tuple[Polynomial, Polynomial]:
        # The number of parts is symbolic, which the length of a tuple cannot be.
        symbolic = type(kind.__name__, (kind,), {"parts": parts})
        return cast("Any", symbolic)("all_shared", (0,), (0,)).part(rows, number)

    low, high = part(p + 1 + t, p)
    return (
        part(t + 1, Polynomial({}))[0].same(0)
        and part(t + 1, t)[1].same(rows)
        and part(p + 2 + t, p)[1].same(part(p + 2 + t, p + 1)[0])
        and (high - low).natural()
    )


def prove_division(
    work: Division, rows: int, alive: Collection[int] | None = None, adopter: Adopter = failover
) -> BrokenPromise | None:
    """Prove that every part is built once and that every host with a live process receives every part once.

    The partition is simulated, in time proportional to the number of hosts times the number of parts.

    Args:
        work: the partition.
        rows: rows of a batch, for messages.
        alive: the surviving processes, or None for all.
        adopter: computes the partition among survivors.

    Returns:
        None if proved, otherwise a counterexample.
    """
    living = tuple(range(len(work.hosts))) if alive is None else tuple(sorted(alive))
    remaining = work if alive is None else adopter(work, living)
    condition = "" if alive is None else f", with only processes {', '.join(map(str, living))} left"
    if work.design == "duplicate":
        short = next(
            (process for process in living if remaining.parts_of(process) != tuple(range(work.parts))), None
        )
        if short is None:
            return None
        message = f"process {short} makes parts {list(remaining.parts_of(short))} for itself, of {work.parts}"
        return BrokenPromise("CP0761", message, "every process to make all rows", "some that are not made")
    makers: dict[int, list[int]] = {part: [] for part in range(work.parts)}
    for process in living:
        for part in remaining.parts_of(process):
            makers.setdefault(part, []).append(process)
    for part, processes in makers.items():
        if len(processes) != 1 or part >= work.parts:
            by = f"processes {', '.join(map(str, processes))} make" if processes else "no process makes"
            message = f"{by} {_part(work, rows, part)}{condition}"
            return BrokenPromise("CP0761", message, "one maker of each row", f"{len(processes)} makers")
    return _transfer_violation(remaining, rows, living, condition)


def prove_deal(parts: int, makers: int, deal: Deal = dealt) -> BrokenPromise | None:
    """Prove that the processes of a host that make parts of batches make equally many.

    Args:
        parts: parts of a batch.
        makers: number of processes.
        deal: returns the process that makes a part of a batch, as `dealt`.

    Returns:
        None if proved, otherwise a counterexample.
    """
    everyone = tuple(range(makers))
    counts = Counter(deal(unit, part, parts, everyone) for unit in everyone for part in range(parts))
    if dict(counts) != dict.fromkeys(everyone, parts):
        message = f"over {makers} batches processes of a host make unequal numbers of parts"
        return BrokenPromise("CP0761", message, "as many for each", f"{dict(sorted(counts.items()))}")
    return None


def _part(work: Division, rows: int, part: int) -> str:
    """The rows of a part in words."""
    if part >= work.parts:
        return f"part {part}, of {work.parts}"
    low, high = work.part(rows, part)
    row_range = f"row {low}" if high == low + 1 else f"rows {low} to {high - 1}"
    return f"{row_range} of {rows} (part {part} of {work.parts})"


def _transfer_violation(
    work: Division, rows: int, living: tuple[int, ...], condition: str
) -> BrokenPromise | None:
    """The first violation of a batch's moves between hosts; None if every host has every part once.

    Args:
        work: the partition among the living processes.
        rows: rows of a batch, for messages.
        living: the living processes, in ascending order.
        condition: the failures that the partition survives, for messages.
    """
    parts_of_host = {work.hosts[process]: Counter[int]() for process in living}
    for process in living:
        parts_of_host[work.hosts[process]].update(work.parts_of(process))
    for number, move in enumerate(work.moves(None if len(living) == len(work.hosts) else living)):
        wrong = _check_transfer(work, move, parts_of_host, rows)
        if wrong is not None:
            return BrokenPromise(
                "CP0761", f"move {number} ({move.kind}): {wrong.message}{condition}", *wrong[2:]
            )
        brought = [part for parts in move.parts for part in parts]
        for place, host in enumerate(move.hosts):
            gathers = move.kind == "all_gather"
            already_there = move.parts[place] if gathers else brought if place == move.root else ()
            parts_of_host[host].update(brought)
            parts_of_host[host].subtract(already_there)
    for host, parts in parts_of_host.items():
        for part in sorted({*range(work.parts), *parts}):
            if parts[part] != 1 or part >= work.parts:
                message = f"host {host} receives {_part(work, rows, part)} {_times(parts[part])}{condition}"
                received = sorted(parts.elements())
                return BrokenPromise("CP0761", message, "every part once on every host", f"parts {received}")
    return None


def _check_transfer(
    work: Division, move: HostTransfer, parts_of_host: dict[int, Counter[int]], rows: int
) -> BrokenPromise | None:
    """Check that all participants of a transfer are alive and that senders have the parts that they send.

    The violation has no code, and its message no subject.
    """
    dead_host = next((host for host in move.hosts if host not in parts_of_host), None)
    if dead_host is not None:
        return BrokenPromise(
            "", f"it waits for host {dead_host}", "hosts with a living process", f"{list(move.hosts)}"
        )
    roots = (move.hosts[move.root],) if move.kind == "broadcast" else move.hosts
    for root, parts in zip(roots, move.parts, strict=True):
        absent = next((part for part in parts if not parts_of_host[root][part]), None)
        if absent is not None:
            message = f"host {root} is to send {_part(work, rows, absent)}, which it does not have"
            return BrokenPromise(
                "", message, f"host {root} to have parts {list(parts)}", f"{sorted(parts_of_host[root])}"
            )
    return None


def survivors(work: Division) -> Iterator[tuple[int, ...]]:
    """Enumerate representative sets of survivors.

    The sets are: all but one process, a single process, a single host, all but one host, and successive
    deaths of the processes that build the first, middle or last part. These are the cases that a partition
    distinguishes: a part is built by the first live process in a fixed order (its reader, other processes of
    that host, other hosts), and transfers depend only on which hosts are alive.
    """
    everyone = tuple(range(len(work.hosts)))
    sets = [tuple(p for p in everyone if p != dead) for dead in everyone] + [(p,) for p in everyone]
    for host in dict.fromkeys(work.hosts):
        sets.append(tuple(p for p in everyone if work.hosts[p] == host))
        sets.append(tuple(p for p in everyone if work.hosts[p] != host))
    for part in (0, work.parts // 2, work.parts - 1):
        alive = everyone
        while len(alive) > 1:
            maker = failover(work, alive).readers[part]
            if maker not in alive:
                break  # the sets collected so far show the error
            alive = tuple(p for p in alive if p != maker)
            sets.append(alive)
    yield from (alive for alive in dict.fromkeys(sets) if alive)


# --- members that advance independently ---


def prove_rates(rates: Rates) -> BrokenPromise | None:
    """Prove that members take whole units, that an epoch has enough units, and that buffers suffice.

    The largest lag and buffer size occur when member i begins a batch while j is one greatest common divisor
    away from beginning one. This instant is computed and checked; see `commplan.input.rates`.

    Returns:
        None if proved, otherwise a counterexample.
    """
    unit, step = rates.unit, symbol("k")
    for member, batch in _first_members(rates):
        low, high = cast("tuple[Polynomial, Polynomial]", rates.units_of(member, cast("Any", step)))
        if not (low * unit).same(step * batch) or not (high * unit).same((step + 1) * batch):
            message = f"step k of member {member} takes units {low} to {high} of {unit} records"
            return BrokenPromise("CP0762", message, f"records k*{batch} to k*{batch} + {batch}", "others")
    return _epoch_violation(rates) or _buffer_violation(rates)


def _first_members(rates: Rates) -> list[tuple[int, int]]:
    """One member for each batch size; members with equal batch sizes behave the same."""
    return [(rates.batches.index(batch), batch) for batch in dict.fromkeys(rates.batches)]


def _epoch_violation(rates: Rates) -> BrokenPromise | None:
    """Check that an epoch contains the units that each member consumes, at and around batch boundaries."""
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
                    return BrokenPromise(
                        "CP0762", message, f"{last} records", f"{units} units of {rates.unit}"
                    )
    return None


def _buffer_violation(rates: Rates) -> BrokenPromise | None:
    """Check that `Rates.lag` is the largest lag, and that `Rates.bound` records suffice, in whole units."""
    sizes = sorted(set(rates.batches))
    lag = max(_ahead(i, j, 1) - _ahead(j, i, 1, at=_instant(i, j)) for i in sizes for j in sizes)
    buffered = max(_ahead(i, j, rates.prefetch + 1) - _instant(i, j) // j * j for i in sizes for j in sizes)
    if rates.lag != lag:
        return BrokenPromise("CP0762", f"the largest lag is {lag} records", f"a lag of {lag}", f"{rates.lag}")
    least = max(buffered, 2 * sizes[-1])
    if rates.bound < least or rates.bound % rates.unit:
        message = f"members that keep pace need {buffered} buffered records, and one more batch in use"
        return BrokenPromise("CP0762", message, f"{least} records at least, in units", f"{rates.bound}")
    return None


def _instant(size: int, peer: int) -> int:
    """A time, in records, at which a batch of `size` begins gcd(size, peer) before a batch of `peer`."""
    common = math.gcd(size, peer)
    period = peer // common
    return (-pow(size // common, -1, period) % period if period > 1 else 0) * size


def _ahead(size: int, peer: int, batches: int, at: int | None = None) -> int:
    """The end, in records, of the last of `batches` batches of `size`.

    The first is the batch that the member processes at time `at`, in records, by default `_instant(..)`.
    """
    time = _instant(size, peer) if at is None else at
    return (time // size + batches) * size
