"""Three members with batches of different sizes, one thread each, fed from one stream.

The plan is plans/ensemble_rates.plan: members 0 and 1 take 32 records a step, member 2 takes 64. Every record
is read and decoded once for all three. Fast members wait for the slowest, within the bound that the compiler
found. Member 1 is slowed down on purpose. Each member computes the mean image of its records.

    python examples/ensemble_rates.py [--records 512] [--epochs 2] [--pause 0.01]
"""

from __future__ import annotations

import argparse
import io
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

import commplan
import devices
import photos

PLAN = Path(__file__).parent / "plans" / "ensemble_rates.plan"
MEMBERS, SLOW = 3, 1


def decode(record: bytes) -> Any:
    """A photo's pixels, u8[64, 64, 3]; its first byte is the label."""
    with Image.open(io.BytesIO(record[1:])) as image:
        return np.asarray(image.convert("RGB").resize((64, 64), Image.Resampling.BILINEAR))


@jax.jit
def update(mean: Any, pixels: Any, mask: Any) -> Any:
    """A step of the member's own size: towards the mean of the batch's records."""
    records = mask[:, None, None, None]
    return mean + 0.1 * (jnp.mean(pixels.astype(jnp.float32), 0, where=records) / 255 - mean)


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    mesh = jax.make_mesh((MEMBERS,), ("member",), devices=devices.choose(options.device, MEMBERS))
    crops = photos.Crops(options.records)
    run = (
        commplan.load(PLAN).compile(mesh).bind(mesh, sources={"images": crops}, functions={"decode": decode})
    )
    feeds = [run.batches(member=member) for member in range(MEMBERS)]
    steps = [0] * MEMBERS

    def train(member: int) -> None:
        mean: Any = jnp.zeros((64, 64, 3))
        for _ in range(options.epochs):
            for item in feeds[member]:
                mean = update(mean, item["pixels"], item.mask)
                steps[member] += 1
                time.sleep(options.pause if member == SLOW else 0)
        mean.block_until_ready()

    threads = [threading.Thread(target=train, args=(member,)) for member in range(MEMBERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = feeds[0].summary()
    for feed in feeds:
        feed.close()
    decoded = next(line.records for line in summary.lines if line.what == "map decode")
    for member, count in enumerate(steps):
        print(f"member {member}: {count} steps of {options.records * options.epochs // count} records")
    print(f"{decoded} records decoded for {options.records * options.epochs} that each member saw")
    if summary.slow is not None:
        print(f"member {summary.slow.member} was waited for, {summary.slow.wait_s:.2f} s in all")


def _options(argv: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(description="Members with batches of their own sizes, on one stream.")
    parser.add_argument("--records", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--pause", type=float, default=0.01, help="seconds that member 1 rests after each step"
    )
    devices.add_option(parser)
    options = parser.parse_args(argv)
    if options.records % 64:
        parser.error("--records must be a multiple of 64")
    return options


if __name__ == "__main__":
    main()
