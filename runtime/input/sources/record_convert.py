"""What a record may be: what other libraries' data sets return, as NumPy and Python have it.

Nothing here imports those libraries: what a record is made of is told by what it offers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from commplan.ir.types import ArrayType, BytesType, DType, TreeType
from commplan.runtime.input.packages import package

Element = ArrayType | BytesType | TreeType


class UnlikeError(Exception):
    """A record that is nothing the plan could mean: what was found, and what to do about it."""

    def __init__(self, actual: str, *hints: str) -> None:
        super().__init__(actual)
        self.hints = hints


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype of `dtype`; bf16 is known to NumPy once ml_dtypes (a part of JAX) is imported.
    Raises CP0918 where it is not installed."""
    try:
        return np.dtype(dtype.numpy_name)
    except TypeError:
        return np.dtype(package("ml_dtypes", "records of type bf16", "ml_dtypes").bfloat16)


def described(value: object) -> str:
    """A record in words."""
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, cast("Mapping[object, object]", value)))
        return f"a record with columns {keys}"
    if isinstance(value, tuple | list):
        items = cast("Sequence[object]", value)
        kinds = ", ".join(type(item).__name__ for item in items[:4])
        return f"a {type(items).__name__} of {len(items)}: {kinds}{', ...' if len(items) > 4 else ''}"
    return f"a {type(value).__name__}"


def plain(value: Any, element: Element, name: str) -> Any:
    """A record of source `name` as NumPy and Python have it: an array, a scalar, bytes.

    Stands for itself: NumPy's and Python's. Torch tensors become arrays (without a copy on the CPU), PIL
    images their pixels, nested lists of Python numbers arrays if those hold every number. Of a mapping it is
    the column called `name`, or the only one; of a tuple the only item; `{"bytes": ..., "path": ...}` (an
    undecoded Hugging Face image) is a file's bytes. Raises UnlikeError.
    """
    if isinstance(value, bytes | np.ndarray | np.generic | bool | int | float | bytearray | memoryview):
        return cast("Any", value)
    if isinstance(value, Mapping):
        return _of_mapping(cast("Mapping[Any, Any]", value), element, name)
    if isinstance(value, tuple):
        return _of_tuple(cast("tuple[Any, ...]", value), element, name)
    if value is None:
        raise UnlikeError("None", "a MapDataset of Grain has None where `.filter(..)` takes a record out")
    if isinstance(value, str):
        hints = ("the name of a file? `commplan.paths(names)` reads files",)
        raise UnlikeError("a str", *(hints if isinstance(element, BytesType) else ()))
    if isinstance(value, list):
        return _of_list(cast("list[Any]", value), element)
    if type(value).__module__.partition(".")[0] == "PIL":
        return _of_image(value, element)
    return _of_tensor(value) if hasattr(value, "detach") and hasattr(value, "numpy") else value


def _of_tuple(items: tuple[Any, ...], element: Element, name: str) -> Any:
    if len(items) == 1:
        return plain(items[0], element, name)
    raise UnlikeError(described(items), f"name one: sources={{{name!r}: commplan.column(dataset, 0)}}")


def _of_mapping(value: Mapping[Any, Any], element: Element, name: str) -> Any:
    if isinstance(element, BytesType) and set(value) == {"bytes", "path"}:
        if value["bytes"] is not None:
            return value["bytes"]
        if value["path"] is not None:
            return Path(value["path"]).read_bytes()
        raise UnlikeError("an image with neither bytes nor a path")
    if name in value:
        return plain(value[name], element, name)
    if len(value) == 1:
        return plain(next(iter(value.values())), element, name)
    first = next(iter(value), "name")
    raise UnlikeError(
        described(value), f"name one: sources={{{name!r}: commplan.column(dataset, {first!r})}}"
    )


def _of_image(value: Any, element: Element) -> Any:
    if not hasattr(value, "mode") or not hasattr(value, "tobytes"):
        return value
    if isinstance(element, ArrayType):
        array = np.asarray(value)
        if array.shape != element.shape and value.mode not in ("L", "RGB"):
            actual = f"a PIL image of mode {value.mode}, {value.height} x {value.width}"
            raise UnlikeError(
                actual, "convert it to the mode that the plan's type has: `image.convert('RGB')`"
            )
        return array
    raise UnlikeError(
        f"a decoded PIL image, {value.height} x {value.width}, mode {value.mode}",
        "keep it as a file: `dataset.cast_column(name, datasets.Image(decode=False))`, or give the source an "
        "array type in the plan",
    )


def _of_tensor(value: Any) -> Any:
    value = value.detach()
    if str(getattr(value, "device", "cpu")) != "cpu":
        value = value.cpu()
    if str(value.dtype) == "torch.bfloat16":  # NumPy knows it by ml_dtypes alone: the same bits
        ml_dtypes: Any = importlib.import_module("ml_dtypes")
        return value.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def _of_list(value: list[Any], element: Element) -> Any:
    """Nested lists of Python numbers, exactly: no number is rounded to an integer or wrapped around."""
    if not isinstance(element, ArrayType):
        raise UnlikeError(described(value))
    try:
        array = np.asarray(value)
    except ValueError:
        raise UnlikeError(f"{described(value)}, of uneven lengths") from None
    kind, dtype = array.dtype.kind, element.dtype
    if dtype.is_float and kind in "fiu":
        return array.astype(numpy_dtype(dtype))
    if dtype.numpy_name == "bool" and kind == "b":
        return array
    if not dtype.is_float and dtype.numpy_name != "bool" and kind in "iu":
        info = np.iinfo(dtype.numpy_name)
        if info.min <= int(array.min()) and int(array.max()) <= info.max:
            return array.astype(dtype.numpy_name)
        raise UnlikeError(f"{described(value)}, from {array.min()} to {array.max()}")
    raise UnlikeError(described(value))
