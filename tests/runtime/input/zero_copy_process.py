"""One of two processes that share values of two sources: python zero_copy_process.py RUN INDEX."""

from __future__ import annotations

import json
import sys

import numpy as np
from input_plans import schedule

from commplan.runtime.input.group import group
from commplan.runtime.input.iterator import PhaseBatches

DECLARATIONS = """
source images : u8[6]
source labels : u8[6]
fn join(u8[6], u8[6]) -> u8[6] on host
"""
BODY = """
    raw, n = load images batch 8 visit exactly_once seed 3 tail pad
    l, k   = load labels batch 8 visit exactly_once seed 3 tail pad
    x      = map join(raw, l)
    x      = share x over member via all_shared
    output x, n, k
"""


def main(run: str, index: int) -> None:
    program = schedule(BODY, "ensemble member = 2", declarations=DECLARATIONS)
    sources = {"images": np.zeros((16, 6), np.uint8), "labels": np.zeros((15, 6), np.uint8)}
    team = group(run, index, 2, timeout=60.0)
    functions = {"join": np.add}
    with PhaseBatches(program, "step", sources, functions, local={"member": (index,)}, group=team) as feed:
        print(json.dumps([[int(batch.values[name]) for name in ("n.0", "k.0")] for batch in feed]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
