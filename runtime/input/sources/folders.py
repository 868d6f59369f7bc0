"""Files and folders as sources of type `bytes`, and the class numbers of their sub-folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from commplan import io
from commplan.diagnostics import Diagnostic, Note, did_you_mean, fail, listed
from commplan.tracebacks import ends_at_caller


class Files:
    """The bytes of files, one record per file, in order. See `paths`.

    Attributes:
        paths: the paths of the files.

    Raises:
        OSError: from `__getitem__`, if a file cannot be read.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        self.paths = tuple(os.fspath(path) for path in paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        # Not `io.read`, which makes one more system call to find the end. Reading may take most of an epoch.
        descriptor = io.open_file(self.paths[index])
        try:
            pieces: list[bytes] = []
            size = os.fstat(descriptor).st_size
            while piece := os.read(descriptor, max(1, size)):
                pieces.append(piece)
                size -= len(piece)
                if size <= 0:
                    break
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"Files({len(self)} files)"


@ends_at_caller
def paths(files: Iterable[str | os.PathLike[str]]) -> Files:
    """A source of type `bytes`: the contents of `files`, in order.

    Args:
        files: the paths of the files, which are opened when their records are read.

    Returns:
        The source.

    Raises:
        CommplanError: CP0901 for a path instead of a list of paths.
    """
    if isinstance(files, str | bytes | os.PathLike):
        fail(
            "CP0901",
            f"expected a list of paths, found the path {files!r}",
            f"write `commplan.paths([{files!r}])`",
        )
    return Files(files)


class ClassNumbers(np.ndarray[Any, Any]):
    """The class number of each file, i32 [files].

    Attributes:
        classes: the names of the classes, in the order of their numbers. Views and slices have it, too.
    """

    classes: tuple[str, ...] = ()

    def __array_finalize__(self, base: object) -> None:
        self.classes = getattr(base, "classes", ())


class Folder(Files):
    """The files of a folder and its sub-folders. The first sub-folder in the path of a file is its class.

    `folder` makes it.

    Attributes:
        classes: the names of the classes, in the order of their numbers; empty without sub-folders.

    Args:
        root: the folder.
        names: the paths of the files inside of it.
        classes: see above.
    """

    def __init__(self, root: str, names: Sequence[str], classes: Sequence[str]) -> None:
        super().__init__(os.path.join(root, name) for name in names)  # noqa: PTH118  text, as it was given
        # The class of each file; empty for a file outside of all sub-folders.
        self._tops = tuple(name.partition(os.sep)[0] if os.sep in name else "" for name in names)
        self.classes = tuple(classes)

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """i32 [files]: the index of each file's sub-folder in `classes`, a source of type `i32`.

        Sources of one program must agree in their classes (CP0956).

        Raises:
            CommplanError: CP0901 for a file outside of all sub-folders.
        """
        numbers = {name: number for number, name in enumerate(self.classes)}
        loose = next((path for path, top in zip(self.paths, self._tops, strict=True) if not top), None)
        if loose is not None:
            fail(
                "CP0901", f"{Path(loose).name!r} is in no sub-folder, so it has no class", "move it into one"
            )
        labels = np.array([numbers[top] for top in self._tops], np.int32).view(ClassNumbers)
        labels.classes = self.classes
        return labels


@ends_at_caller
def folder(
    path: str | os.PathLike[str], recursive: bool = False, classes: Sequence[str] | None = None
) -> Folder:
    """A source of type `bytes`: the contents of the files in the folder `path`, sorted by name.

    Files are sorted by the bytes of the name (of the path inside the folder, part by part). This order is the
    same on all systems. Hidden files and folders are left out.

    If each sub-folder is a class, `.labels` is a source of class numbers and `.classes` are the names. A
    folder for validation takes the classes of the folder for training:
    `commplan.folder("val", recursive=True, classes=train.classes)`.

    Args:
        path: the folder.
        recursive: whether to include the files of sub-folders.
        classes: the names of the classes, in the order of their numbers. None for the sub-folders of the
            folder, sorted, including empty ones; no classes if `recursive` is False.

    Returns:
        The source.

    Raises:
        CommplanError: CP0901 if there is no such folder, or no file in it; CP0956 for a sub-folder that
            `classes` does not list, or if `classes` is not a list of different names or `recursive` is False.
    """
    root = os.fspath(path)
    fixed = None if classes is None else _class_names(classes, recursive)
    try:
        names = list(_names(root, recursive))
        tops = _sub_folders(root) if recursive else []
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else root
        fail("CP0901", f"cannot read the folder {where!r}: {error.strerror}", "give a folder that exists")
    if not names:
        hint = (
            [] if recursive else ["files in sub-folders count with `commplan.folder(path, recursive=True)`"]
        )
        fail("CP0901", f"there is no file in the folder {root!r}", "records are the files in it", *hint)
    if fixed is not None and (unknown := [top for top in tops if top not in fixed]):
        fail(
            "CP0956",
            f"the folder {root!r} has sub-folders that are none of the classes: {listed(unknown)}",
            did_you_mean(unknown[0], fixed, "the classes are:"),
            "list every sub-folder in `classes`, or move what is no class elsewhere",
        )
    names = sorted(names, key=lambda name: list(map(os.fsencode, Path(name).parts)))
    return Folder(root, names, tops if fixed is None else fixed)


def _class_names(classes: Sequence[str], recursive: bool) -> list[str]:
    """The argument `classes` of `folder` as a list.

    Raises:
        CommplanError: CP0956 if they are empty, not names or not different, or if `recursive` is False.
    """
    names = [] if isinstance(classes, str) else list(classes)
    if not names or not all(isinstance(name, str) for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]
        fail("CP0956", f"classes={classes!r}: a list of names was expected", "such as classes=train.classes")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        fail("CP0956", f"classes lists {listed(twice)} more than once", "each class has one number")
    if not recursive:
        fail("CP0956", "classes are sub-folders, and recursive is False", "pass recursive=True as well")
    return names


def _sub_folders(root: str) -> list[str]:
    """The folders in `root`, sorted by the bytes of their names, except hidden ones."""
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    return sorted(names, key=os.fsencode)


def check_classes(sources: Mapping[str, object], file: str) -> list[Diagnostic]:
    """CP0956 for each source whose class numbers differ from those of the first source with classes.

    Args:
        sources: the sources of a program by name. Only `Folder.labels` are compared.
        file: the file of the plan.
    """
    numbered = {name: source.classes for name, source in sources.items() if isinstance(source, ClassNumbers)}
    first = next(iter(numbered), "")
    return [
        Diagnostic(
            "CP0956",
            f"the class numbers of the sources `{first}` and `{name}` differ",
            notes=tuple(map(Note, (*_differences(first, numbered[first], name, classes), *_CLASSES_ALIKE))),
            file=file,
        )
        for name, classes in numbered.items()
        if classes != numbered[first]
    ]


_CLASSES_ALIKE = (
    "give both the same list: commplan.folder(path, recursive=True, classes=train.classes)",
    "if the numbers are meant to differ, give them as plain arrays: np.asarray(folder.labels)",
)


def _differences(first: str, classes: Sequence[str], second: str, second_classes: Sequence[str]) -> list[str]:
    """Notes about the differences between the classes of the sources `first` and `second`."""
    lines = [
        f"{listed(missing)} {'is a class' if len(missing) == 1 else 'are classes'} of `{name}` alone"
        for name, names, other_names in ((first, classes, second_classes), (second, second_classes, classes))
        if (missing := [each for each in names if each not in other_names])
    ]
    indices = {
        name: (classes.index(name), second_classes.index(name)) for name in classes if name in second_classes
    }
    differing = [name for name, (first_index, second_index) in indices.items() if first_index != second_index]
    for name in differing[:1]:
        first_index, second_index = indices[name]
        lines.append(f"`{name}` is class {first_index} of `{first}` and class {second_index} of `{second}`")
    return lines


def _names(root: str, recursive: bool) -> Iterator[str]:
    """The paths of the files below `root`, inside of it and in any order, without hidden files and folders.

    A folder is entered once, even if links lead back to it. Raises OSError if a folder cannot be read.
    """
    stack = [""]
    visited: set[str] = set()
    while stack:
        inside = stack.pop()
        path = os.path.join(root, inside)  # noqa: PTH118
        real = os.path.realpath(path)
        if real in visited:
            continue
        visited.add(real)
        with os.scandir(path) as entries:
            for entry in entries:
                name = os.path.join(inside, entry.name)  # noqa: PTH118
                if entry.name.startswith("."):
                    continue
                if entry.is_file():
                    yield name
                elif recursive and entry.is_dir():
                    stack.append(name)
