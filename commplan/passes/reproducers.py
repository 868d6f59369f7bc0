"""Files with all that is needed to see a failing pass fail again."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import msgspec

from commplan.ir.schedule import Schedule
from commplan.ir.serial import jsonable
from commplan.passes.base import Context

FORMAT = "commplan-reproducer"


def write_reproducer(
    schedule: Schedule, pipeline: str, context: Context, error: str, directory: Path | None = None
) -> Path:
    """Write `schedule`, the `pipeline` that is still to run, and `context`; gives back the file's path.

    The file is in `directory`, else in a new temporary one.
    """
    place = directory or Path(tempfile.mkdtemp(prefix="commplan-"))
    first = re.match(r"[a-z_]+", pipeline)
    name = f"{schedule.plan}-{first[0] if first else 'lower'}.reproducer.json"
    path = place / name
    content = {
        "format": FORMAT,
        "run": f"python -m commplan.passes.reproduce {name}",
        "error": error,
        "pipeline": pipeline,
        "order": {key: list(paths) for key, paths in context.order.items()},
        "topology": context.topology,
        "calibration": context.calibration,
        "places": context.places,
        "schedule": jsonable(schedule),
    }
    place.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    return path
