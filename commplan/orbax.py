"""Checkpoints of a run with Orbax: weights, the optimiser's state, the plan's states and the input's, in one.

checkpoint = commplan.orbax.Checkpoint(run, params="params", opt="params")    # as in run.spmd
manager = orbax.checkpoint.CheckpointManager(folder)
manager.save(step, args=checkpoint.save(state, batches=batches, params=params, opt=opt))

restored = manager.restore(step, args=checkpoint.restore(params=params, opt=opt))
state, params, opt = restored["state"], restored["params"], restored["opt"]
batches = run.batches(state=restored["batches"])
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
from jax.sharding import NamedSharding
from orbax import checkpoint as _checkpoint  # pyright: ignore[reportMissingTypeStubs]

from commplan import io
from commplan.diagnostics import fail, listed, near_note
from commplan.ir.schedule import Value
from commplan.lowering.jax.layout import global_shape, spec
from commplan.lowering.jax.pytree import Tree, build, flatten, structure_by
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.runtime.context import CALLS, Context
from commplan.runtime.phases import check_state
from commplan.runtime.saved_layout import (
    Layout,
    SavedLeaf,
    SavedValue,
    check,
    cut_again,
    is_as_saved,
    is_resized,
)
from commplan.runtime.spmd import placement_of
from commplan.tracebacks import public_face

if TYPE_CHECKING:
    from commplan.runtime.run import Bound

ocp: Any = _checkpoint
FORMAT, SCHEMA = "commplan checkpoint", 1
RECORD = "commplan.json"
_OWN = ("state", "batches")  # keys of what is restored that no value may have


class Record(msgspec.Struct):
    """What stands in `commplan.json` beside the arrays. batches: the state of `run.batches`, or of several by
    name."""

    plan: str
    seed: int
    states: dict[str, SavedValue]
    values: dict[str, SavedValue]
    batches: Any = None
    format: str = FORMAT
    schema: int = SCHEMA


@public_face
class Checkpoint:
    """What is saved of a run, and how it lies.

    values: by name what is saved beside the plan's states, each with the value of the plan that it lies like
    or a placement, as in `run.spmd(params="params", opt="params")`. `save` and `restore` give arguments for
    Orbax: `CheckpointManager.save(step, args=..)`, `Checkpointer`, or items of `args.Composite`.

    A checkpoint may be restored by a run on another number of devices or processes: what is split, the
    optimiser's state of an exchange among it, is cut again. Raises CP0811 for names that mean nothing, CP0872
    for a run on the ranks of a communicator.
    """

    def __init__(self, run: Bound, **values: str) -> None:
        self.context = run.context
        if self.context.machine.layout != "global":
            self.context.fail(
                "CP0872",
                "the run is bound to a communicator: Orbax would take each rank for the only process",
                "gather what is to be kept, and save it on one rank; or bind to a mesh of jax.distributed",
            )
        for name in _OWN:
            if name in values:
                self.context.fail("CP0811", f"no value may be called `{name}` in a checkpoint", "rename it")
        self._like = {name: self.context.schedule.named.get(text) for name, text in values.items()}
        self._placements = {
            name: placement_of(self.context, text, f"value `{name}`") for name, text in values.items()
        }

    def save(self, state: Mapping[str, Any], *, batches: Any = None, **values: Any) -> PlanSave:
        """All that is kept, as arguments for Orbax's `save`.

        state: all states of the plan. batches: what `run.batches` gave, what its `state()` returned, or
        several of them by name. values: pytrees of arrays, each one that was named. Raises CP0811 for other
        names, CP0812 for a state that lacks something.
        """
        context = self.context
        self._check_names(values, "saved")
        needed = (*context.states, *([CALLS] if context.counted else []))
        entries = check_state(context, state, "a checkpoint was given", needed)
        trees = {f"state/{name}": flatten(entries[name]) for name in needed}
        trees |= {f"value/{name}": flatten(values[name]) for name in self._placements}
        for name in self._placements:
            self._check_arrays(name, *trees[f"value/{name}"])
        record = Record(
            context.schedule.plan, context.seed,
            states={name: self._state(name, *trees[f"state/{name}"]) for name in needed},
            values={name: self._value(name, *trees[f"value/{name}"]) for name in self._placements},
            batches=_input_state(batches),
        )  # fmt: skip
        arrays = {key: _leaves(paths, tree.leaves) for key, (paths, tree) in trees.items()}
        arrays = {key: own for key, own in arrays.items() if own}
        return PlanSave(arrays or {"nothing": {"": np.zeros(1)}}, record)  # which Orbax does not take

    def restore(self, **like: Any) -> PlanRestore:
        """What is to be read, as arguments for Orbax's `restore`, which returns a dict: `state`, `batches`
        (as they were saved, or None) and every value by its name.

        like: pytrees of arrays or `jax.ShapeDtypeStruct` with the structure and global shapes of what is
        restored, such as `opt=optimizer.init(params)`; a value that lies like one of the plan, and has its
        leaves, needs none. Arrays come as the plan lays them on this mesh, or as an array in `like` lies.

        Orbax's `restore` then raises CP0870 where the checkpoint is another run's (another seed, leaves,
        shapes or types), CP0871 where a value cannot be cut for this mesh, CP0873 where there is none.
        """
        self._check_names(like, "restored", all_of_them=False)
        return PlanRestore(self, dict(like))

    def wanted(self, record: Record, like: Mapping[str, Any]) -> dict[str, _Wanted]:
        """What each entry of a checkpoint with this record should be here; raises what `restore` names."""
        context, file = self.context, self.context.schedule.file
        if record.seed != context.seed:
            message = f"the checkpoint is of a run with seed {record.seed}, and this one has {context.seed}"
            fail(
                "CP0870",
                message,
                f"program.bind(mesh, seed={record.seed}) goes on as it would have",
                file=file,
            )
        entries: dict[str, _Wanted] = {}
        for name in context.states:
            entries[f"state/{name}"] = self._wanted_state(name)
        for name in self._placements:
            entries[f"value/{name}"] = self._wanted_value(name, record.values.get(name), like.get(name))
        saved = {f"state/{n}": v for n, v in record.states.items()} | {
            f"value/{n}": v for n, v in record.values.items()
        }
        for key, entry in entries.items():
            name = key.partition("/")[2]
            if key not in saved:
                known = listed([*record.states, *record.values]) or "nothing"
                fail("CP0870", f"the checkpoint has no `{name}`", f"it has {known}", file=file)
            entry.saved = saved[key]
            check(name, entry.saved, entry.value, file)
        return entries

    def counts(self, record: Record) -> tuple[str, ...]:
        """The phases whose calls are counted here and in the checkpoint."""
        saved = record.states.get(CALLS)
        paths = {leaf.path for leaf in saved.leaves} if saved else set[str]()
        return tuple(name for name in self.context.counted if name in paths)

    def _check_names(self, values: Mapping[str, Any], verb: str, *, all_of_them: bool = True) -> None:
        unknown = [name for name in values if name not in self._placements]
        missing = [name for name in self._placements if name not in values] if all_of_them else []
        if unknown or missing:
            wrong = (
                f"{listed(unknown)} is {verb}, and was not named"
                if unknown
                else f"{listed(missing)} is missing"
            )
            known = listed(self._placements) or "no values"
            near = near_note(unknown[0], self._placements) if unknown else ()
            self.context.fail("CP0811", f"{wrong}", *near, f"Checkpoint(run, ...) names {known}")

    def _check_arrays(self, name: str, paths: Sequence[str], tree: Tree) -> None:
        for path, leaf in zip(paths, tree.leaves, strict=True):
            if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
                where = f" at `{path}`" if path else ""
                message = f"`{name}`{where} is a {type(leaf).__name__}: arrays and numbers are kept"
                self.context.fail("CP0811", message, "keep it beside, with orbax.checkpoint.args.JsonSave")

    def _state(self, name: str, paths: Sequence[str], tree: Tree) -> SavedValue:
        if name == CALLS:
            return SavedValue(
                Layout(), tuple(_leaf(path, x, ()) for path, x in zip(paths, tree.leaves, strict=True))
            )
        value = self.context.states[name]
        layout, whole = _layout_of_state(self.context, value), _whole_of_state(self.context, value)
        leaves = (_leaf(path, x, whole.get(path)) for path, x in zip(paths, tree.leaves, strict=True))
        return SavedValue(layout, tuple(leaves))

    def _value(self, name: str, paths: Sequence[str], tree: Tree) -> SavedValue:
        placement, value = self._placements[name], self._like[name]
        layout = Layout.of(placement, self.context.sizes)
        leaves: list[SavedLeaf] = []
        for path, x in zip(paths, tree.leaves, strict=True):
            shape = tuple(map(int, np.shape(x)))
            own = shape[len(placement.per) :]
            whole = own if not placement.split or not own else _whole_like(value, path, shape, self.context)
            leaves.append(_leaf(path, x, whole))
        return SavedValue(layout, tuple(leaves))

    def _wanted_state(self, name: str) -> _Wanted:
        context, value = self.context, self.context.states[name]
        whole = _whole_of_state(context, value)
        leaves = tuple(
            SavedLeaf(
                leaf.path,
                global_shape(value, leaf, context.sizes),
                leaf.dtype.numpy_name,
                whole.get(leaf.path),
            )
            for leaf in value.leaves
        )
        shardings = {leaf.path: self._sharding(value.placement, not leaf.shape) for leaf in value.leaves}
        paths = tuple(leaf.path for leaf in value.leaves)
        tree = Tree(paths, structure_by(paths, context.structures))
        return _Wanted(SavedValue(_layout_of_state(context, value), leaves), shardings, tree)

    def _wanted_value(self, name: str, saved: SavedValue | None, like: Any) -> _Wanted:
        placement, value = self._placements[name], self._like[name]
        if like is None:
            return self._wanted_like(name, value, saved)
        paths, tree = flatten(like)
        described = [x if hasattr(x, "shape") and hasattr(x, "dtype") else np.asarray(x) for x in tree.leaves]
        shardings = {path: self._sharding_of(x, placement) for path, x in zip(paths, described, strict=True)}
        return _Wanted(self._value(name, paths, tree.like(described)), shardings, tree.like(paths))

    def _wanted_like(self, name: str, value: Value | None, saved: SavedValue | None) -> _Wanted:
        """Of a value without an example: as the plan's."""
        paths = {leaf.path for leaf in value.leaves} if value else set[str]()
        if value is None or (saved is not None and {leaf.path for leaf in saved.leaves} != paths):
            self.context.fail(
                "CP0870",
                f"the plan does not tell the structure of `{name}`",
                f"give an example: checkpoint.restore({name}=...), a pytree of arrays or of their shapes",
            )
        leaves = [
            jax.ShapeDtypeStruct(
                global_shape(value, leaf, self.context.sizes), jnp.dtype(leaf.dtype.numpy_name)
            )
            for leaf in value.leaves
        ]
        tree = build([leaf.path for leaf in value.leaves], leaves, self.context.structures)
        return self._wanted_value(name, saved, tree)

    def _sharding(self, placement: Any, scalar: bool) -> NamedSharding:
        return NamedSharding(self.context.machine.mesh, spec(placement, scalar=scalar))

    def _sharding_of(self, leaf: Any, placement: Any) -> NamedSharding:
        own: Any = getattr(leaf, "sharding", None)
        devices = set(self.context.machine.mesh.devices.flat)
        if not isinstance(own, NamedSharding):
            return self._sharding(placement, len(leaf.shape) == len(placement.per))
        mesh: Any = own.mesh
        if set(mesh.devices.flat) <= devices:  # those of the run, or of a member
            return own
        return self._sharding(placement, len(leaf.shape) == len(placement.per))


@dataclasses.dataclass
class _Wanted:
    """An entry of a checkpoint as it should be here. tree: paths, in the structure that is restored."""

    value: SavedValue
    shardings: Mapping[str, NamedSharding]
    tree: Tree
    saved: SavedValue | None = None


class PlanCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Writes and reads what `Checkpoint` describes: arrays as Orbax keeps pytrees, the record as JSON."""

    def __init__(self) -> None:
        self._arrays = ocp.PyTreeCheckpointHandler()
        self._record = ocp.JsonCheckpointHandler(filename=RECORD)

    async def async_save(self, directory: Any, args: PlanSave) -> list[Any]:
        futures: list[Any] = (
            await self._arrays.async_save(directory, args=ocp.args.PyTreeSave(args.arrays)) or []
        )
        record = ocp.args.JsonSave(msgspec.to_builtins(args.record))
        return [*futures, *(await self._record.async_save(directory, args=record) or [])]

    def save(self, directory: Any, args: PlanSave) -> None:
        self._arrays.save(directory, args=ocp.args.PyTreeSave(args.arrays))
        self._record.save(directory, args=ocp.args.JsonSave(msgspec.to_builtins(args.record)))

    def restore(self, directory: Any, args: PlanRestore) -> dict[str, Any]:
        record = read(directory)
        entries = args.checkpoint.wanted(record, args.like)
        counts = args.checkpoint.counts(record)
        arrays = self._read(directory, entries, counts)
        state = {key[6:]: entry for key, entry in arrays.items() if key.startswith("state/")}
        if args.checkpoint.context.counted:
            state[CALLS] = args.checkpoint.context.no_calls() | state.get(CALLS, {})
        values = {key[6:]: entry for key, entry in arrays.items() if key.startswith("value/")}
        return {"state": state, "batches": record.batches, **values}

    def _read(self, directory: Any, entries: Mapping[str, _Wanted], counts: Sequence[str]) -> dict[str, Any]:
        how = {key: {leaf.path: _how(entry, leaf) for leaf in entry.value.leaves if math.prod(leaf.shape)}
               for key, entry in entries.items()}  # fmt: skip
        if counts:
            how[f"state/{CALLS}"] = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in counts}
        how = {key: own for key, own in how.items() if own}
        item = {key: dict.fromkeys(own, 0) for key, own in how.items()}
        restore = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        arrays: dict[str, dict[str, Any]] = {}
        if how:
            try:
                arrays = self._arrays.restore(directory, args=restore)
                if any(isinstance(leaf, int) for own in arrays.values() for leaf in own.values()):
                    raise ValueError("it lacks some of them")  # Orbax leaves those as they were asked for
            except (OSError, ValueError, KeyError) as error:
                reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
                message = f"the arrays of the checkpoint {directory} cannot be read: {reason}"
                fail("CP0873", message, *self._differences(directory, entries), "restore an earlier step")
        result: dict[str, Any] = {}
        if counts:
            result[f"state/{CALLS}"] = {
                name: jnp.asarray(array, jnp.int32) for name, array in arrays[f"state/{CALLS}"].items()
            }
        for key, entry in entries.items():
            own, leaves = arrays.get(key, {}), {leaf.path: leaf for leaf in entry.value.leaves}
            placed = {path: _placed(own.get(path), entry, leaf) for path, leaf in leaves.items()}
            result[key] = entry.tree.like([placed[path] for path in entry.tree.leaves]).build()
        return result

    def _differences(self, directory: Any, entries: Mapping[str, _Wanted]) -> tuple[str, ...]:
        """Where the arrays in a folder are not those that its record says: the first such place; and what
        else may be wrong where there is none."""
        try:
            tree = self._arrays.metadata(directory).tree
        except Exception as error:  # noqa: BLE001  Orbax says in many ways that it cannot read them
            return (f"files of it are missing or damaged: its list of arrays raises {type(error).__name__}",)
        for key, entry in entries.items():
            for leaf in entry.saved.leaves if entry.saved is not None else ():
                stored = tree.get(key, {}).get(leaf.path)
                if math.prod(leaf.shape) and stored is None:
                    return (
                        f"expected: `{key}` at `{leaf.path}`, {leaf.dtype}{list(leaf.shape)}",
                        "found: none",
                    )
                if leaf.dtype.startswith("key"):  # keys of random numbers, saved as numbers
                    continue
                if stored is not None and (str(stored.dtype), *stored.shape) != (leaf.dtype, *leaf.shape):
                    expected = f"expected: `{key}` at `{leaf.path}`, {leaf.dtype}{list(leaf.shape)}"
                    return (expected, f"found: {stored.dtype}{list(stored.shape)}")
        return ("it lists the arrays that were expected: files of them are missing or damaged",)

    def finalize(self, directory: Any) -> None:
        self._arrays.finalize(directory)

    def close(self) -> None:
        self._arrays.close()


@ocp.args.register_with_handler(PlanCheckpointHandler, for_save=True)
@dataclasses.dataclass
class PlanSave(ocp.args.CheckpointArgs):
    """What `Checkpoint.save` returns. arrays: by entry and path of the leaf."""

    arrays: dict[str, dict[str, Any]]
    record: Record


@ocp.args.register_with_handler(PlanCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class PlanRestore(ocp.args.CheckpointArgs):
    """What `Checkpoint.restore` returns."""

    checkpoint: Checkpoint
    like: dict[str, Any]


def read(directory: Any) -> Record:
    """The record of the checkpoint in a folder. Raises CP0873 where there is none that can be read."""
    place = Path(str(directory)) / RECORD
    try:
        is_remote = "://" in str(directory)  # in a bucket, which `etils.epath` reads
        data: bytes = (directory / RECORD).read_bytes() if is_remote else io.read(place)
        record = io.decode_json(data, Record)
    except FileNotFoundError:
        fail("CP0873", f"{directory} holds no checkpoint of commplan", f"there is no `{RECORD}` in it")
    except (ValueError, OSError) as error:
        fail("CP0873", f"{place} cannot be read: {error}", "it was written by another program, or is damaged")
    if (record.format, record.schema) != (FORMAT, SCHEMA):
        message = f"{place} has schema {record.schema} of `{record.format}`, and this commplan reads {SCHEMA}"
        fail("CP0873", message, "restore it with the version of commplan that wrote it")
    return record


def _input_state(batches: Any) -> Any:
    """The state of batches, of several by name, or what `state()` returned already."""
    if hasattr(batches, "state"):
        return batches.state()
    if isinstance(batches, Mapping):
        own = cast("Mapping[str, Any]", batches)
        return {name: _input_state(entry) for name, entry in own.items()}
    return batches


def _leaves(paths: Sequence[str], leaves: Sequence[Any]) -> dict[str, Any]:
    """What Orbax is given; it does not take arrays without elements, which hold nothing."""
    return {path: _whole_array(x) for path, x in zip(paths, leaves, strict=True) if np.size(x)}


def _whole_array(leaf: Any) -> Any:
    """An array that Orbax takes: of several processes, what each has alone is the same on all."""
    if isinstance(leaf, jax.Array) and (jax.process_count() == 1 or not leaf.is_fully_addressable):
        return leaf
    return np.asarray(leaf)


def _leaf(path: str, leaf: Any, whole: tuple[int, ...] | None) -> SavedLeaf:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return SavedLeaf(path, tuple(map(int, np.shape(leaf))), str(dtype), whole)


def _layout_of_state(context: Context, value: Value) -> Layout:
    shards = {shard.state: shard.ownership for shard in context.schedule.state_shards}
    owners = shards[value.id].owners if value.id in shards else ()
    return Layout.of(value.placement, context.sizes, owners)


def _whole_of_state(context: Context, value: Value) -> dict[str, tuple[int, ...]]:
    """The shapes of a state's leaves before any cut, by path."""
    origin = context.schedule.origin
    known = {own.id: own for own in origin.values} if origin else {}
    return {leaf.path: leaf.shape for leaf in known.get(value.id, value).uncut}


def _whole_like(
    value: Value | None, path: str, shape: tuple[int, ...], context: Context
) -> tuple[int, ...] | None:
    """The shape before it was cut of a leaf that lies like a leaf of `value`: `mu/dense/w` like `dense/w`."""
    if value is None:
        return None
    alike = [
        whole.shape
        for leaf, whole in zip(value.leaves, value.uncut, strict=True)
        if f"/{path}".endswith(f"/{leaf.path}") and global_shape(value, leaf, context.sizes) == shape
    ]
    return alike[0] if alike else None


def _how(entry: _Wanted, leaf: SavedLeaf) -> Any:
    """How Orbax is to read a leaf: onto the devices, or where it is to be cut again into memory."""
    assert entry.saved is not None
    saved = next(own for own in entry.saved.leaves if own.path == leaf.path)
    before, now = entry.saved.layout, entry.value.layout
    sharding = entry.shardings[leaf.path]
    if is_as_saved(
        saved, leaf, before, now
    ):  # keys of random numbers among them, whose data has another shape
        return ocp.ArrayRestoreArgs(sharding=sharding)
    if is_resized(saved, leaf, before, now):
        return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, strict=False)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _placed(array: Any, entry: _Wanted, leaf: SavedLeaf) -> Any:
    """What Orbax has read as an array of this mesh."""
    assert entry.saved is not None
    if isinstance(array, jax.Array):
        return array
    saved = next(own for own in entry.saved.leaves if own.path == leaf.path)
    if array is None:
        host = np.zeros(leaf.shape, jnp.dtype(leaf.dtype))
    else:
        host = cut_again(np.asarray(array), saved, leaf, entry.saved.layout, entry.value.layout)

    def part(index: Any) -> Any:
        return host[index]

    return jax.make_array_from_callback(leaf.shape, entry.shardings[leaf.path], part)
