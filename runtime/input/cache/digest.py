"""Digests of functions and sources, equal in all processes for equal code and data.

A digest covers the bytecode of a function, its defaults, its closure, the globals that it reads, and
recursively all functions and classes among these. Installed packages are identified by name and file, not by
content, whether or not they are loaded. A module of the program that a function imports must be loaded. A
function or a source can instead define its identity in an attribute `key`.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import functools
import hashlib
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from commplan.diagnostics import text_of, type_of

# Attributes of a class that do not change what its code computes, or that Python derives from others.
_SKIPPED = frozenset({
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__",
    "__static_attributes__", "__dataclass_fields__", "__dataclass_params__", "_abc_impl",
})  # fmt: skip
_ATOMS = (type(None), bool, int, float, complex, str, type(...), np.dtype)  # hashed by type and `repr`
_STDLIB = str(Path(os.__file__).parent)  # the folder of Python's library
_INSTALLED = ("site-packages", "dist-packages")  # folders of installed packages


class UnknownError(Exception):
    """Raised for a value without a digest. The message names the value and its location."""


def declared_key(value: object) -> str | None:
    """Return the identity that `value` defines, if any.

    Args:
        value: an object that may have an attribute `key`, or the `_fingerprint` of a Hugging Face data set.

    Returns:
        The name and value of the first of these attributes that is a str, an int or bytes; None if there is
        none.

    Raises:
        UnknownError: if the attribute cannot be read.
    """
    for attribute in ("key", "_fingerprint"):
        try:
            key = getattr(value, attribute, None)
        except Exception as error:  # noqa: BLE001  the user's code
            raise UnknownError(f"its attribute `{attribute}` cannot be read: {text_of(error)}") from None
        if isinstance(key, str | int | bytes) and not isinstance(key, bool):
            return f"{attribute}={key!r}"
    return None


def digest(*values: object) -> str:
    """Return the digest of `values`: 128 bits in hexadecimal notation.

    Raises:
        UnknownError: if a value has no digest.
    """
    return _Digest().of(values)


def function_digest(function: Callable[..., Any]) -> str:
    """Return the digest of `function`, or of its `key` if it has one.

    Raises:
        UnknownError: if a value in the function has no digest.
    """
    key = declared_key(function)
    return digest(function if key is None else key)


class _Digest:
    """Hashes values one after another. A repeated value is hashed as the index of its first occurrence."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._index_of: dict[tuple[object, ...], int] = {}  # by id, and for modules also by the attributes
        self._alive: list[object] = []  # keeps ids unique

    def of(self, values: tuple[object, ...]) -> str:
        """The digest of `values`, as `digest`. May be called once."""
        try:
            for number, value in enumerate(values):
                self._add(value, f"value {number}" if number else "it")
        except RecursionError:
            raise UnknownError("it is nested too deep") from None
        return self._hash.hexdigest()

    def _words(self, *words: object) -> None:
        """Hash the texts of `words`, each with its length: different sequences differ in the hashed bytes."""
        for word in words:
            data = str(word).encode(errors="surrogatepass")
            self._hash.update(f"{len(data)}:".encode())
            self._hash.update(data)

    def _bytes(self, data: Any) -> None:
        """Hash a buffer of bytes with its length."""
        self._words("bytes", len(data))
        self._hash.update(data)

    def _add(self, value: Any, where: str, names: Collection[str] = ()) -> None:
        """Hash a value.

        Args:
            value: the value.
            where: the location of the value, for messages.
            names: the attributes that the enclosing code reads. Only these are hashed for modules.
        """
        if isinstance(value, _ATOMS):
            self._words(type(cast("object", value)).__name__, repr(cast("object", value)))
            return
        if isinstance(value, bytes | bytearray):
            self._bytes(value)
            return
        is_module = isinstance(value, types.ModuleType)
        identity = (id(value), *sorted(names)) if is_module else (id(value),)
        if identity in self._index_of:
            self._words("again", self._index_of[identity])
            return
        self._index_of[identity] = len(self._alive)
        self._alive.append(value)
        if is_module:
            self._add_module(value, where, names)
        elif isinstance(value, type):
            self._add_class(cast("type[object]", value), where)
        elif not self._add_callable(value, where) and not self._add_data(value, where):
            self._add_instance(value, where)

    def _add_callable(self, value: Any, where: str) -> bool:
        """Hash a function or another callable; returns whether `value` is one."""
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(value, types.FunctionType):
            self._add_function(value, where)
        elif isinstance(value, types.CodeType):
            self._add_code(value, where)
        elif isinstance(value, types.MethodType):
            self._words("method")
            self._add(value.__func__, where)
            self._add(value.__self__, f"the object of {where}")
        elif isinstance(value, functools.partial):
            partial = cast("functools.partial[Any]", value)
            self._words("partial")
            self._add((partial.func, partial.args, partial.keywords), where)
        elif isinstance(value, staticmethod | classmethod):
            self._words(type(cast("object", value)).__name__)
            self._add(cast("Any", value).__func__, where)
        elif isinstance(value, property):
            self._words("property")
            self._add((value.fget, value.fset), where)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | np.ufunc):
            owner = getattr(value, "__self__", None)
            self._words(
                "builtin", getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value))
            )
            if owner is not None and not isinstance(owner, types.ModuleType):
                self._add(owner, f"the object of {where}")
        elif callable(wrapped) and _is_installed(type(value).__module__):  # such as that of `lru_cache`
            self._words("wrapper", type(value).__qualname__)
            self._add(wrapped, where)
        else:
            return False
        return True

    def _add_function(self, function: types.FunctionType, where: str) -> None:
        """Hash the code of a function and the values that it uses.

        A function of an installed package is hashed as its name and the version of the package.
        """
        module = function.__module__ or ""
        if _is_installed(module):
            self._words("installed", module, function.__qualname__, _stamp(module))
            return
        self._words("function")
        self._add_code(function.__code__, where)
        self._add((function.__defaults__, function.__kwdefaults__), f"a default of {where}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._words("cell", name)
            with contextlib.suppress(ValueError):  # not set yet
                self._add(cell.cell_contents, f"`{name}` of {where}")
        uses = _Uses(function.__code__)  # sorted below, because the order of sets differs between processes
        for name in sorted(uses.names):
            if name in function.__globals__:
                self._words("global", name)
                self._add(function.__globals__[name], f"`{name}` of {where}", uses.attributes)
        for level, name, members in sorted(uses.imports):
            self._words("import", level, name)
            try:
                module = importlib.util.resolve_name("." * level + name, _package_of(function))
            except ImportError:  # a relative import outside a package
                continue
            self._add_import(module, members, where, uses.attributes)

    def _add_import(
        self, name: str, members: tuple[str, ...], where: str, attributes: Collection[str]
    ) -> None:
        """Hash a module that a function imports. For an installed one, hash its name and file only.

        Args:
            name: the absolute name of the module.
            members: the names of `from module import name`; empty for `import module`.
            where: the location of the import, for messages.
            attributes: the attributes that the function reads.

        Raises:
            UnknownError: if a module of the program is not loaded.
        """
        if _is_installed(name):
            self._words("installed", name, _stamp(name))
            return
        module = _loaded(name, where)
        for member in members:
            if module is not None and member not in vars(module):
                _ = _loaded(f"{name}.{member}", where)  # it may be a module of the package
        if module is not None and not members:  # `import a.b` defines `a`
            module = sys.modules[name.partition(".")[0]]
        self._add(module, f"`{name}` of {where}", attributes)

    def _add_code(self, code: types.CodeType, where: str) -> None:
        """Hash the instructions, names and constants of a code object, without its line numbers."""
        self._words("code", code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        for names in (code.co_names, code.co_varnames):
            self._words(len(names), *names)
        self._bytes(code.co_code)
        self._bytes(code.co_exceptiontable)
        self._words(len(code.co_consts))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(constant, where)
            else:
                self._add(constant, f"a constant of {where}")

    def _add_module(self, module: types.ModuleType, where: str, names: Collection[str]) -> None:
        """Hash the attributes `names` of a module of the program, or the version of an installed module."""
        self._words("module", module.__name__)
        if _is_installed(module.__name__):
            self._words(_stamp(module.__name__))
            return
        for name in sorted(names):
            if name in vars(module):
                self._words(name)
                self._add(vars(module)[name], f"`{name}` of {where}", names)

    def _add_class(self, kind: type[object], where: str) -> None:
        """Hash the bases and attributes of a class of the program, or the version of an installed class."""
        module = kind.__module__
        if _is_installed(module):
            self._words("class", module, kind.__qualname__, _stamp(module))
            return
        self._words("class", kind.__name__)
        self._add(kind.__bases__, where)
        for name, value in sorted(vars(kind).items()):
            is_slot = isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
            if name not in _SKIPPED and not is_slot:
                self._words(name)
                self._add(value, f"`{name}` of {where}")

    def _add_data(self, value: Any, where: str) -> bool:
        """Hash a container or an array; returns whether `value` is one."""
        kind = cast("type[object]", type(value))
        if kind in (tuple, list):
            self._words(kind.__name__, len(value))
            for item in value:
                self._add(item, where)
        elif kind is dict:
            self._words("dict", len(value))
            for key, item in value.items():
                self._add(key, where)
                self._add(item, f"`{key}` of {where}")
        elif kind in (set, frozenset):
            self._words(kind.__name__, *sorted(digest(item) for item in value))
        elif kind is np.memmap and value.filename is not None:  # a copy in memory has no name
            self._words("memmap", value.filename, value.offset, _file_stamp(str(value.filename)))
            start = np.frombuffer(value._mmap, np.uint8).__array_interface__["data"][0]
            # A slice has the name and offset of the whole file.
            self._words(value.__array_interface__["data"][0] - start, value.dtype, value.shape, value.strides)
        elif _is_plain_array(value):
            array: Any = np.ascontiguousarray(value)
            self._words("array", kind.__name__, repr(array.dtype), value.shape)
            self._bytes(array.reshape(-1).view(np.uint8))
            if isinstance(value, np.ndarray) and kind is not np.ndarray:
                self._add(kind, f"the class of {where}")
                self._add({name: item for name, item in vars(value).items() if name != "_mmap"}, where)
        else:
            return False
        return True

    def _add_instance(self, value: object, where: str) -> None:
        """Hash the pickled state of `value` and the code of its class."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:  # noqa: BLE001  the class may raise any error
            raise UnknownError(f"{where} is {type_of(value)}: {error}") from None
        self._words("instance")
        self._add(type(value), f"the class of {where}")
        if isinstance(reduced, str):
            self._words(reduced)
            return
        for part in reduced:
            self._add(list(cast("Iterator[Any]", part)) if isinstance(part, Iterator) else part, where)


class _Uses:
    """The names that a code object and its nested code objects use.

    Args:
        code: the code object.

    Attributes:
        names: the names of globals.
        attributes: the names of attributes of any object, including those in `from module import name`.
        imports: the level, module and names of each import, as in `from ..module import name`.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.names, self.attributes = set[str](), set[str]()
        self.imports = set[tuple[int, str, tuple[str, ...]]]()
        pending = [code]
        while pending:
            inner = pending.pop()
            pending += [constant for constant in inner.co_consts if isinstance(constant, types.CodeType)]
            loads: list[Any] = []  # the arguments of the instructions so far
            for instruction in dis.get_instructions(inner):
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    self.names.add(instruction.argval)
                elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                    self.attributes.add(instruction.argval)
                elif instruction.opname == "IMPORT_NAME":
                    level, members = loads[-2:]
                    self.imports.add((level, instruction.argval, members or ()))
                if instruction.opname != "EXTENDED_ARG":
                    loads.append(instruction.argval)


def _is_plain_array(value: object) -> bool:
    """Whether `value` is an array or a scalar of numpy whose whole state is its bytes and its `__dict__`.

    An array with a mask has more, and defines how it is pickled. Elements that are objects have no bytes.
    """
    if isinstance(value, np.generic):
        return not cast("Any", value).dtype.hasobject
    kind = cast("Any", type(value))
    return (
        isinstance(value, np.ndarray)
        and not cast("Any", value).dtype.hasobject
        and kind.__reduce__ is np.ndarray.__reduce__
        and kind.__reduce_ex__ is np.ndarray.__reduce_ex__
    )


def _package_of(function: types.FunctionType) -> str:
    """The package from which the relative imports of a function start; "" if there is none."""
    package = function.__globals__.get("__package__")
    return str(function.__globals__.get("__name__", "")).rpartition(".")[0] if package is None else package


def _loaded(name: str, where: str) -> types.ModuleType | None:
    """Return a module of the program, which an import of `name` loads.

    Args:
        name: the absolute name of the module.
        where: the location of the import, for messages.

    Returns:
        The module; None if there is no such module.

    Raises:
        UnknownError: if it is not loaded. Its functions and data are not known before.
    """
    for module in itertools.accumulate(name.split("."), "{}.{}".format):
        if module not in sys.modules:
            with contextlib.suppress(ImportError, ValueError, AttributeError):
                if importlib.util.find_spec(module) is not None:
                    raise UnknownError(f"{where} imports `{module}`, which the program has not imported yet")
            return None
    return sys.modules[name]


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module belongs to Python, to an installed package or to commplan, not to the program."""
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "commplan":
        return True
    origin = _origin(top)
    return any(part in Path(origin).parts for part in _INSTALLED) or origin.startswith(_STDLIB)


@functools.cache
def _stamp(module: str) -> str:
    """The version of an installed module: that of Python, or the size and time of its top module's file."""
    top = module.partition(".")[0]
    return sys.version if top in sys.stdlib_module_names else _file_stamp(_origin(top))


def _origin(top: str) -> str:
    """The file of a top-level module, or the folder of a package without one; "" if there is none."""
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        module = sys.modules.get(top)
        spec = importlib.util.find_spec(top) if module is None else module.__spec__
        if spec is None:
            return getattr(module, "__file__", None) or ""
        return spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return ""


def _file_stamp(path: str) -> str:
    """The size in bytes and the modification time in nanoseconds of a file; "" if it cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116  any path-like
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"
