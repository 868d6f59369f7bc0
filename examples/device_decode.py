"""JPEGs that are decoded on the device by nvImageCodec, from one input that all members of a sweep share.

The host reads each photograph once for all programs that join the feed, and does not decode it: a batch is
rows of JPEGs in memory that they share. Each program decodes the batch on its own device, so no pixels cross
the bus. Without a GPU the library decodes on the CPU, which shows that the program is right and no more.

    pip install 'nvidia-nvimgcodec-cu12[all]'
    python examples/device_decode.py [--feed decode] [--epochs 2] [--records 512]
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import commplan
import devices
import photos

PLAN = Path(__file__).parent / "plans" / "device_decode.plan"
ROW = 65_536  # bytes of a row, as the plan says
Bytes = npt.NDArray[np.uint8]


def row(record: bytes) -> tuple[Bytes, np.int32, np.int32]:
    """Return a photograph's JPEG in a row, its length, and its label. ValueError if it does not fit."""
    jpeg = np.frombuffer(record, np.uint8)[1:]
    if jpeg.size > ROW:
        raise ValueError(f"the JPEG has {jpeg.size} bytes and the plan's rows {ROW}: write a larger `u8[..]`")
    return np.pad(jpeg, (0, ROW - jpeg.size)), np.int32(jpeg.size), np.int32(record[0])


class Decoder:
    """Decodes JPEGs on `device`, a GPU or a CPU of JAX. Ends the program where nvImageCodec is missing."""

    def __init__(self, device: Any) -> None:
        try:
            codec = importlib.import_module("nvidia.nvimgcodec")
        except ImportError:
            wheel = "nvidia-nvimgcodec-cu12[all]"
            raise SystemExit(f"images are decoded by nvImageCodec: pip install '{wheel}'") from None
        self.on_gpu = device.platform in ("cuda", "gpu")
        place: dict[str, Any] = {"device_id": device.local_hardware_id}
        if not self.on_gpu:
            backends = [codec.Backend(codec.CPU_ONLY)]
            place = {"device_id": codec.NVIMGCODEC_DEVICE_CPU_ONLY, "backends": backends}
        self._decoder = codec.Decoder(**place)

    def __call__(self, jpegs: Sequence[Bytes]) -> jax.Array:
        """Decode JPEGs of one size to pixels, u8[n, height, width, 3].

        Raises:
            ValueError: for a record that cannot be decoded.
        """
        images: list[Any] = self._decoder.decode(list(jpegs))
        if bad := [number for number, image in enumerate(images) if image is None]:
            raise ValueError(f"no images that nvImageCodec decodes: places {bad} of the batch")
        if self.on_gpu:  # the memory that the library decoded into, without a copy
            return jnp.stack([jax.dlpack.from_dlpack(image) for image in images])
        return jnp.stack([np.asarray(image) for image in images])


@jax.jit
def scaled(pixels: jax.Array) -> jax.Array:
    """[n, height, width, 3] of u8 to f32[n, 224, 224, 3] between 0 and 1."""
    shape = (pixels.shape[0], photos.SIDE, photos.SIDE, 3)
    return jax.image.resize(pixels.astype(jnp.float32) / 255, shape, "linear")


def train(decode: Decoder, batch: Mapping[str, Any]) -> jax.Array:
    """Stands for a step: the mean brightness of the photographs of a batch."""
    rows = zip(batch["jpegs"], batch["nbytes"].tolist(), strict=True)
    return scaled(decode([jpeg[:nbytes] for jpeg, nbytes in rows])).mean()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--feed", default="decode", help="the feed to join; programs of one feed share it")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--records", type=int, default=512)
    devices.add_option(parser)
    options = parser.parse_args(argv)
    (device,) = devices.choose(options.device, 1)
    decode = Decoder(device)
    sources, functions = {"images": photos.Crops(options.records)}, {"row": row}
    with commplan.join(options.feed, PLAN, sources=sources, functions=functions) as feed:
        for epoch in range(options.epochs):
            start, count, last = time.perf_counter(), 0, jnp.zeros(())
            for batch in feed:
                last, count = train(decode, batch), count + len(batch["labels"])
            jax.block_until_ready(last)
            rate = count / (time.perf_counter() - start)
            print(f"epoch {epoch}: {rate:.0f} photographs a second decoded on {device}")


if __name__ == "__main__":
    main()
