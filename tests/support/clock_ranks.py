"""Ranks with a member each, which share: each compares its batches with those of a single member.

Arguments: the number of pretended hosts, and the batch of each member, or one for all. Prints, per rank, the
records that it read.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "input"))

from input_plans import Counting, decode, flip, images

import commplan
from commplan.runtime.input.device import clocked_phases as run_batches

RECORDS = 101
PLAN = """
plan own_clocks
ensemble member = 3
source images : bytes
fn decode(bytes)     -> u8[6, 6], i32 on host
fn flip(u8[6, 6])    -> u8[6, 6] on host random
each step {{
    raw, n         = load images batch {batch} visit exactly_once seed 5 tail short
    pixels, labels = map decode(raw)
    {share}
    batch          = map flip(pixels) per member
    output batch, labels, n
}}
"""
ALONE = "\n    ".join(f"{name} = share {name} over member via duplicate" for name in ("pixels", "labels"))
FUNCTIONS = {"decode": decode, "flip": flip}


def main(hosts: int, *sizes: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    run_batches.this_host = lambda: f"host {rank * hosts // 3}"
    batch = f"{list(sizes)} over member" if len(sizes) > 1 else sizes[0]
    program = commplan.loads(PLAN.format(batch=batch, share="")).compile(comm)
    source = Counting(images(RECORDS))
    run = program.bind(comm, sources={"images": source}, functions=FUNCTIONS)
    # All ranks bind all plans alike, and look at the one with their own batch.
    programs = {
        size: commplan.loads(PLAN.format(batch=size, share=ALONE))
        .compile(comm)
        .bind(comm, sources={"images": images(RECORDS)}, functions=FUNCTIONS)
        for size in sorted(set(sizes))
    }
    feed, alone = run.batches(member=rank), programs[sizes[rank % len(sizes)]].batches(member=rank)
    count = 0
    for _ in range(2):
        iter(alone)
        for item in feed:
            expected = next(alone)
            for name, array in item.items():
                np.testing.assert_array_equal(array, expected[name], err_msg=f"{name} {rank} {count}")
            count += 1
            time.sleep(0.003 if rank == 1 else 0)
        assert next(alone, None) is None
    state = feed.state()
    comm.Barrier()
    feed.close()
    alone.close()
    print(json.dumps({"rank": rank, "count": count, "state": state["epoch"], "read": sorted(source.read)}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
