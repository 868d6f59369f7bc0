"""The report of `commplan verify` on input: visits, work partitions and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commplan.input.rates import Rates, buffer_text, round_text
from commplan.ir.plan import name_of
from commplan.ir.types import sized

if TYPE_CHECKING:
    from commplan.verify.input_proof import InputMemory, ProvedLoad, ProvedShare


def input_text(
    visits: tuple[ProvedLoad, ...], shares: tuple[ProvedShare, ...], memory: tuple[InputMemory, ...]
) -> list[str]:
    """The report as lines of text: for each load, shared value and phase with input."""
    lines: list[str] = []
    for load in visits:
        op = load.op
        member_axes = (*op.per, *((op.clock,) if op.clock else ()))
        receivers = f"each {', '.join(member_axes)}" if member_axes else "everyone"
        sizes = f"[{', '.join(map(str, op.batch))}]" if op.clock else str(op.batch[0])
        cut = f"; split over {', '.join(op.split)}, {load.shards} shards" if op.split else ""
        lines.append(
            f"line {op.span.line}: an epoch of `{name_of(op.result)}` gives {receivers} every record"
            f" {op.visit.replace('_', ' ')}, however many there are (batch {sizes}, tail {op.tail}{cut})"
        )
        if load.rates is not None:
            lines.append(f"line {op.span.line}: {round_text(load.rates)}; {buffer_text(load.rates)}")
    for share in shares:
        lines.append(f"line {share.op.span.line}: {_share(share)}")
    for need in memory:
        records = need.records // need.batches
        lines.append(
            f"input of phase {need.phase}: at most {need.batches} batches of {records} records at once;"
            f" a host shares {sized(need.shared)}, a rank has {sized(need.private)} privately{_ahead(need)}"
            f"{_cache_text(need)}"
        )
    return lines


def _ahead(need: InputMemory) -> str:
    return f", and {sized(need.on_devices)} on its device ahead of the step" if need.on_devices else ""


def _cache_text(need: InputMemory) -> str:
    if not need.cached:
        return ""
    locations = {"its memory": need.cached - need.in_files, "files": need.in_files}
    sizes = " and ".join(f"{sized(nbytes)} in {location}" for location, nbytes in locations.items() if nbytes)
    return f"; a host keeps records across epochs in at most {sizes}"


def _share(share: ProvedShare) -> str:
    """The proved property of a shared value in words."""
    op, name = share.op, name_of(share.op.result)
    over = f"{', '.join(op.axes)} ({share.members})"
    if op.design == "duplicate":
        return f"`{name}` is made separately by each of {over}, with all its rows"
    readers = f", {op.readers} readers" if op.readers else ""
    return (
        f"`{name}` is made once over {over} ({op.design}{readers}): every row has one maker"
        " and reaches every host once, also after failures"
    )


def input_data(
    visits: tuple[ProvedLoad, ...], shares: tuple[ProvedShare, ...], memory: tuple[InputMemory, ...]
) -> dict[str, Any]:
    """The report as JSON data."""
    return {
        "visits": [
            {
                "phase": load.phase, "line": op.span.line, "value": name_of(op.result), "visit": op.visit,
                "tail": op.tail, "batches": list(op.batch), "per": list(op.per),
                "split": list(op.split), "shards": load.shards, "clock": op.clock,
                **_rates(load.rates),
            }
            for load in visits
            for op in (load.op,)  # binds `op`
        ],
        "shares": [
            {
                "phase": share.phase, "line": op.span.line, "value": name_of(op.result),
                "over": list(op.axes), "members": share.members, "design": op.design, "readers": op.readers,
            }
            for share in shares
            for op in (share.op,)  # binds `op`
        ],
        "input_memory": [
            {
                "phase": need.phase, "batches": need.batches, "records": need.records,
                "shared_nbytes": need.shared, "own_nbytes": need.private, "device_nbytes": need.on_devices,
                "cache_nbytes": need.cached, "cache_file_nbytes": need.in_files,
            }
            for need in memory
        ],
    }  # fmt: skip


def _rates(rates: Rates | None) -> dict[str, Any]:
    if rates is None:
        return {}
    return {
        "unit": rates.unit, "round": rates.round, "round_steps": list(rates.round_steps),
        "bound": rates.bound, "lag": rates.lag,
    }  # fmt: skip
