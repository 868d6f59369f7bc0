"""The stages of a phase, each with all that running it needs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from commplan.diagnostics import fail
from commplan.ir.plan import Ref
from commplan.ir.schedule import Map, Read, Share, results
from commplan.ir.types import ArrayType
from commplan.runtime.data.adapters import batched
from commplan.runtime.data.kinds import numpy_dtype
from commplan.runtime.data.program import HostProgram
from commplan.runtime.data.records import Stage
from commplan.runtime.data.sources import Source
from commplan.runtime.data.usage import Meter


def _numbers(program: HostProgram) -> dict[Ref, int]:
    """What tells the random streams of the maps of a phase apart: the function, and which use of it.

    Uses are counted as the plan writes them: passes move ops, and rename what is shared.
    """
    uses: dict[str, int] = {}
    found: dict[Ref, int] = {}
    maps = [op for op in program.phase.ops if isinstance(op, Map)]
    for op in sorted(maps, key=lambda op: op.span):
        uses[op.fn] = uses.get(op.fn, 0) + 1
        found[op.results[0]] = zlib.crc32(op.fn.encode()) * 65536 + uses[op.fn]
    return found


def stages(
    program: HostProgram,
    sources: Mapping[str, Source],
    functions: Mapping[str, Callable[..., Any]],
    meter: Meter,
) -> dict[Ref, Stage]:
    """What runs each Read and Map of the program.

    Errors: CP0914 where `on_error = skip` stands on a stage that cannot skip.
    """
    made: dict[Ref, Stage] = {}
    numbers = _numbers(program)
    file = program.schedule.file
    for flow in program.flows:
        skips = any(read.hints.on_error == "skip" for read in flow.reads)
        alike = all(read.per == flow.per for read in flow.reads)
        members = {*flow.per, *(read.clock for read in flow.reads)}  # each goes on without what it skips
        for op in flow.ops:
            key = results(op)[0]
            if isinstance(op, Share):
                meter.line(key, f"share {key.rpartition('.')[0]} via {op.design}", op.span)
                continue
            own = op.hints.on_error
            may = alike and members.issuperset(program.per(key))
            if own == "skip" and not may:
                fail(
                    "CP0914",
                    "a record cannot be skipped where members differ: the others have it already",
                    "put `on_error = skip` on the load, or on a map before the first `per`",
                    span=op.span,
                    file=file,
                )
            names = [ref for ref in results(op) if ref in program.elements]
            elements = tuple(program.elements[ref] for ref in names)
            dtypes = tuple(numpy_dtype(e.dtype) if isinstance(e, ArrayType) else None for e in elements)
            call = sources[op.source].__getitem__ if isinstance(op, Read) else functions[op.fn]
            what = f"load {op.source}" if isinstance(op, Read) else f"map {op.fn}"
            meter.line(key, what, op.span)
            random = isinstance(op, Map) and op.random
            made[key] = Stage(
                op, numbers.get(key, 0), elements, dtypes, call, flow.reads[0].seed, random, file, meter,
                (own == "skip" or (own is None and skips)) and may,
                batched(sources[op.source]) if isinstance(op, Read) else None,
            )  # fmt: skip
    return made
