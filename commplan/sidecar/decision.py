"""Decides which rank blocks the others of a job while it runs, from the states of its ranks.

`HangDetector` evaluates a job if a rank has waited for longer than its bound. `recorder.verdict.blame` makes
the decision. If two evaluations agree, the verdict is written to the records of all ranks, or printed. One
evaluation suffices if all blocking ranks have ended their program.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from commplan.recorder import live
from commplan.recorder.rank_state import RankState
from commplan.recorder.stacks import main_stack
from commplan.recorder.verdict import (
    SHOWN,
    STARTUP_FACTOR,
    Patience,
    Verdict,
    blame,
    described,
    is_down,
    listed,
)
from commplan.sidecar.hosts import OtherHosts
from commplan.sidecar.process_table import ProcessTable
from commplan.sidecar.states import COMPARISON, LEFT, OpenRecord, usual_wait_s, waited_s

# Times in seconds.
_GRACE_S = 2.0  # the wait that is evaluated after the death of a process, if the bound is longer
_ENDED_S = 1.0  # the wait that is evaluated after the end of a program, and during a comparison
_AGAIN_S = 1.0  # between two evaluations, at least
_LONGEST_S = 5.0  # between two evaluations, at most
_CONFIRM_S = 0.5  # between the two evaluations that must agree
_STACK_S = 1.5  # for a process to answer with its stack
_SETTLE_S = 0.2  # until a verdict applies: all ranks have received it by then

_REASONS = ("down", "order", "late", "circle")  # kinds of verdicts that explain the failure of a step

# Texts of messages.
_HELD = "it holds the interpreter's lock"
_TIMEOUT = "run.jit(step, timeout=SECONDS) bounds the wait"
_LATE = "`with run.late():` or commplan.guard.late()"
_EXCUSE = f"put longer work into {_LATE}, or busy_s=SECONDS waits longer"


class HangDetector:
    """Evaluates the waits of a job. Times are on `time.monotonic`.

    Args:
        table: The processes of the job on this host.
        hosts: The sidecars of the other hosts.
    """

    def __init__(self, table: ProcessTable, hosts: OtherHosts) -> None:
        self._table, self._hosts = table, hosts
        self._again = 0.0  # the time of the next evaluation, at the earliest
        self._is_judged = False  # whether a verdict was written
        self._suspected: object = None  # the result of the last evaluation, see `_is_confirmed`
        self._noticed: set[object] = set()  # the keys of the messages that were printed, see `_print_once`

    def absorb(self, other: HangDetector) -> None:
        """Take over the verdict on a job that has turned out to be this one."""
        self._is_judged |= other._is_judged

    def poll(self, now: float) -> None:
        """Evaluate the job if a rank waits for too long. Called repeatedly.

        The evaluation takes place once the other hosts have sent the states of their ranks.
        """
        alarmed = self._alarmed(now)
        if not alarmed or self._is_judged:
            self._suspected = None
            self._hosts.end_query()
        elif (away := self._hosts.query(now, begins=now >= self._again)) is not None:
            self._evaluate(alarmed, away, now)

    def _alarmed(self, now: float) -> list[OpenRecord]:
        """The records of ranks that wait for too long, or whose last step has failed without an answer.

        A wait is too long after the bound of the rank, or earlier:

        - after `_GRACE_S` if a process has died, or a rank on another host is gone,
        - after `_ENDED_S` if whole steps are recorded and a rank has ended its program,
        - after `_ENDED_S` if it is a wait for a comparison.
        """
        has_died = self._hosts.is_warned or any(each.process.seconds for each in self._table)
        has_ended = self._hosts.is_warned or any(each.live.left for each in self._table)
        is_process, alarmed = self._table.noun == "process", list[OpenRecord]()
        for each in (each for each in self._table if not each.process.seconds):
            waited, compares, bound = waited_s(each.live, now), each.live.compares, each.live.bound_s
            is_alarmed = waited > bound or each.live.asks > each.live.answered
            is_alarmed |= has_died and waited > min(_GRACE_S, bound)
            is_alarmed |= has_ended and is_process and waited > min(_ENDED_S, bound)
            is_alarmed |= compares > 0 and now - compares * 1e-9 > _ENDED_S
            alarmed += [each] if is_alarmed else []
        return alarmed

    def _evaluate(self, alarmed: Sequence[OpenRecord], away: Mapping[int, RankState], now: float) -> None:
        """Find the ranks that block the others, and write or print a confirmed verdict.

        Args:
            alarmed: The result of `_alarmed`.
            away: The states of the ranks on other hosts, as far as known.
            now: The time.
        """
        began = time.thread_time()
        records, states = self._table.read(now)
        states |= away
        # Reading the records of many ranks takes long. Its share of a core is limited to a tenth, unless
        # `_LONGEST_S` is shorter. Waits for a core do not count.
        self._again = now + min(_LONGEST_S, max(_AGAIN_S, 10 * (time.thread_time() - began)))

        # A failed step and a rank that waits at its end are evaluated separately.
        failed = [each for each in alarmed if each in records and each.live.asks > each.live.answered]
        failed = [each for each in failed if not states[each.rank].waits or each.live.is_aborted]
        waiting = [each for each in alarmed if each in records and states[each.rank].waits]
        waiting = [each for each in waiting if states[each.rank].condition == "alive"]
        if failed:
            self._explain(failed, states, now)
            return
        if not waiting:
            self._part([each for each in alarmed if each in records], states, now)
            return

        # Select the wait that is evaluated.
        source, is_process = _source(waiting, states), self._table.noun == "process"
        waiter, compares, bound = source.rank, source.live.is_comparing, source.live.bound_s
        if not compares and not is_process:  # a rank that compares a step may still execute an earlier one
            states = {
                rank: state._replace(waits=tuple(wait for wait in state.waits if wait.where != COMPARISON))
                for rank, state in states.items()
            }
        if not states[waiter].waits:
            return

        # Find the ranks that it waits for. An operation that is usually slow has more time.
        usual = bound if compares else usual_wait_s(records[source], source.live.waits, bound)
        late_s = max(usual, source.live.busy_s)
        still_s, stuck_s = (usual, late_s) if is_process else (bound, late_s if compares else bound)
        verdict = blame(states, waiter, Patience(bound, late_s, still_s, stuck_s))
        if compares and verdict.kind == "late":  # ranks may compile before they compare
            verdict = verdict._replace(kind="busy")

        # Return if the states of all ranks are not known, or if the verdict may still change.
        has_ended = any(states[rank].condition == "ended" for rank in verdict.reasons)
        is_over = has_ended and not compares and not is_process  # the engine reports it
        is_still = min((states[rank].idle_s for rank in verdict.waiting), default=0.0) >= bound
        is_known = states.keys() >= self._table.ranks or verdict.kind in ("down", "apart")
        if not is_known and waited_s(source.live, now) > STARTUP_FACTOR * bound:
            missing = tuple(sorted(self._table.ranks - states.keys()))
            text = f"the state of {listed(self._table.noun, missing)} is unknown here"
            self._print(text, source, (waiter,), missing)
        if is_over or verdict.kind == "none" or not is_known:
            return
        if verdict.kind in ("stalled", "behind", "circle") and (compares or not is_still):
            return
        conditions = {states[rank].condition for rank in verdict.reasons}
        ended_s = _ENDED_S if is_process else _GRACE_S
        limit = ended_s if conditions == {"ended"} else _GRACE_S if "dead" in conditions else bound
        is_early = (is_process or compares) and waited_s(source.live, now) < min(limit, bound)
        if is_early and verdict.kind != "apart":
            return
        if conditions != {"ended"} and not self._is_confirmed(verdict, now):
            return
        if is_process and verdict.kind in ("stalled", "behind"):  # the devices may be computing
            if states[waiter].idle_s >= usual:
                self._notice(verdict, states, source)
            return
        if self._read_stacks(verdict, states, now):
            self._report(verdict, states, source, usual, now)

    def _read_stacks(self, verdict: Verdict, states: dict[int, RankState], now: float) -> bool:
        """Add the stacks of blocking ranks on this host to `states`, for the message.

        If a process does not answer, a thread of it holds the interpreter's lock. Then a signal handler
        writes its stack.

        Returns:
            False if a process may still answer. The next evaluation is soon.
        """
        idle = [n for n, state in states.items() if state.condition == "alive" and not state.waits]
        shown = [n for n in [*verdict.reasons][:SHOWN] if n in idle or verdict.kind == "apart"]
        silent = [*{each.rank: each for each in self._table if each.rank in shown}.values()]
        silent = [each for each in silent if not states[each.rank].stack]
        if any(each.process.queried_at and now < each.process.queried_at + _STACK_S for each in silent):
            self._again = now + _CONFIRM_S
            return False
        for each in silent:
            stack = main_stack(each.path) or "an unknown line"
            states[each.rank] = states[each.rank]._replace(stack=f"{stack}; {_HELD}")
        return True

    def _report(
        self, verdict: Verdict, states: Mapping[int, RankState], source: OpenRecord, usual: float, now: float
    ) -> None:
        """Write a confirmed verdict, or print it if operations continue to wait.

        Args:
            verdict: The verdict on the wait of `source`.
            states: The states of all known ranks.
            source: The record of the waiting rank.
            usual: Seconds after which its wait counts as slow.
            now: The time.
        """
        waiter, ends, compares = source.rank, bool(source.live.ends), source.live.is_comparing
        late_s = max(usual, source.live.busy_s)
        text, line = described(verdict, states, self._table.noun, waiter), states[waiter].waits[0].where
        if verdict.kind == "busy":
            is_excused = any(states[rank].is_excused for rank in verdict.reasons)
            if states[waiter].idle_s >= usual and not is_excused:
                excuse = _TIMEOUT if compares else f"the limit is {late_s:.0f} s: {_EXCUSE}" if ends else ""
                note = f"\nnote: {excuse}" if excuse else ""
                self._print(f"{text}\nnote: {line} waits for it{note}", source, verdict.waiting)
                self._again = now + min(_LONGEST_S, max(_CONFIRM_S, late_s - states[waiter].idle_s))
            return
        if verdict.kind == "late" and ends:
            text += f"\nnote: the limit is {late_s:.0f} s: {_EXCUSE}"
        if verdict.kind == "apart":
            self._judge(f"CP0854: {text}", "", now, abandoned=False)
        elif ends:
            self._judge(text, line, now, abandoned=False)
        else:
            down = tuple(verdict.reasons) if verdict.kind == "down" else ()
            self._print(f"{text}\nnote: {line} waits for it", source, verdict.waiting, down)

    def _explain(self, failed: Sequence[OpenRecord], states: Mapping[int, RankState], now: float) -> None:
        """Find out whether another process is the reason why steps have failed, and notify their processes.

        Args:
            failed: The records of ranks with a failed step, at least one. The first one is evaluated.
            states: The states of all known ranks.
            now: The time.
        """
        waiter = failed[0].rank
        verdict = blame(states, waiter, Patience(late=failed[0].live.busy_s, still=0.0))
        is_known = states.keys() >= self._table.ranks or verdict.kind == "down"
        is_reason = is_known and verdict.kind in _REASONS
        if not self._is_confirmed(verdict, now):
            return
        if is_reason and failed[0].live.ends:
            self._judge(described(verdict, states, self._table.noun, waiter), "", now, abandoned=False)
            return
        if is_reason:
            text = described(verdict, states, self._table.noun, waiter)
            failed[0].process.write_stderr(f"commplan: {text}\n")
        for each in failed:
            with contextlib.suppress(OSError):
                live.write_answer(each.descriptor)

    def _notice(self, verdict: Verdict, states: Mapping[int, RankState], source: OpenRecord) -> None:
        """Print once that a step takes long on all processes, and which of them compare no later step."""
        wait = states[source.rank].waits[0]
        comparing = [n for n, state in states.items() if any(each.waits_s for each in state.joint.values())]
        late = [n for n in verdict.waiting if n not in comparing] if comparing else []
        text = f"{wait.where} has not ended for {states[source.rank].idle_s:.0f} s"
        where = [f"{self._table.noun} {n} is at {states[n].stack or 'an unknown line'}" for n in late]
        text += f"; {'; '.join([*where, _TIMEOUT] if late else ['no process is late for it'])}"
        self._print(text, source, verdict.waiting)

    def _is_confirmed(self, verdict: Verdict, now: float) -> bool:
        """Whether the last evaluation had the same result. If not, the next one is after `_CONFIRM_S`."""
        result = verdict.kind, tuple(verdict.reasons), verdict.waiting
        is_same, self._suspected = result == self._suspected, result
        if not is_same:
            self._again = now + _CONFIRM_S
        return is_same

    def _print(
        self, text: str, source: OpenRecord, waiting: Sequence[int], named: tuple[int, ...] = ()
    ) -> None:
        """Print `text` once for each wait and each set of `named` ranks, on the first rank that waits."""
        for first in [each for each in self._table if each.rank == min(waiting)][:1]:
            self._print_once(first, text, (source.live.waits or source.live.compares, named))

    def _print_once(self, record: OpenRecord, text: str, key: object) -> None:
        """Print `text` on a rank, once for each `key`."""
        if key not in self._noticed:
            self._noticed.add(key)
            record.process.write_stderr(f"commplan: {text}\n")

    def _part(self, alarmed: Sequence[OpenRecord], states: Mapping[int, RankState], now: float) -> None:
        """Decide whether all the ranks for which a rank waits at its end are dead.

        Prints a message, once and much later, if one of them is alive: it may still have work to do.

        Args:
            alarmed: The records of ranks that wait for too long; any number of them wait at their end.
            states: The states of all known ranks.
            now: The time.
        """
        source = next((each for each in alarmed if each.live.parting), None)
        if source is None or not states.keys() >= self._table.ranks:
            return
        waiter = source.rank
        remaining = [rank for rank in sorted(states) if LEFT not in states[rank].begun and rank != waiter]
        limits, waited = Patience(late=source.live.busy_s), now - source.live.parting * 1e-9
        down = {n: states[n].how for n in remaining if states[n].how and is_down(states[n], waited, limits)}
        verdict = Verdict("down" if len(down) == len(remaining) else "busy", down)
        if not remaining or not self._is_confirmed(verdict, now):
            return
        if verdict.kind == "down":
            # A rank that waits at its end counts as ended. The message has its own condition instead.
            silent = {rank: state._replace(condition="silent") for rank, state in states.items()}
            first, *notes = described(verdict, silent, self._table.noun, waiter).splitlines()
            text = "\n".join([f"{first}, and all others have ended", *notes])
            if source.live.ends:
                self._judge(text, "", now, abandoned=True)
            else:
                self._print_once(source, text, text)
            return
        late = next((rank for rank in remaining if rank not in down and not states[rank].waits), None)
        has_waited = waited > STARTUP_FACTOR * source.live.bound_s
        if late is not None and has_waited and not source.live.served:
            _, *notes = described(Verdict("busy", {late: ""}), states, self._table.noun, waiter).splitlines()
            text = f"this process has ended and waits for rank {late}"
            self._print_once(source, "\n".join([text, *notes]), "parting")

    def _judge(self, text: str, line: str, now: float, *, abandoned: bool) -> None:
        """Write a verdict to the records of all hosts, see `live.write_verdict`."""
        self.write(text, line, now, abandoned=abandoned)
        self._hosts.broadcast("verdict", text=text, line=line, abandoned=abandoned)

    def write(self, text: str, line: str, now: float, *, abandoned: bool) -> None:
        """Write a verdict, which may be that of another host, to the records of this host.

        Has no effect if there was a verdict before. For the arguments, see `live.write_verdict`.
        """
        for each in () if self._is_judged else self._table:
            with contextlib.suppress(OSError):
                live.write_verdict(each.descriptor, text, line, now + _SETTLE_S, abandoned=abandoned)
        self._is_judged = True


def _source(waiting: Sequence[OpenRecord], states: Mapping[int, RankState]) -> OpenRecord:
    """The record of the rank whose wait is evaluated, of those that wait.

    The oldest comparison, if a rank that it needs is down; else the oldest other wait, or the oldest
    comparison if there is no other wait.
    """
    oldest = sorted(waiting, key=lambda each: max(each.live.waits or each.live.compares, each.live.moved))
    comparison = next((each for each in oldest if each.live.is_comparing), None)
    if comparison is not None:
        limits = Patience(late=comparison.live.busy_s)
        if blame(states, comparison.rank, limits).kind == "down":
            return comparison
    return next((each for each in oldest if not each.live.is_comparing), oldest[0])
