"""A feed as a data set of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from commplan.diagnostics import CommplanError, Diagnostic, Note
from commplan.runtime.input.packages import package

if TYPE_CHECKING:
    from commplan.runtime.input.feeds.feed import Feed


class WorkerError(CommplanError):
    """A feed in a worker of a DataLoader, which raises this anew in its parent, from a text."""

    def __init__(self, *_: object) -> None:
        super().__init__(
            Diagnostic(
                "CP0916",
                "a feed is read in a worker of a DataLoader",
                notes=(Note("batches are made ahead: DataLoader(dataset, batch_size=None, num_workers=0)"),),
            )
        )


def dataset(feed: Feed) -> Any:
    """An `IterableDataset` over the batches of `feed`, an epoch at a time. Errors: CP0918."""
    data: Any = package("torch.utils.data", "data sets of PyTorch", "torch")

    class FeedDataset(data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            if data.get_worker_info() is not None:
                raise WorkerError
            for batch in feed:
                yield batch.torch()

        def __len__(self) -> int:
            return feed.steps

        def __reduce__(self) -> NoReturn:  # for a worker that is not forked
            raise WorkerError

    return FeedDataset()
