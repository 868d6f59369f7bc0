"""One process of a group with host functions in worker processes; prints its observations as JSON lines."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import numpy as np
from input_plans import FUNCTIONS, ensemble, images
from worker_plans import Reading

from commplan.runtime.input.group import group
from commplan.runtime.input.iterator import PhaseBatches


def main(index: int, count: int, run: str, workers: str, folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    program = ensemble("all_shared", count, hints="{ cores = 2 }")
    sources = {"images": Reading(images(40), folder)}
    team = group(run, index, count, timeout=60.0)
    with PhaseBatches(
        program, "step", sources, FUNCTIONS, local={"member": (index,)}, group=team, workers=workers
    ) as feed:
        for batch in feed:
            sums = {ref: zlib.crc32(np.ascontiguousarray(a)) for ref, a in batch.values.items()}
            print(json.dumps({"step": batch.step, "sums": sums}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
