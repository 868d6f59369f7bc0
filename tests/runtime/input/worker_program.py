"""A program as users write it, with its functions in it: prints the labels that it got."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from input_plans import ensemble, flip, images

from commplan.runtime.input.iterator import PhaseBatches


def decode(record: bytes) -> tuple[Any, int]:
    if len(sys.argv) > 2:  # say who works, and be busy for ever
        (Path(sys.argv[2]) / str(os.getpid())).touch()
        time.sleep(1000)
    return np.zeros((6, 6), np.uint8), record[0]


def main() -> None:
    functions = {"decode": decode, "flip": flip}
    program = ensemble("", 1, hints="{ cores = 2 }")
    with PhaseBatches(program, "step", {"images": images(16)}, functions, workers="processes") as feed:
        print(sorted(int(n) for batch in feed for n in batch.values["labels.0"]), flush=True)


if __name__ == "__main__" or sys.argv[1] == "unguarded":
    main()
