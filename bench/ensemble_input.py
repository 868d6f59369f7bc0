"""CPU of the input pipeline per record and member: shared, duplicated, and what is physically possible.

Real JPEGs: seeded crops, 500 x 375 at quality 90, of the photographs that scikit-learn and scikit-image
bundle; decoded with Pillow, cut and resized to 224 x 224 u8. Three ways: all members in one process, one
process per member sharing through memory, and duplicated. The limit is measured in the same run: one
decode divided by the number of members, and one copy of the record that the consumer must be given.
Times are user and system CPU seconds of whole processes over the second epoch: start-up and the first
epoch (threads, caches, the allocator) are left out.

    python bench/ensemble_input.py [--records 256] [--members 1,2,4,8] [--json]
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from commplan import compiler
from commplan.dsl import load
from commplan.ir.schedule import Schedule
from commplan.runtime.data import PhaseBatches, group

Pixels = npt.NDArray[np.uint8]
SIDE, BATCH = 224, 32
WIDTH, HEIGHT, QUALITY = 500, 375, 90
# glibc's own thresholds cost Pillow hundreds of page faults a record, in some runs and not in others:
# everything is measured under one setting.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 29)}

PLAN = """
plan ensemble_input
ensemble member = {members}
source images : bytes
fn decode(bytes) -> u8[224, 224, 3] on host
each step {{
    raw    = load images batch {batch} visit exactly_once seed 17 {{ cores = {cores} }}
    pixels = map decode(raw)
    pixels = share pixels over member via {design}
    own    = map keep(pixels) per member
    output own
}}
"""
KEEP = "fn keep(u8[224, 224, 3]) -> u8[224, 224, 3] on host random"


def photographs() -> list[Pixels]:
    """The bundled photographs as arrays [height, width, 3]."""
    datasets: Any = importlib.import_module("sklearn.datasets")
    data: Any = importlib.import_module("skimage.data")
    found: list[Any] = [*datasets.load_sample_images().images]
    found += [getattr(data, name)() for name in ("astronaut", "coffee", "chelsea", "rocket")]
    return [np.array(image, np.uint8)[..., :3] for image in found]


def jpegs(count: int) -> list[bytes]:
    """Seeded crops of the photographs, scaled up where one is too small, as JPEG files."""
    image: Any = importlib.import_module("PIL.Image")
    rng = np.random.default_rng(0)
    sources = [image.fromarray(pixels) for pixels in photographs()]
    records: list[bytes] = []
    for number in range(count):
        picture = sources[number % len(sources)]
        scale = max(1.0, (WIDTH + 20) / picture.width, (HEIGHT + 20) / picture.height)
        picture = picture.resize((int(picture.width * scale) + 1, int(picture.height * scale) + 1))
        left = int(rng.integers(int(picture.width) - WIDTH))
        top = int(rng.integers(int(picture.height) - HEIGHT))
        file = io.BytesIO()
        crop = picture.crop((left, top, left + WIDTH, top + HEIGHT))
        crop.save(file, "JPEG", quality=QUALITY)
        records.append(file.getvalue())
    return records


def decode(record: bytes) -> Pixels:
    """JPEG bytes to u8 [224, 224, 3]: the middle, resized."""
    image: Any = importlib.import_module("PIL.Image")
    picture = image.open(io.BytesIO(record)).convert("RGB")
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    box = (left, top, left + side, top + side)
    return np.asarray(picture.resize((SIDE, SIDE), image.Resampling.BILINEAR, box=box))


def schedule(members: int, design: str, cores: int) -> Schedule:
    """Every member gets an array of its own, so that it is handed what a training process is handed."""
    text = PLAN.format(members=members, design=design, batch=BATCH, cores=cores)
    text = text.replace("each step", f"{KEEP}\neach step")
    plan, problems = load(text, "ensemble_input.plan")
    if plan is None:
        raise SystemExit("\n".join(map(str, problems)))
    return compiler.compile_plan(plan, {}, {}, pipeline="")


def keep(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """A member's own augmentation that costs nothing itself: the copy into its batch is what is left."""
    return pixels


def consume(
    members: int, design: str, records: list[bytes], place: int | None, run_id: str
) -> tuple[float, int]:
    """CPU seconds of this process over the second epoch, and records given to its members in it."""
    local = None if place is None else {"member": (place,)}
    team = None if place is None else group(run_id, place, members)
    made = schedule(members, design, cores=1 if place is not None else 2)
    functions = {"decode": decode, "keep": keep}
    with PhaseBatches(made, "step", {"images": records}, functions, local=local, group=team) as batches:
        for _ in batches:
            pass  # the first epoch warms threads, caches and the allocator
        start = time.process_time()
        given = 0
        for batch in batches:
            given += sum(array.shape[0] * array.shape[1] for array in batch.values.values())
        return time.process_time() - start, given


def limits(records: list[bytes]) -> tuple[float, float]:
    """CPU seconds of one decode and of one copy of its result."""
    start = time.process_time()
    for record in records:
        pixels = decode(record)
    each = (time.process_time() - start) / len(records)
    pixels = decode(records[0])
    target = np.zeros((len(records), *pixels.shape), np.uint8)
    start = time.process_time()
    for _ in range(4):
        for row in range(len(records)):
            target[row] = pixels
    return each, (time.process_time() - start) / len(records) / 4


def processes(members: int, design: str, count: int) -> float:
    """CPU seconds per record and member, one process per member."""
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    script = [sys.executable, str(Path(__file__).resolve()), "--records", str(count)]
    started = [
        subprocess.Popen(
            [*script, "--worker", f"{place},{members},{design},{run_id}"], stdout=subprocess.PIPE, text=True
        )
        for place in range(members)
    ]
    found = [json.loads(process.communicate()[0]) for process in started]
    return sum(cpu for cpu, _ in found) / sum(given for _, given in found)


def measure(count: int, members: list[int]) -> dict[str, Any]:
    """The whole table; times in milliseconds of CPU per record and member."""
    records = jpegs(count)
    rows: list[dict[str, float]] = []
    for n in members:
        once, copy = limits(records)
        limit = once / n + copy
        inside, given = consume(n, "all_shared", records, None, "")
        twice, given_twice = consume(n, "duplicate", records, None, "")
        between = processes(n, "all_shared", count)
        row = {
            "decode": once,
            "copy": copy,
            "limit": limit,
            "duplicated": twice / given_twice,
            "one_process": inside / given,
            "processes": between,
        }
        rows.append({"members": n, **{key: value * 1e3 for key, value in row.items()}})
    return {"records": count, "batch": BATCH, "unit": "ms CPU per record and member", "rows": rows}


def table(found: dict[str, Any]) -> str:
    """The measurements for people."""
    lines = [
        f"{found['records']} JPEGs, batch {found['batch']}; {found['unit']} (times the limit)",
        f"{'members':>8}{'limit':>10}{'duplicated':>20}{'shared, 1 process':>20}{'shared, processes':>20}",
    ]
    for row in found["rows"]:
        cells = "".join(
            f"{row[key]:>12.3f} ({row[key] / row['limit']:4.2f}x)"
            for key in ("duplicated", "one_process", "processes")
        )
        lines.append(f"{row['members']:>8}{row['limit']:>10.3f}{cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--members", default="1,2,4,8")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.environ.update(MALLOC)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if options.worker:
        place, members, design, run_id = options.worker.split(",")
        print(json.dumps(consume(int(members), design, jpegs(options.records), int(place), run_id)))
        return
    found = measure(options.records, [int(n) for n in options.members.split(",")])
    print(json.dumps(found, indent=2) if options.json else table(found))


if __name__ == "__main__":
    main()
