"""A feed as a data set of PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from commplan.diagnostics import fail

if TYPE_CHECKING:
    from commplan.runtime.input.feeds.feed import Feed


def dataset(feed: Feed) -> Any:
    """An `IterableDataset` over the batches of `feed`, an epoch at a time."""
    data: Any = importlib.import_module("torch.utils.data")

    class FeedDataset(data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            if data.get_worker_info() is not None:
                fail(
                    "CP0916",
                    f"feed {feed.name!r} is read in a worker of a DataLoader",
                    "batches are made ahead already: DataLoader(dataset, batch_size=None, num_workers=0)",
                )
            return (batch.torch() for batch in feed)

        def __len__(self) -> int:
            return feed.steps

    return FeedDataset()
