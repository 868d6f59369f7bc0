"""What the members of a sweep were given, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bench.sweep.program import BATCH, ENTRY
from bench.sweep.stage import Life, Played
from bench.sweep.timetable import Member

Entries = npt.NDArray[Any]
MOST_OVER = 1.1  # times the limit


class Visits(msgspec.Struct, frozen=True):
    """One member. whole: epochs of which it was given each record once; broken: others, but for the last one
    of a member that was killed and did not come back. missing, again: records of those. skipped: epochs
    between two that it was given."""

    member: int
    kind: str
    whole: int
    broken: int
    missing: int
    again: int
    skipped: int


class Result(msgspec.Struct, frozen=True):
    """One system. given: records of all members, those that a kill made worthless included. cpu_s: of all
    its processes, from `joined` to their ends. decodes: that nobody can do without, see `_decodes`. limit_s:
    CPU of those and of the members' own work, a record and member. again: decodes for members that came back
    to a place which the others had left; strict_s: the limit without them.
    """

    system: str
    visits: list[Visits]
    given: int
    cpu_s: float
    limit_s: float
    strict_s: float
    decodes: int
    again: int
    sockets: int
    left: list[str]
    failed: str = ""

    @property
    def each_s(self) -> float:
        """CPU seconds per record and member."""
        return self.cpu_s / self.given if self.given else 0.0

    @property
    def ratio(self) -> float:
        return self.each_s / self.limit_s if self.limit_s else 0.0

    @property
    def is_exact(self) -> bool:
        return not self.failed and all(not (v.broken or v.skipped) and v.whole for v in self.visits)


def result(played: Played, records: int, decode_s: float, own_s: Mapping[str, float]) -> Result:
    """decode_s: CPU seconds of one decode. own_s: of a member's own work a record, by kind."""
    logs = {member.number: _entries(played.log(member)) for member in played.members}
    visits = [_visits(played, member, logs[member.number], records) for member in played.members]
    given = sum(int(log["rows"].sum()) for log in logs.values())
    own = sum(int(logs[member.number]["rows"].sum()) * own_s[member.kind] for member in played.members)
    decodes, again = _decodes(played, logs)
    limit_s, strict_s = ((count * decode_s + own) / max(1, given) for count in (decodes + again, decodes))
    cpu_s = sum(life.program.cpu_s for life in played.lives) + played.server_cpu_s
    return Result(
        played.system, visits, given, cpu_s, limit_s, strict_s, decodes, again, played.sockets, played.left,
        played.failed,
    )  # fmt: skip


def _decodes(played: Played, logs: Mapping[int, Entries]) -> tuple[int, int]:
    """Decodes that the batches of `logs` took at the least, and those of members that came back.

    In commplan batch `step` of `epoch` is the same for all members, so each of them is counted once; a member
    that came back to batches which the others had let go of needs those once more. What peers give to whom is
    not known: a record that a member was given is a part of a decode, shared by all that were there.
    """
    if played.system == "commplan":
        pairs = {(int(e["epoch"]), int(e["step"])): int(e["rows"]) for log in logs.values() for e in log}
        again = sum(int(life.program.said.get("alone", 0)) for life in played.lives)
        return sum(pairs.values()), again * BATCH
    shares = (int(e["rows"]) / _present(played.lives, int(e["ns"])) for log in logs.values() for e in log)
    return round(sum(shares)), 0


def _entries(log: Path) -> Entries:
    return np.fromfile(log, ENTRY) if log.exists() else np.zeros(0, ENTRY)


def _present(lives: Sequence[Life], ns: int) -> int:
    joined = (life.program for life in lives if life.program.joined_ns)
    return max(1, sum(p.joined_ns <= ns <= (p.ended_ns or ns) for p in joined))


def _visits(played: Played, member: Member, log: Entries, records: int) -> Visits:
    kept, lost = played.kept.get(member.number, (len(log), len(log)))
    log = np.concatenate([log[:kept], log[lost:]])
    whole = broken = missing = again = 0
    epochs = sorted(set(log["epoch"].tolist()))
    for epoch in epochs:
        ids = np.concatenate([entry["ids"][: entry["rows"]] for entry in log[log["epoch"] == epoch]])
        counts = np.bincount(ids.astype(np.int64), minlength=records)
        lacking, double = int((counts == 0).sum()), int((counts - 1).clip(0).sum())
        is_cut = member.dies is not None and member.returns is None and epoch == epochs[-1]
        if not lacking and not double:
            whole += 1
        elif not is_cut or double:
            broken, missing, again = broken + 1, missing + lacking, again + double
    skipped = epochs[-1] - epochs[0] + 1 - len(epochs) if epochs else 0
    return Visits(member.number, member.kind, whole, broken, missing, again, skipped)


# --- for people ---


def table(results: Sequence[Result]) -> str:
    """A line for each system."""
    titles = f"{'':<16}{'records given':>14}{'epochs whole':>14}{'broken':>8}{'missing':>9}{'again':>9}"
    titles += f"{'CPU ms':>9}{'limit':>8}{'times':>7}  left behind"
    return "\n".join([titles, *map(_line, results)])


def _line(result: Result) -> str:
    def total(field: str) -> int:
        return sum(getattr(visits, field) for visits in result.visits)

    left = ", ".join(result.left[:3]) + (f" and {len(result.left) - 3} more" if len(result.left) > 3 else "")
    return (
        f"{result.system:<16}{result.given:>14}{total('whole'):>14}{total('broken') + total('skipped'):>8}"
        f"{total('missing'):>9}{total('again'):>9}{result.each_s * 1e3:>9.4f}{result.limit_s * 1e3:>8.4f}"
        f"{result.ratio:>7.2f}  {left or 'nothing'}{'; ' + result.failed if result.failed else ''}"
    )
