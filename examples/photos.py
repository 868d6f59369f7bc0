"""Records for the examples: small noisy crops of well-known photographs. From which one is it?

The photographs are those that scikit-learn and scikit-image carry in their wheels; nothing is
downloaded. Each is ruled into cells of 75 x 75 pixels; a quarter of the cells is held out, so no pixel is
in both sets. A record is one byte, the number of the photograph, and then a JPEG.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt
from PIL import Image

PHOTOGRAPHS = (
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/chelsea.png"),
    ("skimage", "data/rocket.jpg"),
    ("skimage", "data/hubble_deep_field.jpg"),
    ("skimage", "data/retina.jpg"),
    ("skimage", "data/motorcycle_left.png"),
    ("skimage", "data/ihc.png"),
    ("skimage", "data/camera.png"),
    ("skimage", "data/brick.png"),
    ("skimage", "data/grass.png"),
    ("skimage", "data/gravel.png"),
    ("skimage", "data/coins.png"),
)
CLASSES = len(PHOTOGRAPHS)
SIDE = 224  # pixels of a decoded record, as the plans say

_CELL, _CROP, _STORED = (
    75,
    56,
    256,
)  # pixels: a cell, a crop within a cell, and the JPEG that the crop is enlarged to
_PLAIN = 15.0  # standard deviation of the grey values below which a crop shows nothing

Pixels = npt.NDArray[np.uint8]


class Crops(Sequence[bytes]):
    """`count` noisy crops, deterministic for equal arguments.

    Args:
        count: number of records.
        held_out: whether crops come from the cells that are not used for training.
        noise: standard deviation of the noise added to each pixel and channel, of 255.
        tint: each channel is multiplied by a factor from 1 - tint to 1 + tint.
    """

    def __init__(
        self, count: int, *, seed: int = 0, held_out: bool = False, noise: float = 15.0, tint: float = 0.1
    ) -> None:
        rng = np.random.default_rng([seed, int(held_out)])
        photographs: list[Pixels] = [_photograph(package, path) for package, path in PHOTOGRAPHS]
        labels: list[int] = rng.permutation(np.arange(count) % CLASSES).tolist()
        crops = [_crop(photographs[label], rng, held_out) for label in labels]
        self._records = [
            _record(label, crop, rng, noise, tint) for label, crop in zip(labels, crops, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        return self._records[index]


def decode(record: bytes) -> tuple[Pixels, np.int32]:
    """A record's pixels, u8[224, 224, 3], and its label."""
    with Image.open(io.BytesIO(record[1:])) as image:
        pixels = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(pixels), np.int32(record[0])


def augment(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """One of the eight ways to turn and mirror a square."""
    turned = np.rot90(pixels, int(rng.integers(4)))
    return turned[:, ::-1] if rng.integers(2) else turned


def _photograph(package: str, path: str) -> Pixels:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the photographs of {package} are needed: pip install 'commplan[examples]'")
    with Image.open(Path(spec.submodule_search_locations[0]) / path) as image:
        return np.asarray(image.convert("RGB"), np.uint8)


def _crop(photograph: Pixels, rng: np.random.Generator, held_out: bool) -> Pixels:
    """A crop inside one cell that is not uniform."""
    rows, columns = photograph.shape[0] // _CELL, photograph.shape[1] // _CELL
    while True:
        row, column = int(rng.integers(rows)), int(rng.integers(columns))
        if ((row + 2 * column) % 4 == 3) != held_out:
            continue
        y, x = (int(rng.integers(_CELL - _CROP + 1)) + _CELL * place for place in (row, column))
        crop = photograph[y : y + _CROP, x : x + _CROP]
        if crop.mean(2).std() > _PLAIN:
            return crop


def _record(label: int, crop: Pixels, rng: np.random.Generator, noise: float, tint: float) -> bytes:
    values: npt.NDArray[np.float64] = crop * rng.uniform(1 - tint, 1 + tint, 3) + rng.normal(
        0, noise, crop.shape
    )
    image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    file = io.BytesIO()
    image.resize((_STORED, _STORED), Image.Resampling.BILINEAR).save(file, "JPEG", quality=85)
    return bytes([label]) + file.getvalue()
