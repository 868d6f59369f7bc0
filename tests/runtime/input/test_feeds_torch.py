"""Feeds as tensors of PyTorch, without JAX, and the error if a package is missing."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from feed_members import Member, check_same, expected, joined

from commplan.diagnostics import CommplanError
from commplan.ir.types import DType
from commplan.runtime.input.sources.record_convert import numpy_dtype

PLAIN = """
plan plain
ensemble member = ?
source numbers : i64
fn decode(i64) -> u8[3], bf16[4], bool, i64 on host
each step {
    raw, n                       = load numbers batch 4 visit exactly_once seed 7
    pixels, halves, even, labels = map decode(raw)
    output pixels, halves, even, labels, n
}
"""


def decode_plainly(number: Any) -> tuple[Any, ...]:
    halves = np.full(4, number / 2, numpy_dtype(DType.BF16))
    return np.full(3, number, np.uint8), halves, np.bool_(number % 2 == 0), np.int64(number)


def plainly_joined(name: str) -> Any:
    return joined(name, PLAIN, functions={"decode": decode_plainly})


def test_tensors_are_what_arrays_are(feed_name: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    with plainly_joined(feed_name) as feed:
        batches = [(batch, batch.torch()) for batch in feed]
    assert len(batches) == 7
    types = {name: tensor.dtype for name, tensor in batches[0][1].items()}
    assert types == {
        "pixels": torch.uint8, "halves": torch.bfloat16, "even": torch.bool, "labels": torch.int64,
        "n": torch.int32,
    }  # fmt: skip
    for batch, tensors in batches:  # longer than their slots last
        for name, array in batch.items():
            np.testing.assert_array_equal(tensors[name].to(torch.float64).numpy(), array.astype(np.float64))
        assert tensors["pixels"].data_ptr() == batch["pixels"].ctypes.data
        tensors["n"] += 1
        assert int(batch["n"]) in (2, 4)


def test_a_data_set_of_pytorch_gives_one_epoch_at_a_time(feed_name: str) -> None:
    torch = pytest.importorskip("torch")
    with joined(feed_name) as feed:
        loader = torch.utils.data.DataLoader(feed.torch_dataset(), batch_size=None)
        epochs = [list(loader) for _ in range(2)]
        assert len(loader) == 7 and feed.state()["epoch"] == 2
    check_same(
        [{name: tensor.numpy() for name, tensor in batch.items()} for batches in epochs for batch in batches],
        expected(0, epochs=2),
    )


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_loader_are_refused(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    torch = pytest.importorskip("torch")
    # PyTorch waits so many seconds for each worker that has failed, in vain.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    with joined(feed_name) as feed:
        loader = torch.utils.data.DataLoader(
            feed.torch_dataset(), batch_size=None, num_workers=2, multiprocessing_context=context
        )
        with pytest.raises(CommplanError) as error:
            list(loader)
        assert error.value.diagnostics[0].code == "CP0916" and "num_workers=0" in str(error.value)
        del error
        gc.collect()
        assert len(list(feed)) == 7


def test_programs_with_pytorch_and_without_share_one_feed(feed_name: str) -> None:
    """Each is a separate process that cannot import JAX."""
    pytest.importorskip("torch")
    members = [Member(feed_name, epochs=2, wait=True, torch=number > 0) for number in range(2)]
    for member in members:  # so that all are in time
        member.go_on()
        member.until("joined")
    for member in members:
        member.finish()
        begun = member.batches[0]["epoch"]
        member.check_epochs(range(begun, begun + 2))


@pytest.mark.parametrize(
    ("missing", "call"),
    [
        ("torch", lambda feed: feed.torch_dataset()),
        ("torch", lambda feed: next(feed).torch()),
        ("jax", lambda feed: next(feed).jax()),
    ],
)
def test_a_package_that_is_missing_is_named(
    feed_name: str, monkeypatch: pytest.MonkeyPatch, missing: str, call: Any
) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, missing, None)
    with joined(feed_name) as feed:
        with pytest.raises(CommplanError) as error:
            call(feed)
        assert error.value.diagnostics[0].code == "CP0918"
        assert f"need {missing}, which is not installed" in str(error.value)
        assert len(list(feed)) in (6, 7)
