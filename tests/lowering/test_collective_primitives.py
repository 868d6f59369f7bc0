"""The table of primitives that communicate covers those of JAX and those that the lowering binds."""

from __future__ import annotations

import re
from pathlib import Path

from jax._src.lax import parallel

from commplan.lowering import jax as folder
from commplan.lowering.collective_primitives import collective_kind

# Primitives of `jax._src.lax.parallel` that read a rank's index or change types, and the ends of others.
LOCAL = re.compile(r"axis_index|preduced|vary_unreduced_cast|_dones|\w+_done")
OWN = {"commplan_same", "commplan_term", "commplan_warning"}


def test_the_table_has_every_primitive_of_jax_that_communicates() -> None:
    names = [name.removesuffix("_p") for name in vars(parallel) if name.endswith("_p")]
    assert "psum" in names
    assert [name for name in names if not LOCAL.fullmatch(name) and not collective_kind(name)] == []


def test_the_table_has_every_primitive_of_the_lowering_that_communicates() -> None:
    sources = [path.read_text() for path in Path(str(folder.__file__)).parent.rglob("*.py")]
    declared = {name for text in sources for name in re.findall(r"Primitive\((\S+)\)", text)}
    assert {name.strip('"') for name in declared} == OWN | {"GROUPED"}
    assert not any(map(collective_kind, OWN))
    called = {name for text in sources for name in re.findall(r"\blax\.(p\w+|all_\w+)\(", text)}
    assert {"psum", "pbroadcast"} <= called
    assert {name for name in called if not collective_kind(name)} <= {"pad", "pcast", "pvary"}
