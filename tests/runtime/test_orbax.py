"""Checkpoints: everything that a run needs to continue, restored onto the same mesh and onto others."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import passed_values
from support.embedding import bind, code_of, mesh_of

import commplan
import commplan.orbax
from commplan.diagnostics import CommplanError

# Everything that a run may continue from: sharded and whole states, counted calls, input.
TRAINING = """plan training
axis worker = ?
source images : f32[3]
fn zeros(tree) -> tree on device elementwise
fn sgd(tree, tree, tree) -> tree, tree on device elementwise
fn jitter(f32[3]) -> f32[3] on device random
input params : tree per worker
input grads : tree partial worker
input noise : f32[3]
state weights : tree
state moment : tree
at start {
    weights = broadcast params over worker from 0
    moment = map zeros(weights)
    output weights
}
each step {
    batch = load images batch 8 split worker visit exactly_once seed 3
    drawn = map jitter(noise)
    weights, moment = exchange grads into weights, moment with sgd over worker by sum
                      via parameter_server
    output batch, weights, drawn
}
"""
EXCHANGE = """plan owned
AXES
input params : tree per worker
input grads : tree partial OVER
state weights : tree
state moment : tree
fn zeros(tree) -> tree on device elementwise
fn sgd(tree, tree, tree) -> tree, tree on device elementwise
at start {
    weights = broadcast params over OVER from 0
    moment = map zeros(weights)
}
each step {
    weights, moment = exchange grads into weights, moment with sgd over OVER by mean VIA
    output weights
}
"""
TREE = {"w": np.zeros((3, 5), np.float32), "b": np.zeros((2,), np.float32), "s": np.zeros((), np.float32)}
SHAPES: dict[str, Any] = dict.fromkeys(("params", "grads", "weights", "moment"), TREE)
RNG = np.random.default_rng(3)
SOURCE = RNG.integers(-3, 4, (32, 3)).astype(np.float32)  # whole numbers: sums are exact in every order
BEGIN = {name: RNG.integers(-3, 4, leaf.shape).astype(np.float32) for name, leaf in TREE.items()}


def sgd(weights: Any, moment: Any, grads: Any) -> tuple[Any, Any]:
    moment = jax.tree.map(lambda m, g: 0.5 * m + g, moment, grads)
    return jax.tree.map(lambda w, m: w - 0.125 * m, weights, moment), moment


FUNCTIONS = {"zeros": lambda tree: jax.tree.map(jnp.zeros_like, tree), "sgd": sgd}


class Training:
    """A run of `TRAINING`, with an optimizer outside the plan."""

    def __init__(self, workers: int, seed: int = 5) -> None:
        jitter = lambda key, x: x + jnp.round(8 * jax.random.normal(key, x.shape))  # noqa: E731
        self.run = bind(
            TRAINING, mesh_of(worker=workers), SHAPES, seed=seed,
            sources={"images": SOURCE}, functions={**FUNCTIONS, "jitter": jitter},
        )  # fmt: skip
        self.optimizer = optax.sgd(0.5, momentum=0.5)
        self.layout = commplan.orbax.Checkpoint(self.run, scale="same", opt="same")
        self.scale = {"a": jnp.float32(1)}
        self.opt = self.optimizer.init(self.scale)
        params = {name: np.broadcast_to(leaf, (workers, *leaf.shape)) for name, leaf in BEGIN.items()}
        self.state = self.run.start(self.run.init(), params=params)[1]
        self.batches = self.run.batches("step")

        @jax.jit
        @self.run.spmd(scale="same", opt="same", images="batch", returns=("scale", "opt", "drawn"))
        def step(state, scale, opt, images):
            shape = {k: jnp.sum(images) * (1 + jnp.zeros_like(v)) for k, v in TREE.items()}
            out, state = self.run.step(state, grads=shape, noise=jnp.zeros(3))
            updates, opt = self.optimizer.update({"a": out.weights["s"]}, opt, scale)
            return state, optax.apply_updates(scale, updates), opt, out.drawn

        self.step = step

    def train(self, steps: int) -> list[Any]:
        """The results of the random function, step by step."""
        noisy: list[Any] = []
        for _ in range(steps):
            batch = next(self.batches, None) or next(iter(self.batches))  # of the next epoch
            self.state, self.scale, self.opt, loss = self.step(
                self.state, self.scale, self.opt, batch["batch"]
            )
            noisy.append(np.asarray(loss))
        return noisy

    def save(self) -> Any:
        return self.layout.save(self.state, batches=self.batches, scale=self.scale, opt=self.opt)

    def restore(self, manager: Any) -> None:
        like = self.layout.restore(scale=self.scale, opt=jax.eval_shape(self.optimizer.init, self.scale))
        restored = manager.restore(manager.latest_step(), args=like)
        self.state, self.scale, self.opt = (restored[name] for name in ("state", "scale", "opt"))
        self.batches = self.run.batches("step", state=restored["batches"])

    def close(self) -> None:
        self.batches.close()


def whole(leaf: Any, shape: tuple[int, ...]) -> Any:
    flat = np.asarray(leaf).reshape(-1)
    return flat[: int(np.prod(shape))].reshape(shape)


def equal(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_a_run_goes_on_as_if_it_had_not_ended(tmp_path: Path):
    """Bit by bit on as many devices; on fewer, where sums are exact, in all but the padding."""
    through = Training(8)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        first = through.train(3)
        manager.save(3, args=through.save())
        manager.wait_until_finished()
        continued = through.train(3)  # into the next epoch
        for workers in (8, 4, 2):
            again = Training(workers)
            again.train(1)
            again.restore(manager)
            equal(again.train(3), continued)
            equal((again.scale, again.opt), (through.scale, through.opt))
            assert type(again.opt) is type(through.opt)
            for name in ("weights", "moment"):
                for leaf, like in BEGIN.items():
                    mine, theirs = again.state[name][leaf], through.state[name][leaf]
                    np.testing.assert_array_equal(whole(mine, like.shape), whole(theirs, like.shape))
            if workers == 8:
                equal(again.state, through.state)
            assert again.state["moment"]["w"].sharding.spec == P("worker")
            assert again.state["moment"]["w"].shape == (-(-15 // workers) * workers,)
            assert int(again.state["#calls"]["step"]) == 6
            again.close()
    assert len(first) == 3
    through.close()


def owned(via: str, mesh: Any, over: str = "worker") -> Any:
    axes = "\n".join(f"axis {name} = ?" for name in over.split(", "))
    text = EXCHANGE.replace("AXES", axes).replace("OVER", over).replace("VIA", via)
    text = text.replace("tree per worker", f"tree per {over}")
    return bind(text, mesh, SHAPES, functions=FUNCTIONS)


def trained(run: Any) -> dict[str, Any]:
    """A state in which all elements differ."""
    sizes = tuple(run.mesh.shape.values())
    params = {name: np.broadcast_to(leaf, (*sizes, *leaf.shape)) for name, leaf in BEGIN.items()}
    _, state = run.start(run.init(), params=params)

    @jax.jit
    @run.spmd()
    def step(state):
        grads = {k: 1 + jnp.arange(v.size, dtype=jnp.float32).reshape(v.shape) for k, v in TREE.items()}
        return run.step(state, grads=run.varying(grads))[1]

    return step(step(state))


class Folder:
    """A folder of one checkpoint after another."""

    def __init__(self, place: Path) -> None:
        self.place, self.count = place, 0

    def save(self, args: Any) -> None:
        self.count += 1
        with ocp.Checkpointer(commplan.orbax.PlanCheckpointHandler()) as checkpointer:
            checkpointer.save(self.place / str(self.count), args=args)

    def restore(self, args: Any) -> dict[str, Any]:
        with ocp.Checkpointer(commplan.orbax.PlanCheckpointHandler()) as checkpointer:
            return checkpointer.restore(self.place / str(self.count), args=args)

    def refused(self, args: Any) -> tuple[str, str]:
        with pytest.raises(CommplanError) as error:
            self.restore(args)
        return code_of(error), str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


SHARDED, FEW = "via parameter_server", "via parameter_server(owners = 2)"
OTHERS: list[tuple[str, dict[str, int]]] = [
    (SHARDED, {"worker": 8}), (FEW, {"worker": 4}), ("via parameter_server(owners = 3)", {"worker": 8}),
    (f"{SHARDED}(within = rack)", {"rack": 2, "worker": 3}), (SHARDED, {"worker": 2}),
    (SHARDED, {"worker": 4}),
]  # fmt: skip


def test_the_state_of_an_exchange_is_cut_for_any_owners(folder: Folder):
    """From one way of owning to the next, and back to the first: not a bit is lost."""
    run = owned(SHARDED, mesh_of(worker=4))
    state = first = trained(run)
    for via, axes in OTHERS:
        folder.save(commplan.orbax.Checkpoint(run).save(state))
        run = owned(via, mesh_of(**axes), ", ".join(axes))
        state = folder.restore(commplan.orbax.Checkpoint(run).restore())["state"]
        lies = jax.tree.map(lambda x, z: x.sharding == z.sharding and x.shape == z.shape, state, run.init())
        assert jax.tree.all(lies)
        np.testing.assert_array_equal(state["weights"]["w"], first["weights"]["w"])
        assert np.count_nonzero(np.asarray(state["moment"]["w"])) == 15
    equal(state, first)


def test_what_differs_between_ranks_is_kept_on_as_many_and_refused_on_others(folder: Folder):
    def per(**sizes: int) -> Any:
        text = """plan p
axis data = ?
input x : f32[8] per data
state own : f32[8] per data
at start {
    own = swap x over data
}
each step {
    own = swap own over data
}
"""
        return bind(text, mesh_of(**sizes))

    run = per(data=4)
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    _, state = run.start({}, x=x)
    folder.save(commplan.orbax.Checkpoint(run, x="x").save(state, x=x))
    again = folder.restore(commplan.orbax.Checkpoint(per(data=4), x="x").restore())
    equal(again["state"], state)
    equal(again["x"], x)
    assert again["x"].sharding.spec == P("data")
    code, text = folder.refused(commplan.orbax.Checkpoint(per(data=2)).restore())
    assert code == "CP0871"
    assert "`own` differs on each rank, and this run has other ranks" in text
    assert "its layout was `per data = 4`, and is `per data = 2` now" in text


def test_weights_in_shards_of_layers_are_cut_again(folder: Folder):
    """Values outside the plan: placed over one axis by a written placement, with unknown whole shapes."""

    def sharded(devices: int) -> tuple[Any, Any]:
        text = "plan p\naxis data = ?\ninput x : tree partial data\neach step {\n"
        text += "    x = reduce x over data by sum\n    output x\n}\n"
        run = bind(text, mesh_of(data=devices), {"x": TREE})
        return run, commplan.orbax.Checkpoint(run, shards="split data", opt="split data")

    def cut(run: Any, ways: int) -> Any:
        padded = np.zeros(-(-15 // ways) * ways, np.float32)
        padded[:15] = np.arange(1, 16)
        return {"w": jax.device_put(padded, NamedSharding(run.mesh, P("data"))), "s": jnp.float32(2)}

    optimizer = optax.adam(1e-3)
    run, layout = sharded(8)
    shards = cut(run, 8)
    folder.save(layout.save({}, shards=shards, opt=optimizer.init(shards)))
    for ways in (4, 2):
        run, layout = sharded(ways)
        shards = cut(run, ways)
        again = folder.restore(
            layout.restore(shards=jax.tree.map(jnp.zeros_like, shards), opt=optimizer.init(shards))
        )
        equal(again["shards"], shards)
        equal(again["opt"], optimizer.init(shards))
        assert again["shards"]["w"].sharding.shard_shape((16,)) == (16 // ways,)
        assert again["opt"][0].mu["w"].sharding.spec == P("data")
    wrong = {"w": np.zeros(30, np.float32), "s": np.float32(0)}
    code, text = folder.refused(layout.restore(shards=wrong, opt=optimizer.init(shards)))
    assert (code, "no leaf can be cut into both" in text) == ("CP0870", True)


def test_a_value_of_the_plan_needs_no_example(folder: Folder):
    run = owned(SHARDED, mesh_of(worker=4))
    state = trained(run)
    layout = commplan.orbax.Checkpoint(run, mine="weights")
    folder.save(layout.save(state, mine=state["weights"]))
    again = folder.restore(layout.restore())
    equal(again["mine"], state["weights"])
    assert again["batches"] is None


def test_any_leaf_that_is_an_array_or_a_number(folder: Folder):
    run = owned(SHARDED, mesh_of(worker=2))
    layout = commplan.orbax.Checkpoint(run, v="same")
    value = {
        "key": jax.random.key(3), "none": None, "step": 12, "rate": 0.5,
        "empty": jnp.zeros((0, 3)), "narrow": jnp.ones(3, jnp.bfloat16),
    }  # fmt: skip
    folder.save(layout.save(run.init(), v=value))
    again = folder.restore(layout.restore(v=value))["v"]
    assert again["none"] is None and again["key"] == value["key"]
    assert (int(again["step"]), float(again["rate"]), again["empty"].shape) == (12, 0.5, (0, 3))
    equal(again["narrow"], value["narrow"])
    with pytest.raises(CommplanError) as error:
        layout.save(run.init(), v={"a": "text"})
    assert (code_of(error), "`v` at `a` is a str" in str(error.value)) == ("CP0811", True)


def test_a_plan_that_has_nothing_but_its_input(folder: Folder):
    text = "plan p\naxis data = 2\ninput x : f32 partial data\neach step {\n"
    run = bind(text + "    x = reduce x over data by sum\n    output x\n}\n", mesh_of(data=2))
    folder.save(commplan.orbax.Checkpoint(run).save({}, batches={"epoch": 3}))
    assert folder.restore(commplan.orbax.Checkpoint(run).restore()) == {"state": {}, "batches": {"epoch": 3}}


def test_other_runs_are_refused(folder: Folder):
    run = owned(SHARDED, mesh_of(worker=4))
    state = trained(run)
    layout = commplan.orbax.Checkpoint(run, x="same")
    folder.save(layout.save(state, batches={"step": {"epoch": 1}}, x={"a": np.zeros(3)}))

    def refused(run: Any, like: Mapping[str, Any] | None = None, **values: str) -> tuple[str, str]:
        return folder.refused(commplan.orbax.Checkpoint(run, **values).restore(**(like or {})))

    code, text = refused(run, x="same")
    assert (code, "checkpoint.restore(x=...)" in text) == ("CP0870", True)
    code, text = refused(run, {"x": {"b": np.zeros(3)}}, x="same")
    assert (code, "lacks `b`" in text, "it has `a`" in text) == ("CP0870", True, True)
    code, text = refused(run, {"x": {"a": np.zeros(4)}}, x="same")
    assert (code, "`x` at `a` has the shape [3] in the checkpoint, and [4]" in text) == ("CP0870", True)
    code, text = refused(run, {"x": {"a": np.zeros(3, np.int32)}}, x="same")
    assert (code, "`x` at `a` is float64 in the checkpoint, and int32" in text) == ("CP0870", True)
    code, text = refused(run, {"y": {"a": np.zeros(3)}}, y="same")
    assert (code, "the checkpoint has no `y`" in text) == ("CP0870", True)
    assert "`moment` and `x`" in text
    other = bind(
        EXCHANGE.replace("AXES", "axis worker = ?").replace("OVER", "worker").replace("VIA", ""),
        mesh_of(worker=4), SHAPES, functions=FUNCTIONS, seed=1,
    )  # fmt: skip
    code, text = refused(other)
    assert (code, "program.bind(mesh, seed=0)" in text) == ("CP0870", True)
    record = folder.place / "1" / "commplan.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"schema": 9}))
    assert refused(run)[0] == "CP0873"
    record.write_text("{")
    assert refused(run)[0] == "CP0873"
    record.unlink()
    code, text = refused(run)
    assert (code, "not a checkpoint of commplan" in text) == ("CP0873", True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's own tasks fail, too
def test_a_checkpoint_whose_files_are_gone(folder: Folder):
    run = owned(SHARDED, mesh_of(worker=4))
    layout = commplan.orbax.Checkpoint(run)
    folder.save(layout.save(trained(run)))
    for path in (folder.place / "1").rglob("d"):
        shutil.rmtree(path)
    code, text = folder.refused(layout.restore())
    assert (code, "cannot be read: NOT_FOUND" in text) == ("CP0873", True)
    assert "missing or damaged" in text, text
    gc.collect()


def test_arrays_that_are_others_than_the_record_says(folder: Folder):
    run = owned(SHARDED, mesh_of(worker=4))
    layout = commplan.orbax.Checkpoint(run)
    folder.save(layout.save(trained(run)))
    names = folder.place / "1" / "_METADATA"
    tree = json.loads(names.read_text())
    removed = next(name for name in tree["tree_metadata"] if "state/" in name)
    del tree["tree_metadata"][removed]
    names.write_text(json.dumps(tree))
    code, text = folder.refused(layout.restore())
    assert (code, "expected: `state/" in text, "found: none" in text) == ("CP0873", True, True)
    assert "damaged" not in text


def test_what_is_named_and_saved_agrees():
    run = owned(SHARDED, mesh_of(worker=4))

    def refused(call: Any) -> str:
        with pytest.raises(CommplanError) as error:
            call()
        return code_of(error)

    layout = commplan.orbax.Checkpoint(run, x="same")
    assert refused(lambda: commplan.orbax.Checkpoint(run, x="nothing")) == "CP0811"
    assert refused(lambda: commplan.orbax.Checkpoint(run, state="same")) == "CP0811"
    assert refused(lambda: layout.save(run.init())) == "CP0811"
    assert refused(lambda: layout.save(run.init(), x=1, y=2)) == "CP0811"
    assert refused(lambda: layout.save({}, x=1)) == "CP0812"
    assert refused(lambda: layout.restore(y=2)) == "CP0811"
    ranks: Any = SimpleNamespace(
        context=SimpleNamespace(machine=SimpleNamespace(layout="local"), fail=run.context.fail)
    )
    assert refused(lambda: commplan.orbax.Checkpoint(ranks)) == "CP0872"


def test_arrays_of_a_member_come_back_onto_its_devices(folder: Folder):
    run = bind("""plan two
ensemble member = 2
axis data = 2
input grads : tree per member partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
""", mesh_of(member=2, data=2), {"grads": TREE})  # fmt: skip
    trees: dict[str, Any] = {}
    for number, name in enumerate(("first", "second")):
        member = run.member(number)
        sharding = NamedSharding(member.mesh, P())
        trees[name] = jax.device_put({"w": np.full(4, number, np.float32), "n": np.int32(number)}, sharding)
    layout = commplan.orbax.Checkpoint(run, first="same", second="same")
    folder.save(layout.save(run.init(), **trees))
    again = folder.restore(layout.restore(**trees))
    for name, tree in trees.items():
        equal(again[name], tree)
        for leaf, expected in zip(jax.tree.leaves(again[name]), jax.tree.leaves(tree), strict=True):
            assert leaf.sharding == expected.sharding


def test_states_of_integers_and_keys_are_kept(folder: Folder):
    leaves = passed_values.leaves_of(1)
    shapes = {"mine": leaves, "held": leaves, "pairs": passed_values.pairs_of(leaves)}
    run = bind(passed_values.MOVES, mesh_of(data=2), shapes)
    mine = jax.tree.map(lambda x: jnp.stack([x, x]), leaves)
    _, state = run.start(run.init(), mine=mine)
    layout = commplan.orbax.Checkpoint(run)
    folder.save(layout.save(state))
    again = folder.restore(layout.restore())["state"]
    assert passed_values.data(again["held"]) == passed_values.data(leaves)


def test_shardings_of_values():
    run = owned(SHARDED, mesh_of(worker=4))
    moment, weights = run.sharding("moment"), run.sharding("weights")
    assert {name: sharding.spec for name, sharding in moment.items()} == {
        "w": P("worker"),
        "b": P("worker"),
        "s": P(),
    }
    assert jax.tree.all(
        jax.tree.map(lambda sharding, x: sharding == x.sharding, moment, run.init()["moment"])
    )
    assert weights["w"] == NamedSharding(run.mesh, P())
    assert run.sharding("params")["w"].spec == P("worker")
    with pytest.raises(CommplanError) as error:
        run.sharding("nothing")
    assert code_of(error) == "CP0811"
    with pytest.raises(CommplanError) as error:
        run.sharding("grads")
    assert code_of(error) == "CP0806"
