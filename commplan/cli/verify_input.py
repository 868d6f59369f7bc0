"""What `commplan verify` says of the input: who visits what, who makes it, and what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commplan.input.rates import Rates, kept_text, round_text
from commplan.ir.types import sized

if TYPE_CHECKING:
    from commplan.verify.inputs import InputMemory, Shared, Visited

_PROMISES = {
    "exactly_once": "every record exactly once",
    "at_least_once": "every record at least once",
    "at_most_once": "every record at most once",
}


def input_text(
    visits: tuple[Visited, ...], shares: tuple[Shared, ...], memory: tuple[InputMemory, ...]
) -> list[str]:
    """A line or two for each load, share and phase."""
    lines: list[str] = []
    for load in visits:
        own = (*load.per, *((load.clock,) if load.clock else ()))
        whose = f"each {', '.join(own)}" if own else "everyone"
        sizes = f"[{', '.join(map(str, load.batches))}]" if load.clock else str(load.batches[0])
        cut = f"; split over {', '.join(load.split)}, {load.shards} shards" if load.split else ""
        lines.append(
            f"line {load.span.line}: an epoch of `{load.name}` gives {whose} {_PROMISES[load.visit]},"
            f" however many there are (batch {sizes}, tail {load.tail}{cut})"
        )
        if load.rates is not None:
            lines.append(f"line {load.span.line}: {round_text(load.rates)}; {kept_text(load.rates)}")
    for share in shares:
        lines.append(f"line {share.span.line}: {_share(share)}")
    for one in memory:
        records = one.records // one.batches
        lines.append(
            f"input of phase {one.phase}: at most {one.batches} batches of {records} records at once;"
            f" a host shares {sized(one.shared)}, a rank has {sized(one.own)} of its own"
        )
    return lines


def _share(share: Shared) -> str:
    over = f"{', '.join(share.over)} ({share.members})"
    if share.design == "duplicate":
        return f"`{share.name}` is made by each of {over} for itself, all rows of it"
    readers = f", {share.readers} readers" if share.readers else ""
    return (
        f"`{share.name}` is made once over {over} ({share.design}{readers}): every row has one maker"
        " and reaches every host once, whoever is left"
    )


def input_data(
    visits: tuple[Visited, ...], shares: tuple[Shared, ...], memory: tuple[InputMemory, ...]
) -> dict[str, Any]:
    """The same as data."""
    return {
        "visits": [
            {
                "phase": load.phase, "line": load.span.line, "value": load.name, "visit": load.visit,
                "tail": load.tail, "batches": list(load.batches), "per": list(load.per),
                "split": list(load.split), "shards": load.shards, "clock": load.clock,
                **_rates(load.rates),
            }
            for load in visits
        ],
        "shares": [
            {
                "phase": share.phase, "line": share.span.line, "value": share.name, "over": list(share.over),
                "members": share.members, "design": share.design, "readers": share.readers,
            }
            for share in shares
        ],
        "input_memory": [
            {
                "phase": one.phase, "batches": one.batches, "records": one.records,
                "shared_nbytes": one.shared, "own_nbytes": one.own,
            }
            for one in memory
        ],
    }  # fmt: skip


def _rates(found: Rates | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {
        "unit": found.unit, "round": found.round, "round_steps": list(found.round_steps),
        "bound": found.bound, "lag": found.lag,
    }  # fmt: skip
