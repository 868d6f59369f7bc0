"""The device memory of a compiled step, as reported by the audit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from commplan.lowering.audit.report import Audit
from commplan.lowering.hlo.step import Memory
from commplan.lowering.jax.aot import compile_step

KIB = 1 << 10


def test_results_that_lie_where_arguments_lay_count_once() -> None:
    argument = jax.ShapeDtypeStruct((256,), "float32")
    donating = jax.jit(lambda x, y: (x + y, jnp.sin(y)), donate_argnums=0)
    memory = compile_step(donating, argument, argument).memory
    assert memory is not None
    assert (memory.arguments, memory.donated) == (2 * KIB, KIB)
    assert 2 * KIB <= memory.outputs < 3 * KIB  # CPUs add a table of the two
    assert memory.total == memory.arguments + memory.outputs - KIB + memory.temporary


def test_the_audit_says_what_is_donated() -> None:
    report = Audit("p", (), (), (), (), memory=Memory(4 * KIB, 3 * KIB, 2 * KIB, KIB))
    line = "memory of a device: 6 KiB: 4 KiB of arguments, 3 KiB of results (2 KiB of them reuse arguments)"
    assert f"\n{line}, 1 KiB temporary" in str(report)
    assert str(report.memory) == f"{line}, 1 KiB temporary"
    assert report.data()["memory"] == {"arguments": 4096, "outputs": 3072, "donated": 2048, "temporary": 1024}
