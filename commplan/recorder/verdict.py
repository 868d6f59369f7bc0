"""Finds the ranks that block the others: `blame`, a pure function of the states of all ranks.

The sidecar of a host calls it while processes run (`sidecar.decision`), and `commplan blame` afterwards
(`recorder.blame`). `described` is the message for a verdict of a running job.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Literal, NamedTuple

from commplan.recorder.rank_state import STUCK, Comparison, Need, RankState, States, Wait

Kind = Literal["none", "apart", "order", "down", "late", "busy", "behind", "circle", "stalled"]
SHOWN = 4  # maximum number of ranks with a separate note
_LISTED = 8  # maximum number of ranges in a list of ranks, and of lines about ranks
_SETTLE_S = 1.0  # seconds that other ranks have to begin a comparison
# When an operation counts as slow, see `usual_s`:
STARTUP_FACTOR = 12  # factor of the bound in the first runs of an operation, when ranks may compile
_STARTUP_RUNS = 3  # the number of runs to which `STARTUP_FACTOR` applies
_INTERVALS = 16  # the number of latest intervals between runs of which the median is taken
_MEDIANS = 5.0  # factor of this median


class Patience(NamedTuple):
    """The seconds for which ranks must have been idle (`RankState.idle_s`) before a verdict.

    Attributes:
        bound: The idle time of all late and waiting ranks before `late`, of all live ranks before `order`.
        late: The idle time of the waiter before `late`, and before `down` for a rank that is stuck in the
            kernel outside operations.
        still: The idle time of all waiting ranks before `circle`; `late` if None.
        stuck: The idle time of all waiting ranks before `down` for a rank that is stuck in the kernel in an
            operation; `late` if None.
    """

    bound: float = 0.0
    late: float = 0.0
    still: float | None = None
    stuck: float | None = None


_NONE = Patience()


class Verdict(NamedTuple):
    """The reason why ranks wait.

    Attributes:
        kind: One of:

            - `apart`: ranks run a step that another rank compares with them.
            - `order`: ranks make calls in different orders.
            - `down`: ranks cannot go on.
            - `late`: ranks are alive and have not begun the operation that others wait for.
            - `busy`: as `late`, but not yet for as long as `Patience` allows, or excused.
            - `behind`: ranks are still in an operation that others have left.
            - `circle`: ranks wait for one another in different operations.
            - `stalled`: all ranks are in the operation, or a circle has not lasted for `Patience.still`.
            - `none`: no rank waits.
        reasons: The blocking ranks, each with its reason for a message. Empty for `stalled` and `none`, and
            for `order` and `circle` if no majority determines them.
        waiting: The ranks that wait for them.
        names: For `order`, the name of the call that each rank makes as number `call`; else empty.
        call: For `order`, the number of the first call that differs; else 0.
    """

    kind: Kind = "none"
    reasons: Mapping[int, str] = {}
    waiting: tuple[int, ...] = ()
    names: Mapping[int, str] = {}
    call: int = 0


def blame(states: States, waiter: int | None = None, limits: Patience = _NONE) -> Verdict:
    """Find the ranks that block the others.

    A rank is not blamed because it waits: `blame` follows each wait to the ranks that it needs, and their
    waits in turn. Ranks without a state are unknown, and are not blamed.

    Args:
        states: The states of ranks.
        waiter: The rank whose wait is evaluated; None for all waits. A waiter without an unfinished operation
            counts as a rank whose last operation has failed.
        limits: Idle times before each verdict; by default 0.

    Returns:
        A verdict. `apart` and `order` are found first, and do not depend on `waiter`.
    """
    if (verdict := _apart(states)) is not None:
        return verdict

    # Different orders of calls.
    live = [state for state in states.values() if state.condition in ("alive", "aborted")]
    aborted = {state.rank: state.how for state in live if state.condition == "aborted"}
    if aborted or _idle(live) >= limits.bound:
        for sequence in sorted({key for state in states.values() for key in state.recent}):
            if (verdict := _another_order(sequence, states)) is not None:
                return verdict

    # Ranks that cannot go on: those that are needed, or any if an operation of the waiter has failed.
    waiting, needed = _needed(states, states if waiter is None else [waiter])
    if waiter is not None and (waiter in aborted or not states[waiter].waits):
        conditions = {n: each.how for n, each in states.items() if each.condition != "ended" or each.how}
        waiting, needed = [state.rank for state in live if state.waits], {}
    else:
        conditions = {rank: states[rank].how for rank in needed} | aborted
    waited_s = states[waiter].idle_s if waiter is not None and states[waiter].waits else None
    down = {rank: how for rank, how in sorted(conditions.items()) if is_down(states[rank], waited_s, limits)}
    waiting = sorted(waiting)
    if down:  # JAX aborts processes that lose another one
        causes = {rank: how for rank, how in down.items() if rank not in aborted}
        return Verdict("down", causes or down, tuple(waiting))

    # Ranks that have not begun the operation.
    if needed:
        late = {rank: f"it has not {wait.missing}" for rank, wait in sorted(needed.items())}
        is_late = waiter is None or states[waiter].idle_s >= limits.late
        is_late &= not any(states[rank].is_excused for rank in late)
        is_late &= _idle([states[rank] for rank in (*late, *sorted(waiting))]) >= limits.bound
        return Verdict("late" if is_late else "busy", late, tuple(waiting))

    # All ranks wait, possibly for one that is stuck in its operation.
    verdict = _all_wait(states, waiting, limits)
    stuck = {n: states[n].how for n in verdict.reasons or waiting if _is_stuck(states[n])}
    stuck_s = limits.late if limits.stuck is None else limits.stuck
    is_still = _idle([states[rank] for rank in waiting]) >= stuck_s
    if verdict.kind in ("stalled", "behind") and stuck and is_still and _is_complete(states, waiting):
        return Verdict("down", stuck, tuple(rank for rank in waiting if rank not in stuck))
    return verdict


def is_down(state: RankState, waited_s: float | None, limits: Patience) -> bool:
    """Whether a rank cannot continue.

    A rank that is stuck in the kernel may continue: it counts as down only outside operations, if it has not
    announced that it is late, and after `limits.late`.

    Args:
        state: The state of the rank.
        waited_s: Seconds for which another rank has waited for it; None if the idle time of the rank itself
            counts.
        limits: Only `late` is used.
    """
    if state.condition != STUCK:
        return state.condition != "alive"
    seconds = state.idle_s if waited_s is None else waited_s
    return not state.waits and not state.is_excused and seconds >= limits.late


def _is_stuck(state: RankState) -> bool:
    """Whether a rank is stuck in the kernel in an operation, which may run in another thread."""
    return state.condition == STUCK and bool(state.waits) and not state.is_excused


def _is_complete(states: States, waiting: Iterable[int]) -> bool:
    """Whether the states of all ranks that these ranks need are known."""
    needs = {need for rank in waiting for wait in states[rank].waits for need in wait.needs}
    return all(rank in states for need in needs for rank in need.ranks)


def _apart(states: States) -> Verdict | None:
    """The verdict `apart` if a rank compares a step that another rank has passed; else None."""
    alive = [state for _, state in sorted(states.items()) if state.condition == "alive"]
    running: dict[str, list[tuple[int, int]]] = {}  # by sequence, progress and rank
    for state in alive:
        for sequence, joint in state.joint.items():
            if joint.is_running:
                running.setdefault(sequence, []).append((joint.number, state.rank))
    for state in alive:
        for sequence, joint in state.joint.items():
            for number, other in running.get(sequence, ()) if joint.waits_s > _SETTLE_S else ():
                if number >= joint.number:
                    return Verdict("apart", {other: "it runs a step that others compare"}, (state.rank,))
    return None


def _needed(states: States, sources: Iterable[int]) -> tuple[list[int], dict[int, Wait]]:
    """Follow the waits of `sources`, and those of the ranks that they need.

    Returns:
        The waiting ranks, with those of `sources` first. The ranks that they need and that do not wait or
        cannot continue, each with a wait for it. If there are several, that for the fewest ranks is chosen.
    """
    waiting = [rank for rank in sources if states[rank].waits and states[rank].condition == "alive"]
    is_waiting, needed, longest = {*waiting}, dict[int, Need](), dict[Need, Wait]()
    for rank in waiting:
        pairs = [(wait, need) for wait in states[rank].waits for need in wait.needs]
        for wait, need in pairs:
            is_followed = need in longest  # all ranks of a collective have the same needs
            longest[need] = max(longest.get(need, wait), wait, key=lambda each: each.seconds)
            if is_followed:
                continue
            for other in need.ranks:
                state = states.get(other)
                if state is None or other == rank or not (_is_unmet(need, state) or state.waits):
                    continue
                if not state.waits or state.condition not in ("alive", STUCK):
                    needed[other] = min(
                        need, needed.get(other, need), key=lambda each: _awaited(longest[each])
                    )
                elif other not in is_waiting:
                    is_waiting.add(other)
                    waiting.append(other)
    return waiting, {rank: longest[need] for rank, need in needed.items()}


def _awaited(wait: Wait) -> int:
    """The number of ranks that a wait needs, counted once for each need."""
    return sum(len(range(*span)) for need in wait.needs for span in need.spans)


def _is_unmet(need: Need, state: RankState) -> bool:
    """Whether the rank has not begun the call."""
    return state.begun.get(need.sequence, 0) < need.number


def _all_wait(states: States, waiting: Sequence[int], limits: Patience) -> Verdict:
    """The verdict if all needed ranks wait: `behind`, `circle` or `stalled`; `none` if `waiting` is empty."""
    oldest = {rank: states[rank].waits[0] for rank in waiting}
    holders: dict[Need, set[int]] = {}
    for rank in waiting:
        for need in itertools.chain.from_iterable(wait.needs for wait in states[rank].waits):
            holders.setdefault(need, set()).add(rank)
    unmet = {
        need: frozenset(n for n in need.ranks if n in oldest and _is_unmet(need, states[n]))
        for need in holders
    }
    awaited = {
        rank: _union([unmet[need] for wait in states[rank].waits for need in wait.needs]) for rank in waiting
    }
    # A rank does not count as needed by others if only it has the need.
    alone = {need: ranks if len(ranks) == 1 else frozenset[int]() for need, ranks in holders.items()}
    needed = frozenset[int]().union(*(ranks - alone[need] for need, ranks in unmet.items()))
    behind = {
        rank: f"it is still in {wait.where}, run {wait.runs}"
        for rank, wait in oldest.items()
        if rank in needed and awaited[rank] <= {rank}
    }
    if behind:
        return Verdict("behind", behind, tuple(waiting))
    still_s = limits.late if limits.still is None else limits.still
    is_still = _idle([states[rank] for rank in waiting]) >= still_s
    is_blocked = any(not ranks <= {rank} for rank, ranks in awaited.items())
    if len({wait.where for wait in oldest.values()}) < 2 or not is_blocked or not is_still:
        return Verdict("stalled" if waiting else "none", {}, tuple(waiting))
    return Verdict("circle", _out_of_order(states, oldest, awaited), tuple(waiting))


def _union(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    """The union of sets. A single set is returned itself, because sets of large jobs are large."""
    return sets[0] if len(sets) == 1 else frozenset[int]().union(*sets)


def _out_of_order(
    states: States, oldest: Mapping[int, Wait], awaited: Mapping[int, Set[int]]
) -> dict[int, str]:
    """The ranks that wait in one call although most ranks begin another call first, each with the reason.

    Args:
        states: The states of all ranks, whose `order` decides between two calls. If it does not, the call in
            which more ranks wait counts as the first one.
        oldest: By rank, the wait in which it is.
        awaited: By rank, the ranks for which it waits.
    """
    by_call: dict[tuple[str, int], list[int]] = {}
    for rank, wait in oldest.items():
        by_call.setdefault((wait.where, wait.runs), []).append(rank)
    reasons: dict[int, str] = {}
    for pair in itertools.combinations(by_call, 2):
        sides = [by_call[call] for call in pair]
        if not any(n in awaited[m] and m in awaited[n] for m, n in itertools.product(*sides)):
            continue
        votes = [0, 0]  # the number of ranks that began either call first
        for state in states.values():
            places = [state.order.index(call) if call in state.order else -1 for call in pair]
            if min(places) >= 0:
                votes[places[0] > places[1]] += 1
        sides = [
            [each for each in side if any(each in awaited[opposite] for opposite in sides[not at])]
            for at, side in enumerate(sides)
        ]
        if votes[0] == votes[1]:
            votes = [len(side) for side in sides]
        if votes[0] != votes[1]:
            wrong = int(votes[0] > votes[1])
            reason = f"it waits in {pair[wrong][0]}, most others in {pair[not wrong][0]}"
            reasons |= dict.fromkeys(sides[wrong], reason)
    return dict(sorted(reasons.items()))


def _another_order(sequence: str, states: States) -> Verdict | None:
    """The verdict `order` for the first recent call in `sequence` that differs between ranks; else None."""
    ordered = sorted(states.items())
    recent = {rank: state.recent[sequence] for rank, state in ordered if sequence in state.recent}
    first = max((start for start, _ in recent.values()), default=0)
    last = max((start + len(names) for start, names in recent.values()), default=0)
    for call in range(first, last):
        names = {
            rank: calls[call - start] for rank, (start, calls) in recent.items() if call < start + len(calls)
        }
        if len(set(names.values())) > 1:  # no rank is named if there is a tie
            (usual, most), *runners_up = Counter(names.values()).most_common()
            is_tie = any(count == most for _, count in runners_up)
            odd = [] if is_tie else [rank for rank in names if names[rank] != usual]
            reasons = {rank: f"it calls {names[rank]} as call {call}, most others {usual}" for rank in odd}
            waiting = tuple(rank for rank, state in ordered if state.waits and state.condition == "alive")
            return Verdict("order", reasons, waiting, names, call)
    return None


def usual_s(runs: int, intervals: Sequence[float], bound_s: float) -> float:
    """Seconds after which an operation counts as slow.

    Args:
        runs: How often it has begun.
        intervals: Seconds between the begins of its last runs, the newest first; empty if unknown.
        bound_s: The minimum result; multiplied by `STARTUP_FACTOR` during the first `_STARTUP_RUNS` runs.
    """
    if runs <= _STARTUP_RUNS:
        return STARTUP_FACTOR * bound_s
    return max(bound_s, _MEDIANS * statistics.median(intervals[:_INTERVALS] or [0.0]))


def _idle(states: Sequence[RankState]) -> float:
    """Seconds for which all of these ranks have been idle; 0 without ranks."""
    return min((state.idle_s for state in states), default=0.0)


def described(verdict: Verdict, states: States, noun: str, reporter: int) -> str:
    """The message for a verdict of a running job: a line, and notes, one on each further line.

    Args:
        verdict: Any verdict except `none`.
        states: The states from which it was made.
        noun: The noun for a rank in messages, such as `process`.
        reporter: The rank that prints it. For `late` and `busy`, the message has the seconds of its wait.
    """
    ranks, waiting = list(verdict.reasons), list(verdict.waiting)
    operation = "collective" if noun == "rank" else "step"
    waits = [_waits(noun, states[rank]) for rank in waiting[:SHOWN] if states[rank].waits]
    seconds = _idle([states[rank] for rank in waiting])
    if verdict.kind == "apart":
        sequence, joint = max(states[waiting[0]].joint.items(), key=lambda item: item[1].waits_s)
        other = states[ranks[0]]
        name, place = other.joint[sequence].comparison.name, other.stack.split(", from ")[0]
        return _joined(*_disagreement(joint.comparison, f"{noun} {other.rank}", name, place))
    if verdict.kind == "order":
        name = verdict.names[ranks[0] if ranks else max(verdict.names)]
        odd, majority = (
            [rank for rank in verdict.names if (verdict.names[rank] == name) is is_odd]
            for is_odd in (True, False)
        )
        line = f"the {_plural(noun)} call their steps in another order: {listed(noun, odd)} {name} as call"
        line += f" {verdict.call}, {listed(noun, majority)} {verdict.names[majority[0]]}"
        return _joined(line, *waits)
    if verdict.kind == "circle":
        line = f"the {_plural(noun)} have waited for each other for {seconds:.1f} s"
        return _joined(f"{line}, in different orders of {operation}s", *waits)
    if verdict.kind == "stalled":
        return _joined(
            f"all {_plural(noun)} have reached it, and have made no progress for {seconds:.1f} s", *waits
        )
    if verdict.kind == "behind":
        return _joined(*(f"{noun} {rank}: {reason}" for rank, reason in verdict.reasons.items()), *waits)
    if verdict.kind == "down":
        lines = _down(noun, [states[rank] for rank in ranks])
        lines += [note for rank in ranks[:_LISTED] for note in states[rank].notes]
        lines += [f"{listed(noun, waiting)} wait{'' if len(waiting) > 1 else 's'}"] if waiting else []
        lines += [_waits(noun, states[n]) for n in waiting[:SHOWN] if states[n].waits[0].progress]
        return _joined(*lines)

    # `late` or `busy`.
    seconds = states[reporter].waits[0].seconds if states[reporter].waits else 0.0
    verb = "have" if len(ranks) > 1 else "has"
    lines = [f"{listed(noun, ranks)} {verb} not arrived within {seconds:.1f} s"]
    for state in (states[rank] for rank in ranks[:SHOWN]):
        condition = "waits for a disk or a file system" if state.condition == STUCK else "is alive"
        text = f"{noun} {state.rank} ({state.process}) {condition}, in no {operation} for"
        lines.append(f"{text} {state.idle_s:.1f} s{state.finished}")
        lines += [f"its Python: {state.stack}"] if state.stack else []
    return _joined(*lines)


def _disagreement(comparison: Comparison, other: str, name: str, place: str) -> tuple[str, ...]:
    """The message about two ranks of which one compares a step while the other runs one, and its notes.

    Args:
        comparison: The step that the first rank compares.
        other: The rank that runs a step, such as `process 0`.
        name: The name of that step.
        place: The line of the program that calls it; empty if unknown.
    """
    if comparison.message and name == comparison.name:
        message, fix = comparison.message.replace("{}", other), comparison.fix
    else:
        noun = other.split(" ", maxsplit=1)[0]
        message = f"{comparison.rank} calls `{comparison.name}` while {other} runs `{name}`"
        fix = f"every {noun} calls the same steps in the same order"
    place, calls_at = place or "an unknown line", comparison.place or "an unknown line"
    return (
        message,
        f"{comparison.rank} calls it at {calls_at}, and waits for the others to compare it",
        f"{other} runs a step that all have compared before, at {place}",
        fix,
    )


def step_of(name: str) -> str:
    """The name of a whole step, from the name of its operation, which has plan lines outside the backticks.

    Returns `name` itself if it has no backticks.
    """
    match = re.search(r"`(.*)`", name)
    return match[1] if match else name


def _waits(noun: str, state: RankState) -> str:
    """A note about the first wait of a rank, which waits."""
    wait = state.waits[0]
    return f"{noun} {state.rank} waits in {wait.where}{f', {wait.progress}' if wait.progress else ''}"


def _down(noun: str, states: Sequence[RankState]) -> list[str]:
    """The conditions of ranks that cannot go on: a line for each of `_LISTED` reasons, one for the others."""
    by_reason: dict[tuple[bool, str], list[int]] = {}
    for state in states:
        by_reason.setdefault((state.condition == "ended", state.how), []).append(state.rank)
    lines: list[str] = []
    for (has_ended, how), ranks in itertools.islice(by_reason.items(), _LISTED):
        named = listed(noun, ranks)
        if has_ended:
            lines.append(f"the program has ended on {named}{f': {how}' if how else ''}")
        else:
            lines.append(f"{'each of ' if len(ranks) > 1 else ''}{named} {how}")
    unlisted = sorted(itertools.chain.from_iterable([*by_reason.values()][_LISTED:]))
    return [*lines, *([f"{listed(noun, unlisted)} cannot go on"] if unlisted else [])]


def _joined(*lines: str) -> str:
    """A message and its notes as a text."""
    return "\nnote: ".join(lines)


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Ranks in a message, such as `processes 0, 2` or `ranks 8-15`.

    Args:
        noun: The noun for a rank, in the singular.
        numbers: The ranks, at least one. Three or more consecutive ones are a range. After `_LISTED` groups
            of consecutive ranks, the text has only the number of the others.
    """
    ranges = [
        [number for _, number in group]
        for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{each[0]}-{each[-1]}" if len(each) > 2 else ", ".join(map(str, each)) for each in ranges]
    text = f"{_plural(noun) if len(numbers) > 1 else noun} {', '.join(texts[:_LISTED])}"
    more = sum(map(len, ranges[_LISTED:]))
    return text + (f" and {more} more" if more else "")
