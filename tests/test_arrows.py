"""The arrows between rooms: allowed imports, checked in the sources and by loaded modules."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {room: f"commplan.{room}" for room in ("dsl", "lowering", "runtime")} | {"commplan": "commplan"}

# The allowed imports of each room, in addition to itself, `commplan.ir`, `commplan.io` and
# `commplan.diagnostics`. Modules outside rooms (the public interface, the command, drawings, explanations)
# may import every room.
OURS = "commplan"
ALLOWED: dict[str, tuple[str, ...]] = {
    "commplan.diagnostics": (),
    "commplan.ir": (),
    "commplan.collectives": (),
    "commplan.input": ("commplan.collectives",),
    "commplan.protocol": (),
    "commplan.dsl": (),
    "commplan.highlight": ("commplan.dsl",),
    "commplan.lint": (
        "commplan.dsl", "commplan.errors", "commplan.compiler", "commplan.cost", "commplan.frontend",
        "commplan.topology",
    ),
    "commplan.lsp": ("commplan.dsl", "commplan.lint", "commplan.highlight"),
    "commplan.pytree": (),
    "commplan.io": (),
    "commplan.recorder": ("commplan.tracebacks", "commplan.hang_limits"),
    "commplan.sidecar": ("commplan.recorder", "commplan.ending"),
    "commplan.wait": (),
    "commplan.hang_limits": ("commplan.wait",),
    "commplan.ending": (),
    "commplan.tracebacks": (),
    "commplan.topology": ("commplan.tracebacks",),
    "commplan.cost": (
        "commplan.collectives", "commplan.topology", "commplan.input", "commplan.protocol",
    ),
    "commplan.select": ("commplan.collectives", "commplan.cost", "commplan.topology"),
    "commplan.frontend": ("commplan.collectives",),
    "commplan.passes": (
        "commplan.collectives", "commplan.topology", "commplan.verify", "commplan.cost", "commplan.pytree",
        "commplan.input", "commplan.frontend", "commplan.select", "commplan.io",
    ),
    "commplan.verify": ("commplan.collectives", "commplan.input", "commplan.protocol"),
    "commplan.lowering": (
        "commplan.collectives", "commplan.passes", "commplan.verify", "commplan.pytree", "commplan.topology",
        "commplan.protocol", "commplan.recorder", "commplan.sidecar", "commplan.wait",
        "commplan.ending", "commplan.hang_limits",
    ),
    "commplan.runtime": (
        "commplan.collectives", "commplan.passes", "commplan.frontend", "commplan.verify", "commplan.pytree",
        "commplan.lowering", "commplan.cost", "commplan.topology", "commplan.input",
        "commplan.protocol", "commplan.recorder", "commplan.sidecar", "commplan.wait",
        "commplan.tracebacks", "commplan.hang_limits",
    ),
}  # fmt: skip
JAX = (
    "commplan.lowering.jax",
    "commplan.lowering.mpi",
    "commplan.runtime",
    "commplan.optax",
    "commplan.orbax",
)
MPI = ("commplan.lowering.mpi", "commplan.runtime")
# May import private parts of JAX.
PRIVATE = {f"commplan.lowering.jax.{name}" for name in ("_compat", "_context", "_jit", "_lineage")}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its import name; the links to the rooms are not followed."""
    paths: dict[str, Path] = {}
    for room, name in ROOMS.items():
        for path in sorted((ROOT / room).rglob("*.py")):
            inside = path.relative_to(ROOT / room)
            if room == "commplan" and (inside.parts[0] in ROOMS or "templates" in inside.parts):
                continue  # templates are programs for users, copied and never imported
            parts = [*name.split("."), *inside.with_suffix("").parts]
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@functools.cache
def imports(path: Path, name: str) -> tuple[tuple[str, int, bool], ...]:
    """(module, line, at run time) for each import in the file; those for type checking alone are not."""
    return tuple(_imports(path, name))


def _imports(path: Path, name: str) -> Iterator[tuple[str, int, bool]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for body in node.body
        for inner in ast.walk(body)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) not in for_types
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield base, node.lineno, id(node) not in for_types
            for alias in node.names:  # `from commplan import trees` names a module as well
                yield f"{base}.{alias.name}", node.lineno, id(node) not in for_types


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def room_of(name: str) -> str | None:
    """The longest prefix of `name` with arrows; None for the public interface and the command."""
    prefixes = [prefix for prefix in ALLOWED if below(name, prefix)]
    return max(prefixes, key=len) if prefixes else None


def test_the_rooms_are_where_they_should_be():
    assert {
        "commplan.ir.plan",
        "commplan.dsl.ast",
        "commplan.lowering.jax.phase",
        "commplan.runtime.run",
    } <= modules().keys()
    for link in ("dsl", "lowering", "runtime"):
        assert (ROOT / "commplan" / link).is_symlink()


@pytest.mark.parametrize("group", [*sorted(ALLOWED), None])
def test_imports_follow_the_arrows(group: str | None):
    wrong: list[str] = []
    for name, path in modules().items():
        if room_of(name) == group:
            wrong += _wrong_imports(name, path, group)
    assert not wrong, "\n".join(wrong)


def _wrong_imports(name: str, path: Path, room: str | None) -> Iterator[str]:
    for target, line, at_run_time in imports(path, name):
        if target.split(".")[0] == "jax" and not any(below(name, place) for place in JAX):
            yield f"{path}:{line} imports jax"
        if below(target, "jax._src") and name not in PRIVATE:
            yield f"{path}:{line} imports a private part of JAX"
        if target.split(".")[0] in ("mpi4py", "mpi4jax") and not any(below(name, place) for place in MPI):
            yield f"{path}:{line} imports MPI"
        if room is None or target not in modules() or target == OURS or not at_run_time:
            continue
        fine = ("commplan.diagnostics", "commplan.ir", "commplan.io", room, *ALLOWED[room])
        if room in ("commplan.diagnostics", "commplan.io"):
            fine = (room,)
        if room == "commplan.collectives":
            fine = (room, "commplan.ir", "commplan.diagnostics")
        if not any(below(target, prefix) for prefix in fine):
            yield f"{path}:{line}: {room} imports {target}"


@pytest.mark.parametrize("room", ["ir", "frontend", "passes", "select", "verify", "input"])
def test_no_circles(room: str):
    """Within the core not even imports for type checking run in circles."""
    inside = {name: path for name, path in modules().items() if below(name, f"commplan.{room}")}
    arrows = {
        name: {target for target, _, _ in imports(path, name)} & inside.keys() - {name, f"commplan.{room}"}
        for name, path in inside.items()
    }
    assert any(arrows.values())
    while free := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in free:
            del arrows[name]
    assert not arrows, f"a circle among {sorted(arrows)}"


# The faces of the two graphs of `ir`: each offers the nodes of its graph, from `ir.stages` and `ir.ops`.
GRAPHS = {"commplan.ir.plan", "commplan.ir.schedule"}
# Packages that still import each other at run time: the list must not grow.
BOTH_WAYS = {
    frozenset(f"commplan.{name}" for name in pair.split())
    for pair in (
        "runtime.input runtime.input.observe",
        "runtime.input runtime.input.ring",
        "runtime.input runtime.input.shm",
        "runtime.input runtime.input.stages",
        "runtime.input.cache runtime.input.stages",
        "runtime.input.observe runtime.input.stages",
    )
}


def test_packages_import_in_one_direction() -> None:
    """Of two packages inside `runtime`, `lowering` and `commplan` one imports the other, or neither does.

    The face of a package (`__init__`) and its other modules count as two packages, because a face may offer
    the content of packages below, which import the other modules. So do `GRAPHS`.
    """
    faces = {name for name, path in modules().items() if path.name == "__init__.py"} | GRAPHS

    def package(name: str) -> str:
        return f"{name}.__init__" if name in faces else name.rpartition(".")[0]

    arrows: set[tuple[str, str]] = set()
    for name, path in modules().items():
        targets = [(target, line) for target, line, at_run_time in imports(path, name) if at_run_time]
        for target, line in targets:
            # `from commplan.dsl import ast` imports a module, and nothing of the face.
            of_module = any(
                at == line and other.startswith(f"{target}.") and other in modules() for other, at in targets
            )
            if target in modules() and not (target in faces and of_module):
                arrows.add((package(name), package(target)))
    pairs = {
        frozenset(part.removesuffix(".__init__") for part in arrow)
        for arrow in arrows
        if arrow[::-1] in arrows
    }
    pairs = {pair for pair in pairs if len(pair) == 2 and "commplan" not in pair}
    assert pairs == BOTH_WAYS


def test_no_module_below_imports_a_graph_of_ir() -> None:
    """Only then are the graphs faces: stages, ops and their parts (`refs`, `types`) work without them."""
    below_graphs = {
        name: path
        for name, path in modules().items()
        if name not in GRAPHS
        and (name.rpartition(".")[0] == "commplan.ir" or below(name, "commplan.ir.ops")
             or below(name, "commplan.ir.stages"))
    }  # fmt: skip
    assert "commplan.ir.refs" in below_graphs and "commplan.ir.ops.collective" in below_graphs
    wrong = [name for name, path in below_graphs.items() if GRAPHS & {t for t, _, _ in imports(path, name)}]
    assert not wrong


def test_lowered_phases_and_jit_do_not_import_the_audit() -> None:
    """Compiling a step needs no reader of HLO; `lowering.jax.aot` and the runtime use it."""
    pending = [f"commplan.lowering.jax.{name}" for name in ("_jit", "phase", "collectives.lax_backend")]
    pending += ["commplan.lowering.mpi.backend", "commplan.lowering.jax.layers.sharded"]
    reached = set[str]()
    while pending:
        name = pending.pop()
        if name not in reached and name in modules():
            reached.add(name)
            targets = [target for target, _, at_run_time in imports(modules()[name], name) if at_run_time]
            pending += [name.rpartition(".")[0], *targets]
    assert "commplan.lowering.jax.ops" in reached
    readers = [f"commplan.lowering.{part}" for part in ("audit", "hlo", "gpu")]
    assert not sorted(name for name in reached if any(below(name, each) for each in readers))


def loaded(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint('\\n'.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(done.stdout.splitlines())


HEAVY = {"jax", "jaxlib", "mpi4py", "mpi4jax", "ml_dtypes", "optax"}


def test_import_commplan_loads_neither_jax_nor_mpi():
    names = loaded("import commplan")
    assert "commplan" in names
    assert not names & HEAVY


def test_check_loads_neither_jax_nor_mpi():
    plan = ROOT / "examples" / "plans" / "two_level.plan"
    names = loaded(
        f"from commplan.cli import main\ntry:\n    code = main(['check', {str(plan)!r}])\n"
        "except SystemExit as end:\n    code = end.code\nassert not code, code\n"
        "assert 'commplan.dsl.automaton' in sys.modules, 'the plan was not parsed'"
    )
    assert not names & {*HEAVY, "lark", "inspect", "typing_extensions", "ast", "fractions"}


def test_the_check_of_imports_can_fail(tmp_path: Path):
    file = tmp_path / "wrong.py"
    file.write_text(
        "from __future__ import annotations\nimport jax.numpy as jnp\nfrom ..runtime import run\n"
    )
    targets = {(target, at_run_time) for target, _, at_run_time in imports(file, "commplan.dsl.wrong")}
    assert ("jax.numpy", True) in targets
    assert ("commplan.runtime.run", True) in targets
