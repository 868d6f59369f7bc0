"""The example that decodes on the device, on the CPU: by nvImageCodec if installed, and by Pillow."""

from __future__ import annotations

import importlib.util
import io
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import device_decode  # pyright: ignore[reportMissingImports]
import photos  # pyright: ignore[reportMissingImports]


def opened(jpeg: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))


class PillowDecoder:
    """The part of nvImageCodec's decoder that the example uses; None for a file that is not an image."""

    def __init__(self, **place):
        assert place["backends"] == ["cpu"]

    def decode(self, jpegs):
        return [opened(bytes(jpeg)) if bytes(jpeg[:2]) == b"\xff\xd8" else None for jpeg in jpegs]


@pytest.fixture(params=["nvImageCodec", "Pillow"])
def decode(request, monkeypatch):
    if request.param == "Pillow":
        library = SimpleNamespace(
            Decoder=PillowDecoder, Backend=lambda kind: kind, CPU_ONLY="cpu", NVIMGCODEC_DEVICE_CPU_ONLY=-1
        )
        monkeypatch.setitem(sys.modules, "nvidia", SimpleNamespace(nvimgcodec=library))
        monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", library)
    elif importlib.util.find_spec("nvidia") is None:
        pytest.skip("nvImageCodec is not installed")
    else:
        pytest.importorskip("nvidia.nvimgcodec")
    return device_decode.Decoder(jax.devices()[0])


def test_pixels_of_a_batch_are_those_of_pillow(decode):
    records = list(photos.Crops(8))
    rows = [device_decode.row(record) for record in records]
    pixels = decode([row[:nbytes] for row, nbytes, _ in rows])
    np.testing.assert_array_equal(pixels, np.stack([opened(record[1:]) for record in records]))
    assert [label for _, _, label in rows] == [record[0] for record in records]


def test_the_example_runs(decode, capsys):
    name = f"decode-{uuid.uuid4().hex[:8]}"
    device_decode.main(["--feed", name, "--epochs", "1", "--records", "64"])
    assert "photographs a second decoded on" in capsys.readouterr().out


def test_what_is_no_image_is_named_by_its_place(decode):
    good, nbytes, _ = device_decode.row(photos.Crops(1)[0])
    with pytest.raises(ValueError, match=r"places \[1\] of the batch"):
        decode([good[:nbytes], np.zeros(16, np.uint8)])


def test_a_jpeg_that_is_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="has 65537 bytes and the plan's rows 65536"):
        device_decode.row(bytes(device_decode.ROW + 2))


def test_without_the_library_the_example_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    with pytest.raises(SystemExit, match=r"pip install 'nvidia-nvimgcodec-cu12\[all\]'"):
        device_decode.Decoder(jax.devices()[0])
