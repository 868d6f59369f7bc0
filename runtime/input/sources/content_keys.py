"""Keys that identify the content of a source and the code of a function across processes and runs.

Members of a feed and the cache of results compare them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from commplan.diagnostics import fail, text_of
from commplan.input.order import folded
from commplan.runtime.input.sources import pipelines


def source_key(name: str, source: object) -> str:
    """The key of source `name`.

    Returns:
        The first 200 characters of its attribute `key`, if that is a str, an int or bytes; else those of the
        fingerprint of a Hugging Face data set; else a digest of the operations of a Grain pipeline; "" if it
        has none of these.

    Raises:
        CommplanError: CP0902 if reading an attribute raises.
    """
    for attribute in ("key", "_fingerprint"):
        try:
            key = getattr(source, attribute, None)
        except Exception as error:  # noqa: BLE001  user code
            fail(
                "CP0902",
                f"the attribute `{attribute}` of source `{name}` cannot be read: {text_of(error)}",
                "expected: a str, an int or bytes that identify the source's content, or no such attribute",
            )
        if isinstance(key, str | int | bytes) and not isinstance(key, bool):
            return str(key)[:200]
    words = pipelines.content(source, source_digest)
    return "" if words is None else _digest(*words)


def source_digest(function: object) -> str:
    """A digest of the source text of `function`, or of its code if there is no source text.

    It includes the numbers, texts, bytes and None among its defaults, its captured values and the arguments
    of a partial. Values of other types, such as arrays, do not change it: their `repr` may be abbreviated or
    contain an address. Of a callable object, it includes the source text of the class. If there is neither
    source text nor code, as for a builtin, it depends only on the name.

    A digest of source text is equal under other versions of Python and of packages, which members of a feed
    may have. The digests of `cache` depend on these, and on everything that the code reads.
    """
    if isinstance(function, functools.partial):
        arguments = [_constant_text(value) for value in function.args]
        keywords = [f"{name}={_constant_text(value)}" for name, value in sorted(function.keywords.items())]
        return _digest(source_digest(function.func), *arguments, *keywords)
    unwrapped = inspect.unwrap(function) if callable(function) else function
    code = getattr(unwrapped, "__code__", None)
    captured = list(_captured_constants(unwrapped))
    subject: Any = function if code is not None or inspect.isbuiltin(function) else type(function)
    try:
        return _digest(inspect.getsource(subject), *captured)
    except (OSError, TypeError):
        pass
    if isinstance(code, CodeType):
        constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
        return _digest(code.co_code.hex(), repr(constants), *captured)
    names = [getattr(subject, attribute, "") for attribute in ("__module__", "__qualname__")]
    return _digest(*(str(name) for name in names))


def _captured_constants(function: object) -> Iterator[str]:
    """The `_constant_text` of each default and captured value of `function`."""
    if not isinstance(function, FunctionType):
        return
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            values.append(cell.cell_contents)
    yield from map(_constant_text, values)


def _constant_text(value: object) -> str:
    """The `repr` of `value` if it is a number, a text, bytes or None, else ""."""
    return repr(value) if isinstance(value, int | float | str | bytes | None) else ""


def _digest(*texts: str) -> str:
    """The digest of several texts, see `digest`."""
    return digest("\0".join(texts).encode())


def digest(data: bytes) -> str:
    """64 bits in hex that depend on every byte of `data`.

    It is not cryptographic. A process that could forge it can write to the shared memory anyway, and loading
    OpenSSL takes more memory than the rest of a feed.
    """
    words = memoryview(data.ljust(-(-len(data) // 8) * 8, b"\0")).cast("Q")
    return f"{folded(len(data), *words):016x}"
