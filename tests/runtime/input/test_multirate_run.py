"""`run.batches(member=m)` for members with independent clocks: arrays on each member's own devices."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_plans import Counting, decode, flip, images
from multirate_plans import code
from support import interpreter, mpirun
from support.embedding import PLANS, bind, mesh_of

from commplan.diagnostics import CommplanError
from commplan.runtime.input.device.clocked_phases import MultirateBatches
from commplan.runtime.rehearse.rehearse import rehearse

RANKS = Path(__file__).parents[2] / "support" / "clock_ranks.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "ensemble_rates.py"
PLAN = """
plan own_clocks
ensemble member = {members}
axis     data   = 2
source images : bytes
fn decode(bytes)     -> u8[6, 6], i32 on host
fn flip(u8[6, 6])    -> u8[6, 6] on host random
each step {{
    raw, n         = load images batch {batch} split data visit exactly_once seed 5
    pixels, labels = map decode(raw)
    batch          = map flip(pixels) per member
    output batch, labels, n
}}
"""
FUNCTIONS = {"decode": decode, "flip": flip}


def test_each_member_gets_the_arrays_of_a_plan_with_its_batch_for_all() -> None:
    sizes = (4, 4, 8)
    mesh = mesh_of(member=3, data=2)
    text = PLAN.format(members=3, batch=f"{list(sizes)} over member")
    source = Counting(images(53))
    run = bind(text, mesh, sources={"images": source}, functions=FUNCTIONS)
    feeds = [run.batches(member=m) for m in range(3)]
    whole = {
        size: bind(
            PLAN.format(members=3, batch=size), mesh, sources={"images": images(53)}, functions=FUNCTIONS
        )
        for size in sizes
    }
    alone = [whole[size].batches(member=m) for m, size in enumerate(sizes)]
    for number in range(7):
        for m, count in enumerate((2, 2, 1)):
            for _ in range(count):
                item, other = next(feeds[m]), next(alone[m])
                assert item.keys() == other.keys() == {"batch", "labels", "n"}
                for name, array in item.items():
                    assert array.sharding == other[name].sharding
                    np.testing.assert_array_equal(array, other[name], err_msg=f"{name} {m} {number}")
                assert item["batch"].shape == (sizes[m], 6, 6)
    assert [next(feed, None) for feed in feeds] == [None] * 3
    assert len(source.read) == 56
    assert [feed.state() for feed in feeds] == [each.state() for each in alone]
    for feed in (*feeds, *alone):
        feed.close()


def test_there_are_no_batches_of_all_members() -> None:
    text = PLAN.format(members=3, batch="[4, 4, 8] over member")
    run = bind(text, mesh_of(member=3, data=2), sources={"images": images(53)}, functions=FUNCTIONS)
    with pytest.raises(CommplanError) as error:
        run.batches()
    assert code(error) == "CP0912"
    with run.batches(member=1), pytest.raises(CommplanError) as error:
        run.member(1).batches()
    assert code(error) == "CP0948"


def test_the_example_decodes_each_record_once() -> None:
    done = subprocess.run(
        [*interpreter.words(), str(EXAMPLE), "--records", "256", "--epochs", "1"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    steps = ((0, 8, 32), (1, 8, 32), (2, 4, 64))
    assert lines[:3] == [f"member {m}: {count} steps of {size} records" for m, count, size in steps]
    assert lines[3] == "256 records decoded for 256 that each member saw"


@pytest.mark.filterwarnings("ignore:warning.CP0949")  # repeats the same epoch on purpose
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_rehearsal_takes_all_members_through_their_rounds(workers: str) -> None:
    text = (PLANS / "ensemble_rates.plan").read_text(encoding="utf-8")
    functions = {"decode": big}
    run = bind(text, mesh_of(member=3), sources={"images": images(128)}, functions=functions)
    (times,) = rehearse(run, steps=5)
    assert times.calls == 5
    assert times.input is not None
    assert times.input.batches == 5 + 5 + 2
    with run.batches(member=0, workers=workers) as first, run.batches(member=2) as third:
        for _ in range(2):
            for item in (next(first), next(first), next(third)):
                assert item["pixels"].shape[1:] == (64, 64, 3)
    rounds = MultirateBatches(run, "step")
    assert rounds.steps == 4
    names = [sorted(item) for item in rounds]
    due = ([0, 1], [0, 1, 2]) * 2
    assert names == [[f"pixels of member {m}" for m in members] for members in due]
    rounds.close()


def big(record: bytes) -> np.ndarray[Any, Any]:
    return np.full((64, 64, 3), record[0], np.uint8)


@pytest.mark.parametrize(("hosts", "sizes"), [(1, (4, 4, 8)), (2, (4, 4, 8)), (3, (4, 4, 8)), (2, (4,))])
def test_ranks_share_over_mpi_what_their_members_take_at_their_own_pace(
    hosts: int, sizes: tuple[int, ...]
) -> None:
    done = mpirun.started(mpirun.command(3, RANKS, hosts, *sizes))
    assert done.returncode == 0, done.stderr
    reports = sorted(
        (json.loads(line) for line in done.stdout.splitlines()), key=lambda report: report["rank"]
    )
    assert [report["count"] for report in reports] == [
        2 * -(-101 // sizes[rank % len(sizes)]) for rank in range(3)
    ]
    assert {report["state"] for report in reports} == {2}
    assert sorted(record for report in reports for record in report["read"]) == sorted([*range(101)] * 2)
