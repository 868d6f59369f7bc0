"""Files from outside: the module that opens them, and that no other module does."""

from __future__ import annotations

import ast
import errno
import os
import socket
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from commplan import io
from tests.test_arrows import modules

OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "touch"}
OF_NUMPY = {"load", "fromfile", "loadtxt", "genfromtxt", "save", "savez"}
DECODING = {"tomllib", "gzip", "bz2", "lzma", "zipfile", "tarfile", "shelve", "dbm", "sqlite3", "linecache"}
# Calls that open no file from outside: (module, function): why.
ELSEWHERE = {
    ("commplan.cli.command", "_print_anything"): "/dev/null",
    ("commplan.cli.console", "silence"): "/dev/null",
    ("commplan.cli.console", "_write_new"): "an output that a user names, which may be a pipe",
    ("commplan.errors", "page"): "a file of this package",
    ("commplan.errors", "_family_pages"): "a file of this package",
    ("commplan.lowering.mpi.prebuilt", "levels"): "/proc",
    ("commplan.lowering.mpi.prebuilt.wheel", "compiled_wheel"): "a folder that it has just made",
    ("commplan.orbax", "read"): "a bucket, by etils.epath",
    ("commplan.report.page", "_asset"): "a file of this package",
    ("commplan.runtime.calibrate.lock", "_scheduled_s"): "/proc",
    ("commplan.runtime.input.device.batches", "this_host"): "/proc",
    ("commplan.runtime.input.ring.meeting", "_available"): "/proc",
    ("commplan.runtime.input.ring.producers", "_times"): "/proc",
    ("commplan.runtime.observe.abort_hook", "aborted"): "/proc",
    ("commplan.sidecar.mail", "received"): "a datagram of a sidecar that has the key, up to a bounded size",
}


def test_no_other_module_opens_files_from_outside() -> None:
    opens: dict[tuple[str, str], str] = {}
    for name, path in modules().items():
        if name == "commplan.io" or "templates" in path.parts:
            continue
        for function, call in opening_calls(ast.parse(path.read_text())):
            opens[name, function] = f"{path}:{call.lineno}: {ast.unparse(call)[:80]}"
    assert not opens.keys() - ELSEWHERE.keys(), "\n".join(opens[k] for k in opens if k not in ELSEWHERE)
    assert not ELSEWHERE.keys() - opens.keys()


def opening_calls(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """The places that open or unpack files, with the innermost function around each."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else function
        if isinstance(node, ast.Call) and is_opening(node):
            yield function, node
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            if DECODING & {name.split(".")[0] for name in names}:
                yield function, node
        yield from opening_calls(node, inner)


def is_opening(call: ast.Call) -> bool:
    if not _is_named_like_opening(call.func):
        return False
    text = ast.unparse(call)  # files of the kernel and of this package do not come from outside
    return not ("'/proc/" in text or "__file__" in text or text.startswith(("files(", "io.")))


def _is_named_like_opening(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute):
        return False
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    if module in ("np", "numpy"):
        return function.attr in OF_NUMPY
    if module == "zlib":
        return function.attr in ("decompress", "decompressobj")
    return function.attr in OPENING or (module, function.attr) in (("json", "load"), ("pickle", "load"))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.close()
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT):
        with pytest.raises(OSError) as caught:
            io.open_file(path, flags)
        assert caught.value.errno in (errno.EINVAL, errno.EISDIR)
    with pytest.raises(OSError, match=r"(?i)regular file|directory"):
        io.read(path)


def test_links_are_followed_on_request_only(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("text")
    link = tmp_path / "link"
    link.symlink_to("real")
    assert io.read(link) == b"text"
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match="it is a symbolic link"):
            io.open_file(link, flags | os.O_NOFOLLOW)
    io.write(link, b"new")  # replaces the link
    assert not link.is_symlink() and link.read_text() == "new"
    assert (tmp_path / "real").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    io.write(path, b"first")
    path.chmod(0o640)
    io.write(path, b"second")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"second", 0o640)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    assert io.read(path, 100) == b"x" * 100
    for limit in (99, 0):
        with pytest.raises(OSError, match="larger than"):
            io.read(path, limit)
    assert len(io.read("/proc/self/status")) > 100  # which has no size
    with path.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="larger than 64 MiB"):
        io.read(path)


@pytest.mark.parametrize(
    "text",
    [
        f"a = {'9' * 4301}",
        f"a = [{{b = 0x{'f' * 4301}}}]",
        f"a.b = -{'9' * 400}",
        f"a = {'[' * 5000}",
        "a = 2026-02-31",
        "a = ",
        f"{'a.' * 20_000}a = 1",
        f"[{'b . ' * 20_000}'b']",
        f"x = {{ {'a.' * 200}a = 1 }}",
    ],
)
def test_texts_that_are_no_toml(text: str) -> None:
    with pytest.raises(ValueError, match=r"out of range|300 digits|too deep|100 parts|Invalid"):
        io.decode_toml(text)


@pytest.mark.parametrize("data", [b'"\xff"', b"[" * 100_000, b"", b'"a"', b"9" * 5000])
def test_data_that_are_no_json(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        io.decode_json(data, list[list[int]])


def test_what_is_unpacked_has_the_size_that_is_expected() -> None:
    packed = zlib.compress(bytes(1000))
    assert io.decompress(packed, 1000) == bytes(1000)
    assert io.decompress(zlib.compress(b""), 0) == b""
    for data, size in ((packed, 999), (packed, 1001), (packed + b"x", 1000), (packed[:-1], 1000), (b"x", 1)):
        with pytest.raises(ValueError, match=r"."):
            io.decompress(data, size)
