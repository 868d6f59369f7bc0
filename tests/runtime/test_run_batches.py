"""`run.batches` and `run.member`: sharded arrays in the layout of the plan, whatever the mesh."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.embedding import bind, code_of, mesh_of, refused

from commplan.diagnostics import CommplanError
from commplan.runtime.input.group import group
from commplan.runtime.machines.mesh_input import MeshInput

PLAN = """plan p
ensemble member = 2
axis data = {data}
source images : u8[6]
fn decode (u8[6]) -> u8[2, 3], i32 on host
fn flip   (u8[2, 3]) -> u8[2, 3] on device random
fn noisy  (u8[2, 3]) -> u8[2, 3] on host random
fn scale  (u8[2, 3]) -> f32[2, 3] on device
input params : tree per member
input grads  : tree per member partial data
at start {{
    output params
}}
each step {{
    raw, n       = load images batch 8 split data visit exactly_once seed 3
    x, labels    = map decode(raw)
    own          = map flip(x) per member
    all          = map flip(x)
    host         = map noisy(x) per member
    scaled       = map scale(host)
    output own, all, labels, scaled, n
    grads = reduce grads over data by mean
    output grads
}}
phase merge {{
    total = reduce params across member by sum
    output total
}}
"""
TREE = {"w": np.zeros((4,), np.float32)}
RECORDS = np.arange(21 * 6, dtype=np.uint8).reshape(21, 6)


def decode(record: Any) -> Any:
    return np.asarray(record).reshape(2, 3), np.int32(record[0])


def noisy(x: Any, rng: Any) -> Any:
    return x + rng.integers(0, 9, x.shape, np.uint8)


FUNCTIONS = {
    "decode": decode,
    "flip": lambda key, x: jnp.where(jax.random.bernoulli(key), x[::-1], x),
    "noisy": noisy,
    "scale": lambda x: x.astype(jnp.float32) / 255,
}


def bound(data: int, **options: Any) -> Any:
    return bind(
        PLAN.format(data=data),
        mesh_of(member=2, data=data),
        {"params": TREE, "grads": TREE},
        functions=FUNCTIONS,
        sources={"images": RECORDS},
        **options,
    )


def epochs(run: Any, count: int = 1, **options: Any) -> list[dict[str, Any]]:
    with run.batches(**options) as batches:
        return [{k: np.asarray(v) for k, v in item.items()} for _ in range(count) for item in batches]


def test_batches_lie_as_the_plan_says():
    with bound(4).batches() as batches:
        assert batches.steps == 3
        item = next(iter(batches))
    assert sorted(item) == ["all", "host", "labels", "n", "own", "scaled"] or sorted(item) == [
        "all", "labels", "n", "own", "scaled",
    ]  # fmt: skip
    specs = {name: (item[name].shape, item[name].sharding.spec) for name in item if name != "host"}
    assert specs == {
        "own": ((2, 8, 2, 3), P("member", "data")),
        "all": ((8, 2, 3), P("data")),
        "labels": ((8,), P("data")),
        "scaled": ((2, 8, 2, 3), P("member", "data")),
        "n": ((4,), P("data")),
    }
    assert item["own"].dtype == jnp.uint8
    assert item["labels"].dtype == jnp.int32


def test_a_batch_says_which_of_its_rows_are_records():
    run = bound(4)
    (*_, last) = run.batches()
    assert last.mask.sharding.spec == P("data")
    assert last.mask.tolist() == [[n > 0, n > 1][row] for n in last["n"].tolist() for row in range(2)]

    @run.jit
    @run.spmd(labels="labels", mask="labels", returns=("per data",))
    def sums(state: Any, labels: Any, mask: Any) -> Any:
        return state, jnp.sum(labels, where=mask)

    assert sums(run.init(), last["labels"], last.mask)[1].sum() == last["labels"][:5].sum()
    (*_, last_item) = run.member(1).batches()
    assert (
        last_item.mask.tolist() == last.mask.tolist() and last_item.mask.sharding.mesh == run.member(1).mesh
    )


def test_a_batch_is_a_dictionary_and_a_pytree_of_its_arrays():
    item = next(bound(2).batches())
    assert isinstance(item, dict) and jax.tree.structure(dict(item)).num_leaves == len(item)
    doubled = jax.tree.map(lambda leaf: leaf * 2, item)
    assert (doubled["labels"] == 2 * item["labels"]).all()
    with pytest.raises(AttributeError, match=r"pass `item.mask` as a separate argument"):
        _ = doubled.mask
    assert copy.deepcopy(item).keys() == item.keys()
    with pytest.raises(KeyError) as error:
        _ = item["lables"]
    assert code_of(error) == "CP0919" and "did you mean `labels`?" in str(error.value)


def test_every_record_comes_once_and_functions_are_applied():
    items = epochs(bound(4))
    valid = [i for item in items for s in range(4) for i in item["labels"][2 * s : 2 * s + item["n"][s]]]
    assert sorted(valid) == sorted(RECORDS[:, 0])
    for item in items:
        for i, label in enumerate(item["labels"]):
            image = RECORDS[RECORDS[:, 0] == label][0].reshape(2, 3)
            for array in (item["all"][i], item["own"][0, i], item["own"][1, i]):
                assert any((array == other).all() for other in (image, image[::-1]))
            noise = item["scaled"][:, i] * 255 - image
            assert noise.min() > -1e-3
            assert noise.max() < 8.1


def test_random_functions_differ_between_members_where_the_plan_says_so_and_between_epochs():
    items = epochs(bound(2), 2)
    per_member = np.stack([item["own"] for item in items])
    assert (per_member[:, 0] != per_member[:, 1]).any()
    assert (
        np.stack([i["scaled"] for i in items])[:, 0] != np.stack([i["scaled"] for i in items])[:, 1]
    ).any()
    # A record is flipped anew in each epoch.
    flips: list[dict[int, bool]] = [{}, {}]
    for number, item in enumerate(items):
        for i, label in enumerate(item["labels"]):
            image = RECORDS[RECORDS[:, 0] == label][0].reshape(2, 3)
            flips[number // 3][int(label)] = bool((item["all"][i] != image).any())
    assert flips[0] != flips[1]


def test_batches_do_not_depend_on_the_number_of_ranks():
    for single, several in zip(epochs(bound(1), 2), epochs(bound(4), 2), strict=True):
        for name in single:
            if name != "n":
                np.testing.assert_array_equal(single[name], several[name])


def test_batches_go_on_where_they_were_saved():
    run = bound(2)
    with run.batches() as batches:
        next(iter(batches))
        state = batches.state()
        continued = [np.asarray(item["own"]) for item in batches]
    assert all(type(number) is int for number in state.values())
    again = [item["own"] for item in epochs(run, state=state)]
    assert len(again) == 2
    for first, second in zip(continued, again, strict=True):
        np.testing.assert_array_equal(first, second)
    assert batches.summary() is not None


def test_a_member_gets_its_own_part():
    run = bound(2)
    whole = epochs(run)
    for m in range(2):
        with run.batches(member=m) as batches:
            item = next(iter(batches))
            assert item["own"].sharding.mesh.shape == {"data": 2}
            assert set(item["own"].devices()) == set(run.mesh.devices[m])
            np.testing.assert_array_equal(item["own"], whole[0]["own"][m])
            np.testing.assert_array_equal(item["scaled"], whole[0]["scaled"][m])
            np.testing.assert_array_equal(item["all"], whole[0]["all"])


def test_members_train_on_their_own_meshes():
    run = bound(2)
    params = {"w": np.arange(8, dtype=np.float32).reshape(2, 4)}
    out, _ = run.start({}, params=params)
    parts = {m: run.member(m).take("params", out.params) for m in range(2)}
    for m, part in parts.items():
        member = run.member(m)
        assert repr(member) == f"<Member {m} of member: start, step>"
        np.testing.assert_array_equal(part["w"], params["w"][m])

        @jax.jit
        @member.spmd(params="params", x="per data", returns=("grads",))
        def step(state, params, x, member=member):
            grads = jax.grad(lambda p: (p["w"] * x).sum())(member.varying(params))
            out, state = member.step(state, grads=grads)
            return state, out.grads

        _, grads = step(member.init(), part, np.array([m, 3.0], np.float32))
        np.testing.assert_allclose(grads["w"], np.full(4, (m + 3) / 2))
        parts[m] = jax.tree.map(lambda x, g: x + g, part, grads)
    joint = run.join("params", parts)
    assert joint["w"].sharding.spec == P("member")
    np.testing.assert_allclose(joint["w"], params["w"] + np.array([[1.5], [2.0]]))
    out, _ = run.merge({}, params=joint)
    np.testing.assert_allclose(out.total["w"], np.asarray(joint["w"]).sum(0))


def test_members_take_scalar_leaves_and_leaves_that_another_axis_divides():
    plan = (
        "plan p\nensemble member = 2\naxis data = 2\ninput opt : tree per member split data\n"
        "input grads : tree per member partial data\n"
        "each step {\n    grads = reduce grads over data by mean\n    output grads\n}\n"
    )
    mesh = mesh_of(member=2, data=2, model=2)
    tree = {"count": np.zeros((), np.int32), "m": np.zeros((2, 4), np.float32)}
    run = bind(plan, mesh, {"opt": tree, "grads": tree["m"]})
    values = {"count": np.array([3, 5], np.int32), "m": np.arange(32, dtype=np.float32).reshape(2, 4, 4)}
    specs = {"count": P("member"), "m": P("member", "data", "model")}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in values.items()}
    parts = {m: run.member(m).take("opt", placed) for m in range(2)}
    assert parts[1]["m"].sharding.spec == P("data", "model") and parts[1]["count"].shape == ()
    np.testing.assert_array_equal(parts[1]["m"], values["m"][1])
    opt = run.join("opt", parts)
    assert {name: x.sharding for name, x in opt.items()} == {n: x.sharding for n, x in placed.items()}
    for name, x in values.items():
        np.testing.assert_array_equal(opt[name], x)
    code, text = refused(lambda: run.join("opt", {0: parts[0]}))
    assert (code, "has no part of member 1" in text) == ("CP0818", True)


def test_a_member_is_the_same_each_time():
    """Its phases are compiled once."""
    run = bound(2)
    assert run.member(1) is run.member(1)
    assert run.member(1) is not run.member(0)


def test_members_that_are_not_there():
    run = bound(2)
    assert refused(lambda: run.member(2))[0] == "CP0818"
    assert refused(lambda: run.member(0).merge)[0] == "CP0817"
    assert refused(lambda: run.join("labels", {0: 1}))[0] == "CP0818"
    assert refused(lambda: run.join("nothing", {0: 1}))[0] == "CP0811"
    code, text = refused(lambda: run.member(0).take("params", {"w": jnp.zeros((2, 4))}))
    assert (code, "`w`" in text) == ("CP0805", True)
    alone = bind("data_parallel", mesh_of(data=8), {"params": TREE, "grads": TREE})
    assert refused(lambda: alone.member(0))[0] == "CP0818"


def test_batches_that_are_not_there():
    run = bound(2)
    assert refused(lambda: run.batches("evaluate"))[0] == "CP0817"
    assert refused(lambda: run.batches("merge"))[0] == "CP0917"
    run.input.sources.clear()
    code, text = refused(run.batches)
    assert (code, "`images`" in text) == ("CP0803", True)


class Device:
    def __init__(self, process: int) -> None:
        self.process_index = process


def test_the_devices_of_a_process_are_a_block_of_the_mesh():
    run = bound(2)

    class Mesh:
        axis_names = ("member", "data")
        devices = np.array([[Device(0), Device(1)], [Device(0), Device(1)]])

    machine = MeshInput(Mesh(), run.context.sizes, "", (0,), on_cpu=True)
    assert machine.local() == {"member": (0, 1), "data": (0,)}
    Mesh.devices = np.array([[Device(0), Device(1)], [Device(1), Device(0)]])
    code, _ = refused(machine.local)
    assert code == "CP0819"


def test_phases_take_the_source_values_that_their_stages_need():
    text = """plan p
axis data = 2
source images : f32[4]
fn score(f32[4], f32[4]) -> f32 on device
input w : f32[4]
each step {
    x, n = load images batch 4 split data visit exactly_once seed 0
    total = reduce n over data by sum
    output total
}
"""
    records = np.arange(24, dtype=np.float32).reshape(6, 4)
    text = text.replace("fn score(f32[4], f32[4]) -> f32 on device\n", "")
    run = bind(text, mesh_of(data=2), sources={"images": records})
    with run.batches() as batches:
        for item, total in zip(batches, (4, 2), strict=True):
            assert list(item) == ["n"]
            out, _ = run.step({}, **item)
            assert int(out.total) == total


def test_the_last_batch_may_be_short():
    text = """plan p
ensemble member = 2
source images : f32[4]
fn jitter(f32[4]) -> f32[4] on device random
each step {
    x = load images batch 4 visit exactly_once seed 0 tail short
    y = map jitter(x) per member
    output y
}
"""
    records = np.arange(24, dtype=np.float32).reshape(6, 4)
    run = bind(
        text,
        mesh_of(member=2),
        sources={"images": records},
        functions={"jitter": lambda key, x: x + jax.random.uniform(key, x.shape)},
    )
    with run.batches() as batches:
        shapes = [item["y"].shape for item in batches]
    assert shapes == [(2, 4, 4), (2, 2, 4)]


def test_the_group_waits_as_long_as_batches_are_told(tmp_path: Path):
    text = """plan p
ensemble member = 2
source images : u8[6]
fn decode (u8[6]) -> u8[2, 3], i32 on host
fn flip   (u8[2, 3]) -> u8[2, 3] on device random
each step {
    raw, n    = load images batch 8 visit exactly_once seed 3
    x, labels = map decode(raw)
    y         = share x over member via all_shared
    own       = map flip(y) per member
    output own, n
}
"""
    run = bind(
        text,
        mesh_of(member=2),
        {},
        sources={"images": RECORDS},
        functions={name: FUNCTIONS[name] for name in ("decode", "flip")},
    )
    alone = group("never-met", 1, 2, timeout=1000.0)
    with pytest.raises(CommplanError) as error:
        run.batches(group=alone, timeout=0.05)
    assert code_of(error) == "CP0921"
    assert "within 0.05 s" in str(error.value)
