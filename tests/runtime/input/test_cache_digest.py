"""The digest of a function or source: code, and all data that the code reads."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
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


class Scaled:
    """A decorator with a state."""

    def __init__(self, function: Function, factor: int) -> None:
        functools.update_wrapper(self, function)
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return self.factor * adder(1)(x)


class Shifted(Scaled):
    def __call__(self, x: Any) -> Any:
        return self.factor + adder(1)(x)


def minus(names: str) -> Function:
    """Subtracts its second parameter from the first."""
    first, second = re.findall(r"\w", names)
    return made(f"def decode({names}): return {first} - {second}")


def guarded(length: int) -> Function:
    """A function that handles errors of its first `length` instructions, which its bytecode does not show."""
    code = remembered.__wrapped__.__code__
    return types.FunctionType(code.replace(co_exceptiontable=bytes((0x80, length, 0, 0))), {})


ONE, TWO = np.ones(3), np.full(3, 2.0)
DIFFERENT: list[Any] = [
    adder(1), adder(2), Model(ONE), Model(TWO), Model(ONE).apply, Model(TWO).apply, remembered,
    functools.partial(np.add, 1), functools.partial(np.add, 2), functools.partial(np.subtract, 2),
    functools.partial(adder(1), 1), np.add, np.sin, len, str.upper, bytes.upper, "abc".join, "abd".join,
    functools.partial(re.sub, re.compile("a"), ""), functools.partial(re.sub, re.compile("b"), ""),
    Model, int, functools.partial(int, base=2), lambda: {1, 2}, lambda: {1, 3}, lambda: b"1", lambda: "1",
    Scaled(remembered, 2), Scaled(remembered, 3), Scaled(adder(1), 2), Shifted(remembered, 2),
    minus("*, a, b"), minus("*, b, a"), minus("a, b"), minus("b, a"), minus("a, /, b"), minus("a, b, /"),
    guarded(2), guarded(3),
]  # fmt: skip


def test_different_functions_differ() -> None:
    digests = [function_digest(function) for function in DIFFERENT]
    assert len(set(digests)) == len(digests)
    assert digests == [function_digest(function) for function in DIFFERENT]


class Image(np.ndarray[Any, Any]):
    unit = 1


def image(unit: int) -> Any:
    """An array with an attribute that changes what its readers compute."""
    array = np.arange(2).view(Image)
    array.unit = unit
    return array


def test_data_of_sources() -> None:
    different = [[1, 2], (1, 2), [1, 3], [[1], 2], [[1, 2]], np.arange(2), np.arange(2.0), np.arange(2)[None],
                 [b"12"], ["12"], {1: 2}, {1: 3}, {1, 2}, frozenset((1, 2)), np.array([1, "a"], object),
                 [True, 2], [1.0, 2], Path("a"), Path("b"), np.ma.array([0, 1], mask=[False, True]),
                 np.ma.array([0, 1], mask=[True, False]), np.ma.array([0, 1]), image(1), image(2),
                 np.zeros(1, "i4, f4"), np.zeros(1, "f4, i4"), np.zeros((), "i4, f4")[()]]  # fmt: skip
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


def test_a_part_of_a_file_is_not_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100).reshape(10, 10))
    digests: list[list[str]] = []
    for _ in range(2):
        mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
        different = [mapped, mapped.T, mapped[:5], mapped[5:], mapped[::2], mapped.view("f8"),
                     mapped.copy(), mapped + 1, mapped + 2]  # fmt: skip
        digests.append([digest(array) for array in different])
    assert digests[0] == digests[1] and len(set(digests[0])) == len(digests[0])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the program, with a module `tools`."""
    folder = tmp_path / "lazy_program"
    folder.mkdir()
    (folder / "__init__.py").write_text("def scale(x): return x + 1")
    (folder / "tools.py").write_text("def crop(x): return x + 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "file"),
    [
        ("from .tools import crop; return crop(x)", "tools.py"),
        ("from . import tools; return tools.crop(x)", "tools.py"),
        ("import lazy_program.tools as tools; return tools.crop(x)", "tools.py"),
        ("import lazy_program.tools; return lazy_program.scale(x)", "__init__.py"),
        ("from lazy_program import scale; return scale(x)", "__init__.py"),
    ],
)
def test_modules_that_a_function_imports(package: Path, code: str, file: str) -> None:
    def loaded() -> str:
        for name in ("lazy_program.tools", "lazy_program"):
            sys.modules.pop(name, None)
        importlib.import_module("lazy_program.tools")
        return function_digest(decode)

    decode = made(f"__package__ = 'lazy_program'\ndef decode(x): {code}")
    with pytest.raises(UnknownError, match=r"it imports `lazy_program(\.tools)?`, which the program has not"):
        function_digest(decode)
    first = loaded()
    assert first == loaded()
    (package / file).write_text((package / file).read_text().replace("x + 1", "x +  2"))  # another size
    assert first != loaded()


def test_a_module_of_a_package_must_be_loaded(package: Path) -> None:
    importlib.import_module(package.name)
    decode = made("__package__ = 'lazy_program'\ndef decode(x): from . import tools; return tools.crop(x)")
    with pytest.raises(UnknownError, match=r"it imports `lazy_program\.tools`"):
        function_digest(decode)


def test_modules_that_have_each_other() -> None:
    first, second = types.ModuleType("first_of_two"), types.ModuleType("second_of_two")
    vars(first).update(other=second, size=1)
    vars(second).update(other=first)
    decode = made("first = None\ndef decode(x): return first.other.other.size")
    decode.__globals__["first"] = first
    before = function_digest(decode)
    vars(first).update(size=2)
    assert before != function_digest(decode)


@pytest.mark.parametrize("imported", ["import colorsys", "from colorsys import hls_to_rgb", "import no_such"])
def test_imports_of_installed_modules_need_not_be_loaded(
    imported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = made(f"def decode(x): {imported}; return x")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    first = function_digest(decode)
    importlib.import_module("colorsys")
    assert first == function_digest(decode)


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
