"""Data sets of Hugging Face and PyTorch, if installed."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from batch_feed import no_thread_is_left_behind
from input_plans import schedule

import commplan
from commplan.runtime.input.iterator import PhaseBatches

pytestmark = [
    pytest.mark.usefixtures(no_thread_is_left_behind.__name__),
    pytest.mark.filterwarnings("ignore"),  # theirs
]
DECLARATIONS = "source image : u8[4, 4, 3]\nsource label : i32"
BODY = """x = load image batch 8 visit exactly_once seed 1 { cores = 2 }
y = load label batch 8 visit exactly_once seed 1
output x, y"""


def agree(sources: dict[str, Any], workers: str) -> None:
    """Every record comes once, with its own label."""
    program = schedule(BODY, declarations=DECLARATIONS)
    labels: list[int] = []
    with PhaseBatches(program, "step", sources, {}, workers=workers) as feed:
        for batch in feed:
            x, y = batch.values["x.0"], batch.values["y.0"]
            assert np.array_equal(x[:, 3, 3, 2], y)
            labels += y.tolist()
    assert sorted(labels) == list(range(40))


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_hugging_face_data_sets(workers: str) -> None:
    datasets: Any = pytest.importorskip("datasets")
    image: Any = pytest.importorskip("PIL.Image")

    def png(number: int) -> bytes:
        file = io.BytesIO()
        image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(file, "PNG")
        return file.getvalue()

    columns = {"image": [{"bytes": png(n), "path": None} for n in range(40)], "label": list(range(40))}
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    agree({"image": rows, "label": commplan.column(rows, "label")}, workers)
    if workers == "threads":
        whole = rows.with_transform(lambda rows: {**rows, "image": [np.asarray(x) for x in rows["image"]]})
        agree({"image": whole, "label": whole}, workers)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_torch_data_sets(workers: str) -> None:
    torch: Any = pytest.importorskip("torch")
    data: Any = pytest.importorskip("torch.utils.data")
    numbers = torch.arange(40, dtype=torch.int32)
    pictures = numbers.to(torch.uint8)[:, None, None, None].expand(40, 4, 4, 3).contiguous()
    pairs = data.TensorDataset(pictures, numbers)
    for rows in (pairs, data.Subset(pairs, list(range(40))[::-1])):
        agree({"image": commplan.column(rows, 0), "label": commplan.column(rows, 1)}, workers)
