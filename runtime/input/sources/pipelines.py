"""Pipelines of Grain as sources: which of them have random access, and a description of their content.

Nothing here imports Grain: a program that passes a pipeline has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np

MAP = "MapDataset"  # the class of Grain's pipelines with random access
ITER = "IterDataset"  # the class of Grain's pipelines without random access
_NUMBERS = bool | int | float | np.integer  # the types of attributes that describe a pipeline


def is_pipeline(source: object, kind: str = MAP) -> bool:
    """Whether `source` is a data set of Grain of class `kind`: `MAP` or `ITER`."""
    dataset: Any = getattr(sys.modules.get("grain"), kind, None)
    return isinstance(dataset, type) and isinstance(source, dataset)


def hints(source: object) -> tuple[str, ...]:
    """Hints for a pipeline without random access; empty for any other object."""
    if not is_pipeline(source, ITER):
        return ()
    return (
        "give the MapDataset of Grain before `.to_iter_dataset()`, without `.batch(..)`",
        "the plan decides order, batches and what is made ahead",
    )


def content(source: object, digest: Callable[[object], str]) -> list[str] | None:
    """A description of a MapDataset and its parents; None for any other object.

    It has class names, numbers and digests of functions. Attributes of other types are left out. A source
    (see `sources`) contributes its type, `key` and `_fingerprint`, not its records. Different pipelines can
    therefore have equal descriptions.

    Args:
        source: the pipeline.
        digest: returns a digest of a function.
    """
    if not is_pipeline(source):
        return None
    words = [type(source).__name__]
    for name, value in sorted(vars(source).items()):
        if isinstance(value, _NUMBERS) or (name != "_source" and _are_numbers(value)):
            words.append(f"{name}={value!s}")
        elif callable(value):  # a function, or a method of a transform
            words.append(f"{name}={digest(value)}")
            words += _settings(getattr(value, "__self__", None))
        elif name == "_source":
            words.append(type(value).__name__)
            words += [str(getattr(value, attribute, "")) for attribute in ("key", "_fingerprint")]
    for parent in cast("Any", source).parents:
        words += content(parent, digest) or []
    return [*words, f"parents={len(cast('Any', source).parents)}"]


def sources(dataset: object) -> list[Any]:
    """The objects from which a MapDataset and its parents read records."""
    parents = [each for parent in cast("Any", dataset).parents for each in sources(parent)]
    return [value for name, value in vars(dataset).items() if name == "_source"] + parents


def _are_numbers(value: object) -> bool:
    """Whether `value` is a list or tuple of numbers, such as the weights of `mix`."""
    return isinstance(value, list | tuple) and all(
        isinstance(each, _NUMBERS) for each in cast("list[object]", value)
    )


def _settings(transform: object) -> list[str]:
    """The class name of a transform, and its attributes that are numbers or strings; empty for None."""
    if transform is None:
        return []
    attributes = sorted(getattr(transform, "__dict__", {}).items())
    kinds = bool | int | float | str | np.generic
    return [
        type(transform).__qualname__,
        *(f"{name}={value!s}" for name, value in attributes if isinstance(value, kinds)),
    ]
