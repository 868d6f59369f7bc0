"""Conversion of records of other libraries' data sets to NumPy and Python values, and checks of their types.

`convert_record` is for records of sources, `check_record` also for results of host functions. Nothing here
imports those libraries: attributes of a record determine its kind.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from commplan import io
from commplan.diagnostics import import_optional, type_of
from commplan.ir.types import ArrayType, BytesType, DType, Element

_FOREIGN = "big" if sys.byteorder == "little" else "little"  # the byte order that is not that of this machine

# Hints in errors.
TEXT_HINT = (
    "a list of str is taken for paths of files: text is given as bytes, `[text.encode() for text in texts]`"
)
_SHAPE_HINT = (
    "every record has the shape that the plan writes: pad or cut it, or load `bytes` and let a host function"
    " pad them and return the length as well"
)
_FILTER_HINT = (
    "a MapDataset of Grain has None where `.filter(..)` takes a record out: filter before the pipeline"
)


class RecordTypeError(Exception):
    """A record that does not have the type in the plan.

    Attributes:
        hints: how to fix it, in order; may be empty.

    Args:
        actual: a description of the record.
    """

    def __init__(self, actual: str, *hints: str) -> None:
        super().__init__(actual)
        self.hints = hints


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype of `dtype`. NumPy supports bf16 once ml_dtypes (a part of JAX) is imported.

    Raises:
        CommplanError: CP0918 if ml_dtypes is not installed.
    """
    try:
        return np.dtype(dtype.numpy_name)
    except TypeError:
        return np.dtype(import_optional("ml_dtypes", "CP0918", "records of type bf16", "ml_dtypes").bfloat16)


def describe(value: object) -> str:
    """A description of a record, for errors."""
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, cast("Mapping[object, object]", value)))
        return f"a record with columns {keys}"
    if isinstance(value, tuple | list):
        items = cast("Sequence[object]", value)
        kinds = ", ".join(type(item).__name__ for item in items[:4])
        return f"{type_of(items)} of {len(items)}: {kinds}{', ...' if len(items) > 4 else ''}"
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str | bytes):
        array = cast("np.ndarray[Any, Any]", value)
        name = str(DType.from_name(array.dtype.name) or array.dtype.name)
        order = "" if array.dtype.isnative else f", {_FOREIGN}-endian"
        return f"{name}[{', '.join(map(str, array.shape))}]{order}" if array.shape else f"{name}{order}"
    return "a str" if isinstance(value, str) else type_of(value)


def check_record(value: object, element: Element, dtype: np.dtype[Any] | None) -> Any:
    """Check that `value` is a record of `element`; returns it as bytes, an array or a scalar.

    Arrays must have the declared shape and dtype, in any byte order. A Python number is accepted for a scalar
    type that can hold it.

    Args:
        value: the record.
        element: its type in the plan.
        dtype: the NumPy dtype of `element`; None for bytes.

    Raises:
        RecordTypeError: If the record has another type.
    """
    if isinstance(element, BytesType):
        if isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):  # memory that the next call may overwrite
            return bytes(cast("bytearray | memoryview[int]", value))
        raise RecordTypeError(describe(value), *_bytes_hints(value))
    if not isinstance(element, ArrayType) or dtype is None:
        raise RecordTypeError("a tree")
    if type(value) in (int, float, bool) and not element.shape:
        return _convert_scalar(cast("int | float | bool", value), element, dtype)
    if isinstance(value, str | bytes) or not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise RecordTypeError(describe(value), *_array_hints(value, element))
    array = np.asarray(value)
    if not array.dtype.isnative and array.dtype.newbyteorder("=") == dtype:
        array = array.astype(dtype)  # only the byte order changes
    if array.shape != element.shape or array.dtype != dtype:
        raise RecordTypeError(describe(array), *_array_hints(array, element))
    return array


def _convert_scalar(value: float, element: ArrayType, dtype: np.dtype[Any]) -> Any:
    """A Python number (a bool, int or float) as a NumPy scalar. Raises RecordTypeError if it does not fit."""
    if element.dtype is DType.BOOL:
        fits = isinstance(value, bool)
    elif element.dtype.is_float:
        fits = not isinstance(value, bool)
    else:
        info = np.iinfo(dtype)
        fits = type(value) is int and info.min <= value <= info.max
    if not fits:
        raise RecordTypeError(
            f"{value!r} of type {type(value).__name__}", *_number_hints(np.asarray(value), element)
        )
    return dtype.type(value)


def _bytes_hints(value: object) -> tuple[str, ...]:
    """Hints to convert `value` to bytes, or to declare another type in the plan."""
    if isinstance(value, str):
        return ("text is given as bytes: `text.encode()`; names of files: `commplan.paths(names)`",)
    if isinstance(value, np.ndarray | np.generic):
        array = cast("np.ndarray[Any, Any]", value)
        name = DType.from_name(array.dtype.name)
        shaped = f"{name}[{', '.join(map(str, array.shape))}]" if array.shape else f"{name}"
        other = f"; if all records have one shape, write `{shaped}` in the plan" if name else ""
        return (f"bytes of an array: `record.tobytes()`{other}",)
    return ()


def _array_hints(value: object, element: ArrayType) -> tuple[str, ...]:
    """Hints to convert an array of another type or shape to a record of `element`."""
    if isinstance(value, bytes):
        return (f"`np.frombuffer(record, np.{element.dtype.numpy_name})` makes an array of bytes",)
    if not isinstance(value, np.ndarray):
        return ()
    array = cast("np.ndarray[Any, Any]", value)
    hints: list[str] = []
    if array.shape != element.shape:
        hints.append(_SHAPE_HINT)
    if array.dtype.newbyteorder("=").name != element.dtype.numpy_name:
        hints += _number_hints(array, element)
    return tuple(hints)


def _number_hints(array: np.ndarray[Any, Any], element: ArrayType) -> list[str]:
    """Hints to convert numbers of another type to that of `element`."""
    kind, dtype, name = array.dtype.kind, element.dtype, element.dtype.numpy_name
    if kind in "iu" and not dtype.is_float and name != "bool" and array.size:
        info = np.iinfo(name)
        low = int(array.min())
        high = int(array.max())
        if not info.min <= low <= high <= info.max:
            return [f"{dtype} holds {info.min} to {info.max}: write a larger type in the plan, such as i64"]
    if kind == "f" and not dtype.is_float:
        return [f"floats are not cut to {dtype}: round and convert them, or write a float type in the plan"]
    actual = DType.from_name(array.dtype.name)
    other = f", or write `{actual}` in the plan" if actual else ""
    return [f"numbers are not converted: `.astype('{name}')`{other}"]


def convert_record(value: Any, element: Element, name: str) -> Any:
    """Convert a record of source `name` to a NumPy or Python value: an array, a scalar or bytes.

    - NumPy and Python values stay as they are.
    - Torch tensors become arrays (without a copy on the CPU). PIL images become arrays of their pixels.
    - Nested lists of Python numbers become arrays of `element` if that can hold every number.
    - Of a mapping, the column called `name` is used, or the only one; of a tuple, the only item.
    - `{"bytes": ..., "path": ...}` (an undecoded Hugging Face image) is the bytes of a file, for bytes.
    - Any other object is returned as it is: `check_record` accepts or refuses it.

    Args:
        value: the record.
        element: its type in the plan.
        name: the name of the source.

    Raises:
        RecordTypeError: If it cannot be converted.
        OSError: If the file of an undecoded image cannot be read.
    """
    if isinstance(value, str):
        raise RecordTypeError("a str", *(_bytes_hints(value) if isinstance(element, BytesType) else ()))
    if isinstance(value, bytes | np.ndarray | np.generic | bool | int | float | bytearray | memoryview):
        return cast("Any", value)
    if isinstance(value, Mapping):
        return _convert_mapping(cast("Mapping[Any, Any]", value), element, name)
    if isinstance(value, tuple):
        return _convert_tuple(cast("tuple[Any, ...]", value), element, name)
    if value is None:
        raise RecordTypeError("None", "leave it out of the source", _FILTER_HINT)
    if isinstance(value, list):
        return _convert_list(cast("list[Any]", value), element)
    if type(value).__module__.partition(".")[0] == "PIL":
        return _convert_image(value, element)
    return _convert_tensor(value) if hasattr(value, "detach") and hasattr(value, "numpy") else value


def _convert_tuple(items: tuple[Any, ...], element: Element, name: str) -> Any:
    """Convert the only item of a tuple. Raises RecordTypeError if there are others."""
    if len(items) == 1:
        return convert_record(items[0], element, name)
    raise RecordTypeError(describe(items), f"name one: sources={{{name!r}: commplan.column(dataset, 0)}}")


def _convert_mapping(value: Mapping[Any, Any], element: Element, name: str) -> Any:
    """Convert an undecoded image, the column `name` or the only column. Raises RecordTypeError, OSError."""
    if isinstance(element, BytesType) and set(value) == {"bytes", "path"}:
        if value["bytes"] is not None:
            return value["bytes"]
        if value["path"] is not None:
            return io.read(value["path"], io.SCHEDULE)
        raise RecordTypeError("an image with neither bytes nor a path")
    if name in value:
        return convert_record(value[name], element, name)
    if len(value) == 1:
        return convert_record(next(iter(value.values())), element, name)
    first = next(iter(value), "name")
    raise RecordTypeError(
        describe(value), f"name one: sources={{{name!r}: commplan.column(dataset, {first!r})}}"
    )


def _convert_image(value: Any, element: Element) -> Any:
    """The pixels of a PIL image. Raises RecordTypeError if `element` is bytes, or for an unusual mode.

    Other objects of PIL are returned as they are.
    """
    if not hasattr(value, "mode") or not hasattr(value, "tobytes"):
        return value
    if isinstance(element, ArrayType):
        array = np.asarray(value)
        if array.shape != element.shape and value.mode not in ("L", "RGB"):
            actual = f"a PIL image of mode {value.mode}, {value.height} x {value.width}"
            raise RecordTypeError(
                actual, "convert it to the mode that the plan's type has: `image.convert('RGB')`"
            )
        return array
    raise RecordTypeError(
        f"a decoded PIL image, {value.height} x {value.width}, mode {value.mode}",
        "keep it as a file: `dataset.cast_column(name, datasets.Image(decode=False))`, or give the source an "
        "array type in the plan",
    )


def _convert_tensor(value: Any) -> Any:
    """The array of a Torch tensor."""
    value = value.detach()
    if str(getattr(value, "device", "cpu")) != "cpu":
        value = value.cpu()
    if str(value.dtype) == "torch.bfloat16":  # NumPy has no bf16 without ml_dtypes: reinterpret the bits
        ml_dtypes: Any = importlib.import_module("ml_dtypes")
        return value.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def _convert_list(value: list[Any], element: Element) -> Any:
    """Convert nested lists of Python numbers to an array. No number is rounded to an integer, or wraps.

    Raises:
        RecordTypeError: If `element` is bytes or cannot hold the numbers, or if lists have uneven lengths.
    """
    if not isinstance(element, ArrayType):
        raise RecordTypeError(describe(value), "bytes of a list: `np.array(record, dtype).tobytes()`")
    try:
        array = np.asarray(value)
    except ValueError:
        raise RecordTypeError(f"{describe(value)}, of uneven lengths", _SHAPE_HINT) from None
    kind, dtype = array.dtype.kind, element.dtype
    if dtype.is_float and kind in "fiu":
        return array.astype(numpy_dtype(dtype))
    if dtype.numpy_name == "bool" and kind == "b":
        return array
    if not dtype.is_float and dtype.numpy_name != "bool" and kind in "iu":
        info = np.iinfo(dtype.numpy_name)
        if info.min <= int(array.min()) and int(array.max()) <= info.max:
            return array.astype(dtype.numpy_name)
        actual = f"{describe(value)}, from {array.min()} to {array.max()}"
        raise RecordTypeError(actual, *_number_hints(array, element))
    raise RecordTypeError(describe(value), *(_number_hints(array, element) if kind in "biufc" else ()))
