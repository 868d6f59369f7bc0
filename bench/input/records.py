"""Real JPEGs without a download: seeded crops of the photographs that scikit-learn and scikit-image bundle.

A record is its number, four bytes little endian, and a JPEG file. A decoded record has the number in its
first four bytes, so that every consumer can list its records.
"""

from __future__ import annotations

import importlib
import io
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
SIDE = 224
WIDTH, HEIGHT, QUALITY = 500, 375, 90
SHAPE = (SIDE, SIDE, 3)
PREFIX = 4


def photographs() -> list[Pixels]:
    """The bundled photographs as arrays [height, width, 3]."""
    datasets: Any = importlib.import_module("sklearn.datasets")
    data: Any = importlib.import_module("skimage.data")
    images: list[Any] = [*datasets.load_sample_images().images]
    images += [getattr(data, name)() for name in ("astronaut", "coffee", "chelsea", "rocket")]
    return [np.array(image, np.uint8)[..., :3] for image in images]


def jpegs(count: int) -> list[bytes]:
    """Seeded crops of the photographs, scaled up if one is too small, as JPEG files."""
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


def pack(path: Path, count: int, pictures: int | None = None) -> None:
    """Write `count` records to one file, and their offsets to a second one. `pictures`: the JPEGs."""
    images = jpegs(min(count, pictures or count))
    records = [number.to_bytes(PREFIX, "little") + images[number % len(images)] for number in range(count)]
    np.save(path.with_suffix(".npy"), np.cumsum([0, *map(len, records)]))
    path.write_bytes(b"".join(records))


class Packed:
    """The records of a packed file, read from memory that all processes share."""

    def __init__(self, path: Path) -> None:
        self._starts: list[int] = np.load(path.with_suffix(".npy")).tolist()
        self.key = str(path)
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> bytes:
        return self._data[self._starts[number] : self._starts[number + 1]]


def decode(record: bytes) -> Pixels:
    """A record to u8 [224, 224, 3]: the middle of the picture, resized, with the record's number in front."""
    picture = _open(io.BytesIO(memoryview(record)[PREFIX:])).convert("RGB")
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    box = (left, top, left + side, top + side)
    pixels = np.array(picture.resize((SIDE, SIDE), 2, box=box))  # 2 is bilinear
    pixels.reshape(-1)[:PREFIX] = np.frombuffer(record, np.uint8, PREFIX)
    return pixels


def _open(file: io.BytesIO) -> Any:
    image: Any = importlib.import_module("PIL.Image")
    return image.open(file)


def numbers(batch: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """The numbers of the records in a batch u8 [rows, 224, 224, 3]."""
    return np.ascontiguousarray(batch.reshape(len(batch), -1)[:, :PREFIX]).view(np.uint32)[:, 0]
