"""Values that several processes hold alike: checksums of every kind of leaf, and the error that names one."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.embedding import mesh_of

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.machines.mesh import machine_of
from commplan.runtime.observe import same_values
from commplan.runtime.observe.same_values import Copies, NamedLeaf, check_copies, named_leaves

PLAN = """plan values
axis data = 2
input params : tree
input own    : tree per data
state center : tree
at start {
    center = broadcast own over data from 0
}
each step {
    shard  = slice params over data
    params = gather shard over data
    center = broadcast own over data from 0
    output params, center
}
"""
BOTH = (0, 1)


def refused(*copies: list[Copies]) -> str:
    """The error of the processes with these copies, equal on all; empty if there is none."""
    barrier, answers = threading.Barrier(len(copies)), dict[int, Any]()

    def exchange(number: int, mine: Any) -> dict[int, Any]:
        barrier.wait(60)
        answers[number] = mine
        barrier.wait(60)
        return dict(answers)

    def compare(number: int) -> str:
        try:
            check_copies(copies[number], functools.partial(exchange, number), "process", "x.plan")
        except CommplanError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(copies)) as pool:
        (text,) = set(pool.map(compare, range(len(copies))))
    return text


def held(x: Any, holders: tuple[int, ...] = BOTH, name: str = "`x`") -> Copies:
    return Copies(name, holders, {"": x})


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int4", "uint32", "bool", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_of_any_type_counts_wherever_it_is(dtype: str):
    x = np.asarray(jnp.arange(30).reshape(5, 6) % 2).astype(jnp.dtype(dtype))
    other = x.copy()
    other[3, 4] = x[3, 4] == 0
    assert not refused([held(x)], [held(jnp.asarray(x))])
    text = refused([held(x)], [held(jnp.asarray(other))])
    assert text.startswith("error[CP0861]: `x` differs between process 0 and process 1\n")
    assert f"note: process 1: {dtype}[5, 6], " in text
    on_device = [
        np.asarray(same_values._mixed(jnp.asarray(each))).tobytes() for each in (x, other, x[:, ::-1])
    ]
    assert len({*on_device}) == 3 and same_values._checksum(x) != same_values._checksum(x[:, ::-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_nan_counts_as_one(dtype: str):
    x = np.full(9, np.nan).astype(jnp.dtype(dtype))
    other = x.copy()
    other.view(np.uint8)[0] ^= 1
    assert not refused([held(x)], [held(other)])
    assert (same_values._mixed(x) == same_values._mixed(other)).all()
    assert refused([held(x)], [held(np.zeros_like(x))])


def test_keys_and_numbers_are_compared():
    key = jax.random.key
    assert not refused([held(key(3)), held(2)], [held(key(3)), held(2)])
    assert "`x` differs" in refused([held(key(3))], [held(key(4))])
    assert "note: process 1: int32[], 3" in refused([held(2)], [held(3)])


def test_processes_are_compared_with_those_that_hold_the_same():
    """Two members of two ranks each; the second ones of the second member differ in their last leaf."""
    members = [(0, 1), (0, 1), (2, 3), (2, 3)]
    copies = [
        [held(n // 2, pair), held(0, (0, 1, 2, 3), "`y`"), held(np.ones(2) + (n == 3), pair, "`z`")]
        for n, pair in enumerate(members)
    ]
    text = refused(*copies)
    assert text.startswith("error[CP0861]: `z` differs between process 2 and process 3\n")
    assert "process 2: float32[2], 1.0, 1.0" in text and "process 3: float32[2], 2.0, 2.0" in text


def test_devices_of_one_process_are_compared():
    pieces = {f"cpu:{n}": jnp.full(3, n == 2) for n in range(4)}
    text = refused([Copies("`x`", (0,), pieces)], [])
    assert text.startswith("error[CP0861]: `x` differs between cpu:0 and cpu:2 of process 0\n")


def test_leaves_are_named_by_their_parameters():
    tree = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
    program = commplan.loads(PLAN).compile(
        mesh := mesh_of(data=2), shapes=dict.fromkeys(("params", "own", "center"), tree)
    )
    run = program.bind(mesh)

    @run.spmd(params="params", rows="split data", returns="params")
    def step(state, params, rows, times=1):
        return state, params

    params, rows = {"w": np.ones(4), "none": np.ones((0, 3))}, np.ones((2, 3))
    leaves = list(named_leaves(step, ({"center": params}, params), {"rows": rows}))
    assert [leaf.name for leaf in leaves] == ["leaf `w` of `center`", "leaf `w` of `params`", "`rows`"]
    machine = machine_of(program.schedule, mesh)
    assert [len(machine.copies(leaf.leaf, leaf.placement)) for leaf in leaves] == [1, 1, 0]
    (plain, other) = named_leaves(lambda x, y: x, (params["w"],), {"y": 3.0})
    assert plain == NamedLeaf("argument [0]", params["w"], None) and other.name == "argument [1]['y']"


def test_replicas_are_the_pieces_that_several_devices_hold():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    program = commplan.loads(PLAN).compile(
        axes={"data": 2}, shapes={name: {} for name in ("params", "own", "center")}
    )
    machine = machine_of(program.schedule, mesh)
    x = jnp.arange(8.0).reshape(2, 4)

    def placed(*axes: str | None) -> list[list[str]]:
        copies = machine.copies(jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes))), None)
        assert all(holders == (0,) for holders, _ in copies)
        return [[same_values._checksum(piece) for piece in arrays.values()] for _, arrays in copies]

    assert [len(each) for each in placed()] == [4]
    assert [len(each) for each in placed("data")] == [2, 2] and placed("data", "model") == []
    assert all(len({*each}) == 1 for each in placed(None, "model"))
