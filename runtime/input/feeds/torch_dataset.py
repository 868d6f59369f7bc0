"""A feed as a PyTorch data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from commplan.diagnostics import CommplanError, Diagnostic, Note, import_optional

if TYPE_CHECKING:
    from commplan.runtime.input.feeds.feed import Feed


class WorkerError(CommplanError):
    """Raised if a feed is read in a worker of a DataLoader (CP0916).

    The DataLoader creates the error again in the parent process, with a text as the only argument, which is
    ignored.
    """

    def __init__(self, *_: object) -> None:
        super().__init__(
            Diagnostic(
                "CP0916",
                "a feed is read in a worker of a DataLoader",
                notes=(Note("batches are made ahead: DataLoader(dataset, batch_size=None, num_workers=0)"),),
            )
        )


def dataset(feed: Feed) -> Any:
    """Return an `IterableDataset` that yields the batches of one epoch of `feed` per iteration, as tensors.

    Its length is the number of batches of an epoch.

    Raises:
        CommplanError: CP0918 if PyTorch is not installed.
    """
    data: Any = import_optional("torch.utils.data", "CP0918", "data sets of PyTorch", "torch")

    class FeedDataset(data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            if data.get_worker_info() is not None:
                raise WorkerError
            for batch in feed:
                yield batch.torch()

        def __len__(self) -> int:
            return feed.steps

        def __reduce__(self) -> NoReturn:  # for workers that are not forked
            raise WorkerError

    return FeedDataset()
