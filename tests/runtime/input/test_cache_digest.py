"""The digest of a function or source: code, and all data that the code reads."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commplan.runtime.input.cache.digest import UnknownError, digest, function_digest

Function = Callable[..., Any]


def made(text: str, name: str = "decode") -> Any:
    """`name` of a program's module with `text`."""
    module = types.ModuleType("a_program_of_a_user")
    exec(text, vars(module))
    return vars(module)[name]


BASE = """
import numpy as np
SCALE = 2
TABLE = {"a": np.arange(3), "b": [1, (2.0, "x")]}
LOG = __import__("logging").getLogger("mine")
def helper(x):
    return x + 1
class Crop:
    size = 4
    def __init__(self, at): self.at = at
    def run(self, x): return x[self.at:self.at + self.size]
def outer(limit):
    def inner(x): return min(x, limit)
    return inner
clip = outer(9)
CROP = Crop(3)
def decode(raw, *, mode="L"):
    LOG.debug("%s", raw)
    part = [helper(each) for each in CROP.run(raw)]
    return clip(np.asarray(part).sum() * SCALE + TABLE["a"][1])
"""


def test_equal_code_has_equal_digests_wherever_it_is() -> None:
    first = function_digest(made(BASE))
    assert first == function_digest(made("\n\n# moved\n" + BASE))
    code = "from test_cache_digest import *; print(function_digest(made(BASE)))"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout.strip() == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 2", "SCALE = 3"), ("arange(3)", "arange(4)"), ('"x"', '"y"'), ("x + 1", "x + 2"),
        ("size = 4", "size = 5"), ("self.at + self", "self.at - self"), ("outer(9)", "outer(8)"),
        ("Crop(3)", "Crop(2)"), ('mode="L"', 'mode="R"'), ("min(", "max("), ("np.asarray", "np.array"),
        ('.sum()', ".mean()"),
    ],
)  # fmt: skip
def test_what_the_code_reads_is_part_of_it(old: str, new: str) -> None:
    assert BASE.count(old) == 1
    assert function_digest(made(BASE)) != function_digest(made(BASE.replace(old, new)))


def test_globals_that_it_does_not_read_are_not() -> None:
    assert function_digest(made(BASE)) == function_digest(
        made(BASE + "\nOTHER = __import__('threading').Lock()")
    )


def adder(number: int) -> Function:
    return lambda x: x + number


class Model:
    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def __call__(self, x: Any) -> Any:
        return x @ self.weights

    def apply(self, x: Any) -> Any:
        return x @ self.weights + 1


@functools.lru_cache
def remembered(x: int) -> int:
    return x + 1


ONE, TWO = np.ones(3), np.full(3, 2.0)
DIFFERENT: list[Any] = [
    adder(1), adder(2), Model(ONE), Model(TWO), Model(ONE).apply, Model(TWO).apply, remembered,
    functools.partial(np.add, 1), functools.partial(np.add, 2), functools.partial(np.subtract, 2),
    functools.partial(adder(1), 1), np.add, np.sin, len, str.upper, bytes.upper, "abc".join, "abd".join,
    functools.partial(re.sub, re.compile("a"), ""), functools.partial(re.sub, re.compile("b"), ""),
    Model, int, functools.partial(int, base=2), lambda: {1, 2}, lambda: {1, 3}, lambda: b"1", lambda: "1",
]  # fmt: skip


def test_different_functions_differ() -> None:
    digests = [function_digest(function) for function in DIFFERENT]
    assert len(set(digests)) == len(digests)
    assert digests == [function_digest(function) for function in DIFFERENT]


def test_data_of_sources() -> None:
    different = [[1, 2], (1, 2), [1, 3], [[1], 2], [[1, 2]], np.arange(2), np.arange(2.0), np.arange(2)[None],
                 [b"12"], ["12"], {1: 2}, {1: 3}, {1, 2}, frozenset((1, 2)), np.array([1, "a"], object),
                 [True, 2], [1.0, 2], Path("a"), Path("b")]  # fmt: skip
    digests = [digest(value) for value in different]
    assert len(set(digests)) == len(digests)
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    assert digest(cyclic) != digest([1])


def test_files_count_by_size_and_time(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(9))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    first = digest(mapped)
    assert first == digest(np.load(tmp_path / "a.npy", mmap_mode="r"))
    np.save(tmp_path / "a.npy", np.arange(19)[::2])
    assert first != digest(np.load(tmp_path / "a.npy", mmap_mode="r"))


def test_a_key_is_all_that_counts() -> None:
    first, second = Model(ONE), Model(threading.Lock())
    first.key = second.key = "model 7"  # pyright: ignore[reportAttributeAccessIssue]
    assert function_digest(first) == function_digest(second)
    second.key = "model 8"  # pyright: ignore[reportAttributeAccessIssue]
    assert function_digest(first) != function_digest(second)


def test_what_has_no_digest_is_named() -> None:
    with pytest.raises(UnknownError, match="`weights` of it is a lock"):
        function_digest(Model(threading.Lock()))

    class Odd:
        @property
        def key(self) -> str:
            raise OSError("gone")

    with pytest.raises(UnknownError, match="`key` cannot be read: OSError: gone"):
        function_digest(Odd())  # pyright: ignore[reportArgumentType]
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnknownError, match="nested too deep"):
        digest(deep)
