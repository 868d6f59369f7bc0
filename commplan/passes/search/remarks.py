"""Remarks of the search: the choice for each unit, and the fastest alternatives that were tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from commplan.ir.remark import Alternative, Choice
from commplan.ir.types import sized
from commplan.passes.base import StageChoice
from commplan.passes.search.units import Unit
from commplan.select.algorithm_search import rounded

SHOWN = 6  # maximum number of alternatives in a remark


class Searched(NamedTuple):
    """The prediction for a choice that was tried for a unit.

    Attributes:
        seconds: Exposed time of the phase.
        operations: The number of collectives in the phase.
        nbytes: Bytes on the phase's busiest links, added over all levels.
        order: The index of the algorithm among the unit's candidates, or their number if it is not one. Less
            is preferred among equal times.
        choice: The choice.
    """

    seconds: float
    operations: int
    nbytes: float
    order: int
    choice: StageChoice


def remark(
    unit: Unit, choice: StageChoice, tried: Mapping[StageChoice, Searched], why: str, source: str
) -> Choice:
    """The remark on the choice for a unit.

    Args:
        unit: The unit.
        choice: The choice, one of `tried`.
        tried: The choices that were tried. The fastest ones are the alternatives of the remark.
        why: The reason of the choice, in words.
        source: The source of the times, in words.
    """
    result = tried[choice]
    runners_up: dict[tuple[object, float], Searched] = {}  # one for each algorithm and time
    for searched in sorted(tried.values(), key=lambda searched: (searched.seconds, searched.order)):
        runners_up.setdefault((searched.choice.algorithm, searched.seconds), searched)
    runners_up.pop((choice.algorithm, result.seconds), None)
    alternatives = tuple(
        Alternative(_words(searched.choice, unit), rounded(searched.seconds))
        for searched in [*runners_up.values()][:SHOWN]
    )
    op = unit.collective
    text = f"{_words(choice, unit)} for {op.kind} of {sized(unit.nbytes)} over {', '.join(op.axes)}"
    return Choice("search", text, why, op.span, (), rounded(result.seconds), source, alternatives)


def _words(choice: StageChoice, unit: Unit) -> str:
    """The options of `choice` that the search decides, such as `ring in buckets of 25 MiB`."""
    parts = list[str]()
    if unit.chooses:
        fastest = "the algorithm predicted fastest for each collective by itself"
        parts.append(str(choice.algorithm) if choice.algorithm else fastest)
    if unit.packs:
        whole = choice.bucket is not None and choice.bucket >= unit.nbytes
        size = "the usual size" if choice.bucket is None else f"up to {sized(choice.bucket)}"
        separate = "separate " if choice.separate else ""
        parts.append(f"in one {separate}bucket" if whole else f"in {separate}buckets of {size}")
    words = " ".join(parts)
    if choice.chunk is not None:
        return ", ".join(filter(None, (words, f"in messages of {sized(choice.chunk)}")))
    return words or "in messages of the size predicted fastest for each collective by itself"
