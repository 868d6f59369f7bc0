"""Every name of JAX used in the sources exists in the installed version.

Code that runs on GPUs only, or between hosts, has no test that runs it: a moved name is reported here. `make
oldest` and `make newest` check other versions.
"""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("lowering/**/*.py", "runtime/**/*.py", "commplan/*.py", "examples/**/*.py", "bench/**/*.py")
FILES = [path for room in ROOMS for path in sorted(ROOT.glob(room)) if "jax" in path.read_text()]


def imports(tree: ast.Module) -> tuple[dict[str, str], list[str]]:
    """The names of the file that are modules of JAX, and all its imports from JAX."""
    modules, names = dict[str, str](), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jax":
                    modules[alias.asname or "jax"] = alias.name if alias.asname else "jax"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            names += [f"{node.module}.{alias.name}" for alias in node.names]
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):  # _core = cast("Any", _src_core)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            source = _uncast(node.value)
            if isinstance(target, ast.Name) and isinstance(source, ast.Name) and source.id in modules:
                modules[target.id] = modules[source.id]
    return modules, names


def _uncast(node: ast.expr) -> ast.expr:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast"
    return node.args[1] if isinstance(node, ast.Call) and called else node


def chains(tree: ast.Module, modules: dict[str, str]) -> Iterator[str]:
    """`jax.lax.psum` wherever it is written, whatever `jax.lax` is called in the file."""
    for node in ast.walk(tree):
        names, root = list[str](), node
        while isinstance(root, ast.Attribute):
            names.append(root.attr)
            root = _uncast(root.value)
        if names and isinstance(root, ast.Name) and root.id in modules:
            yield ".".join((modules[root.id], *reversed(names)))


def missing(chain: str) -> str | None:
    """The part of `chain` that JAX does not have; attributes of functions and objects are not checked."""
    value: Any = importlib.import_module("jax")
    path = "jax"
    for name in chain.split(".")[1:]:
        if not isinstance(value, types.ModuleType):
            return None
        path = f"{path}.{name}"
        if not hasattr(value, name):
            try:
                importlib.import_module(path)
            except ImportError:
                return path
        value = getattr(value, name)
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_jax_are_there(path: Path) -> None:
    tree = ast.parse(path.read_text())
    modules, names = imports(tree)
    assert [name for chain in (*names, *chains(tree, modules)) if (name := missing(chain))] == []


def test_a_name_that_is_not_there_is_seen() -> None:
    text = 'from jax._src import core as _own\nfrom typing import cast\n_core = cast("Any", _own)\n'
    tree = ast.parse(text + "_core.trace_state_clean\n_core.nothing_so_called()\n")
    modules, _ = imports(tree)
    assert {missing(chain) for chain in chains(tree, modules)} == {None, "jax._src.core.nothing_so_called"}
    trees = [ast.parse(path.read_text()) for path in FILES]
    used = {chain for tree in trees for chain in chains(tree, imports(tree)[0])}
    assert {"jax.lax.pbroadcast", "jax.lax.ppermute"} <= used
