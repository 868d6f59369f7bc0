"""Which leaf goes with which, in trees that are alike: an optimiser keeps, beside the weights, trees whose
leaves lie at paths that end as the weights' do."""

from __future__ import annotations

from collections.abc import Sequence

from commplan.ir.schedule import Leaf


def ends_with(path: str, end: str) -> bool:
    """Whether the keys of `path` end with those of `end`; every path ends with none at all.

    >>> ends_with("0/mu/dense/w", "dense/w"), ends_with("0/mu/bw", "w"), ends_with("0/mu", "")
    (True, False, True)
    """
    return not end or f"/{path}".endswith(f"/{end}")


def weights_of(kept: Sequence[Leaf], weights: Sequence[Leaf]) -> tuple[int | None, ...]:
    """Of each leaf of `kept` the weight that it belongs to, by its index; None where there is none.

    Of the weights of its shape with whose path its own path ends it is the one with the longest.

    >>> from commplan.ir.types import DType
    >>> w, count = Leaf("w", (3,), DType.F32), Leaf("0/count", (), DType.I32)
    >>> weights_of((count, Leaf("0/mu/w", (3,), DType.F32)), (w,))
    (None, 0)
    """
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for index, leaf in enumerate(weights):
        known.setdefault((leaf.path, leaf.shape), index)
    return tuple(_longest(leaf, known) for leaf in kept)


def _longest(leaf: Leaf, known: dict[tuple[str, tuple[int, ...]], int]) -> int | None:
    keys = leaf.path.split("/")
    for first in range(len(keys) + 1):
        index = known.get(("/".join(keys[first:]), leaf.shape))
        if index is not None:
            return index
    return None
