"""Orbax checkpoints of a run: weights, optimizer state, states of the plan and position of the input.

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

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import NamedSharding
from orbax import checkpoint as _checkpoint  # pyright: ignore[reportMissingTypeStubs]

from commplan import io
from commplan.diagnostics import fail, listed, near_note, type_of
from commplan.ir.schedule import Value
from commplan.lowering.jax.layout import global_shape, spec
from commplan.lowering.jax.pytree import Tree, build, flatten, structure_by
from commplan.runtime.context import CALLS, Context
from commplan.runtime.saved_layout import (
    SavedLayout,
    SavedLeaf,
    SavedValue,
    check,
    cut_again,
    is_as_saved,
    is_resized,
)
from commplan.runtime.spmd import placement_of
from commplan.runtime.state_check import check_state
from commplan.tracebacks import public_face

if TYPE_CHECKING:
    from commplan.runtime.run import TypedRun

ocp: Any = _checkpoint  # untyped
FORMAT = "commplan checkpoint"  # `format` of the record
SCHEMA = 1  # `schema` of the record
RECORD = "commplan.json"  # file name of the record in the checkpoint's folder
_RESERVED = ("state", "batches")  # keys of the restored dict that values must not use


class CheckpointRecord(msgspec.Struct):
    """The content of `commplan.json`.

    Attributes:
        plan: name of the plan.
        seed: seed of the run.
        states: layouts and leaves of the plan's states and of the counts of calls, by name.
        values: layouts and leaves of the other values, by name.
        batches: the state of `run.batches`, or of several by name; None without saved batches.
        format: always `FORMAT`.
        schema: version of this format.
    """

    plan: str
    seed: int
    states: dict[str, SavedValue]
    values: dict[str, SavedValue]
    batches: Any = None
    format: str = FORMAT
    schema: int = SCHEMA


@public_face
class Checkpoint:
    """The values of a run to be saved, and their layout.

    `save` and `restore` return arguments for Orbax: for `CheckpointManager.save(step, args=..)`,
    `Checkpointer`, or items of `args.Composite`. A checkpoint may be restored on another number of devices or
    processes; split values, including the optimizer state of an exchange, are split again.

    Args:
        run: the bound program.
        values: the values to save in addition to the states of the plan. Each has a placement, or the name of
            a value of the plan with the same layout, as in `run.spmd(params="params", opt="params")`.

    Raises:
        CommplanError: CP0811 for unknown names, CP0872 for a run bound to a communicator.
    """

    def __init__(self, run: TypedRun, **values: str) -> None:
        self.context = run.context
        if self.context.machine.layout != "global":
            self.context.fail(
                "CP0872",
                "the run is bound to a communicator: Orbax would take each rank for the only process",
                "gather the values, and save them on one rank; or bind to a mesh of jax.distributed",
            )
        for name in _RESERVED:
            if name in values:
                self.context.fail("CP0811", f"`{name}` is a reserved name in checkpoints", "rename it")
        self._like = {name: self.context.schedule.named.get(text) for name, text in values.items()}
        self._placements = {
            name: placement_of(self.context, text, f"value `{name}`") for name, text in values.items()
        }

    def save(self, state: Mapping[str, Any], *, batches: Any = None, **values: Any) -> PlanSave:
        """Return arguments for Orbax's `save`.

        Args:
            state: all states of the plan.
            batches: the result of `run.batches`, its `state()`, several of them by name, or None.
            values: pytrees of arrays, one for each declared value.

        Raises:
            CommplanError: CP0811 for other names or leaves, CP0812 for an incomplete state.
        """
        context = self.context
        self._check_names(values, "saved")
        needed = (*context.states, *([CALLS] if context.counted else []))
        entries = check_state(context, state, "a checkpoint was given", needed)
        trees = {f"state/{name}": flatten(entries[name]) for name in needed}
        trees |= {f"value/{name}": flatten(values[name]) for name in self._placements}
        for name in self._placements:
            self._check_arrays(name, *trees[f"value/{name}"])
        record = CheckpointRecord(
            context.schedule.plan, context.seed,
            states={name: self._state(name, *trees[f"state/{name}"]) for name in needed},
            values={name: self._value(name, *trees[f"value/{name}"]) for name in self._placements},
            batches=_input_state(batches),
        )  # fmt: skip
        arrays = {key: _leaves(paths, tree.leaves) for key, (paths, tree) in trees.items()}
        arrays = {key: entry_arrays for key, entry_arrays in arrays.items() if entry_arrays}
        return PlanSave(arrays or {"nothing": {"": np.zeros(1)}}, record)  # Orbax rejects empty trees

    def restore(self, **like: Any) -> PlanRestore:
        """Return arguments for Orbax's `restore`.

        Orbax then returns a dict with `state`, `batches` (as saved, or None) and every value by name. Arrays
        have the plan's sharding on this mesh, or that of an array in `like`. Orbax's `restore` raises CP0870
        if the checkpoint is of another run (other seed, leaves, shapes or dtypes), CP0871 if a value cannot
        be split for this mesh, and CP0873 if there is no checkpoint.

        Args:
            like: pytrees of arrays or `jax.ShapeDtypeStruct` with the structure and the global shapes to
                restore, such as `opt=optimizer.init(params)`. A value with the layout and the leaves of a
                value of the plan needs none.
        """
        self._check_names(like, "restored", all_of_them=False)
        return PlanRestore(self, dict(like))

    def targets(self, record: CheckpointRecord, like: Mapping[str, Any]) -> dict[str, _Target]:
        """The targets of the entries `state/NAME` and `value/NAME`. Raises as `restore` documents."""
        context, file = self.context, self.context.schedule.file
        if record.seed != context.seed:
            message = f"the checkpoint is of a run with seed {record.seed}, and this one has {context.seed}"
            note = f"program.bind(mesh, seed={record.seed}) continues the saved run"
            fail("CP0870", message, note, file=file)
        entries = {f"state/{name}": self._target_of_state(name) for name in context.states}
        for name in self._placements:
            entries[f"value/{name}"] = self._target_of_value(name, record.values.get(name), like.get(name))
        saved = {f"state/{name}": value for name, value in record.states.items()}
        saved |= {f"value/{name}": value for name, value in record.values.items()}
        for key, entry in entries.items():
            name = key.partition("/")[2]
            if key not in saved:
                saved_names = listed([*record.states, *record.values]) or "nothing"
                fail("CP0870", f"the checkpoint has no `{name}`", f"it has {saved_names}", file=file)
            entry.saved = saved[key]
            check(name, entry.saved, entry.value, file)
        return entries

    def counts(self, record: CheckpointRecord) -> tuple[str, ...]:
        """The phases whose calls are counted both in this run and in the checkpoint."""
        saved = record.states.get(CALLS)
        paths = {leaf.path for leaf in saved.leaves} if saved else set[str]()
        return tuple(name for name in self.context.counted if name in paths)

    def _check_names(self, values: Mapping[str, Any], verb: str, *, all_of_them: bool = True) -> None:
        unknown = [name for name in values if name not in self._placements]
        missing = [name for name in self._placements if name not in values] if all_of_them else []
        if unknown or missing:
            message, near = f"{listed(missing)} is missing", ()
            if unknown:
                message = f"{listed(unknown)} is {verb}, but was not declared"
                near = near_note(unknown[0], self._placements)
            declared = listed(self._placements) or "no values"
            self.context.fail("CP0811", message, *near, f"Checkpoint(run, ...) declares {declared}")

    def _check_arrays(self, name: str, paths: Sequence[str], tree: Tree) -> None:
        for path, leaf in zip(paths, tree.leaves, strict=True):
            if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
                location = f" at `{path}`" if path else ""
                message = f"`{name}`{location} is {type_of(leaf)}: only arrays and numbers are saved"
                self.context.fail("CP0811", message, "save it separately: orbax.checkpoint.args.JsonSave")

    def _state(self, name: str, paths: Sequence[str], tree: Tree) -> SavedValue:
        if name == CALLS:
            return SavedValue(
                SavedLayout(), tuple(_leaf(path, x, ()) for path, x in zip(paths, tree.leaves, strict=True))
            )
        value = self.context.states[name]
        layout, whole = _layout_of_state(self.context, value), _whole_of_state(self.context, value)
        leaves = (_leaf(path, x, whole.get(path)) for path, x in zip(paths, tree.leaves, strict=True))
        return SavedValue(layout, tuple(leaves))

    def _value(self, name: str, paths: Sequence[str], tree: Tree) -> SavedValue:
        placement, value = self._placements[name], self._like[name]
        layout = SavedLayout.of_placement(placement, self.context.sizes)
        leaves: list[SavedLeaf] = []
        for path, x in zip(paths, tree.leaves, strict=True):
            shape = tuple(map(int, np.shape(x)))
            local = shape[len(placement.per) :]
            whole = (
                local if not placement.split or not local else _whole_like(value, path, shape, self.context)
            )
            leaves.append(_leaf(path, x, whole))
        return SavedValue(layout, tuple(leaves))

    def _target_of_state(self, name: str) -> _Target:
        context, value = self.context, self.context.states[name]
        whole = _whole_of_state(context, value)
        shapes = {leaf.path: global_shape(value, leaf, context.sizes) for leaf in value.leaves}
        leaves = tuple(
            SavedLeaf(leaf.path, shapes[leaf.path], leaf.dtype.numpy_name, whole.get(leaf.path))
            for leaf in value.leaves
        )
        shardings = {leaf.path: self._sharding(value.placement, not leaf.shape) for leaf in value.leaves}
        paths = tuple(leaf.path for leaf in value.leaves)
        tree = Tree(paths, structure_by(paths, context.structures))
        return _Target(SavedValue(_layout_of_state(context, value), leaves), shardings, tree)

    def _target_of_value(self, name: str, saved: SavedValue | None, like: Any) -> _Target:
        placement, value = self._placements[name], self._like[name]
        if like is None:
            return self._target_of_plan_value(name, value, saved)
        paths, tree = flatten(like)
        described = [x if hasattr(x, "shape") and hasattr(x, "dtype") else np.asarray(x) for x in tree.leaves]
        shardings = {path: self._sharding_of(x, placement) for path, x in zip(paths, described, strict=True)}
        return _Target(self._value(name, paths, tree.like(described)), shardings, tree.like(paths))

    def _target_of_plan_value(self, name: str, value: Value | None, saved: SavedValue | None) -> _Target:
        """The target of a value without an example: that of the plan's value."""
        paths = {leaf.path for leaf in value.leaves} if value else set[str]()
        if value is None or (saved is not None and {leaf.path for leaf in saved.leaves} != paths):
            self.context.fail(
                "CP0870",
                f"the plan does not define the structure of `{name}`",
                f"pass an example: checkpoint.restore({name}=...), a pytree of arrays or of their shapes",
            )
        leaves = [
            jax.ShapeDtypeStruct(
                global_shape(value, leaf, self.context.sizes), jnp.dtype(leaf.dtype.numpy_name)
            )
            for leaf in value.leaves
        ]
        tree = build([leaf.path for leaf in value.leaves], leaves, self.context.structures)
        return self._target_of_value(name, saved, tree)

    def _sharding(self, placement: Any, scalar: bool) -> NamedSharding:
        return NamedSharding(self.context.machine.mesh, spec(placement, scalar=scalar))

    def _sharding_of(self, leaf: Any, placement: Any) -> NamedSharding:
        sharding: Any = getattr(leaf, "sharding", None)
        devices = set(self.context.machine.mesh.devices.flat)
        if not isinstance(sharding, NamedSharding):
            return self._sharding(placement, len(leaf.shape) == len(placement.per))
        mesh: Any = sharding.mesh
        if set(mesh.devices.flat) <= devices:  # devices of the run, or of a member
            return sharding
        return self._sharding(placement, len(leaf.shape) == len(placement.per))


@dataclasses.dataclass
class _Target:
    """The arrays that an entry of a checkpoint is restored to.

    Attributes:
        value: layout and leaves on this mesh.
        shardings: the sharding of each leaf, by path.
        tree: the structure to restore, with paths as leaves.
        saved: layout and leaves in the checkpoint; None until `Checkpoint.targets` sets it.
    """

    value: SavedValue
    shardings: Mapping[str, NamedSharding]
    tree: Tree
    saved: SavedValue | None = None


class PlanCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Writes and reads checkpoints: arrays as Orbax pytrees, and the record as JSON."""

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
        entries = args.checkpoint.targets(record, args.like)
        counts = args.checkpoint.counts(record)
        arrays = self._read(directory, entries, counts)
        state = {key[6:]: entry for key, entry in arrays.items() if key.startswith("state/")}
        if args.checkpoint.context.counted:
            state[CALLS] = args.checkpoint.context.no_calls() | state.get(CALLS, {})
        values = {key[6:]: entry for key, entry in arrays.items() if key.startswith("value/")}
        return {"state": state, "batches": record.batches, **values}

    def _read(self, directory: Any, entries: Mapping[str, _Target], counts: Sequence[str]) -> dict[str, Any]:
        args = {
            key: {x.path: _restore_args(entry, x) for x in entry.value.leaves if math.prod(x.shape)}
            for key, entry in entries.items()
        }
        if counts:
            args[f"state/{CALLS}"] = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in counts}
        args = {key: leaf_arrays for key, leaf_arrays in args.items() if leaf_arrays}
        item = {key: dict.fromkeys(leaf_arrays, 0) for key, leaf_arrays in args.items()}
        restore = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
        arrays: dict[str, dict[str, Any]] = {}
        if args:
            try:
                arrays = self._arrays.restore(directory, args=restore)
                leaves = (leaf for leaves in arrays.values() for leaf in leaves.values())
                # Orbax returns the placeholders of missing arrays.
                if any(isinstance(leaf, int) for leaf in leaves):
                    raise ValueError("some arrays are missing")
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
            leaf_arrays, leaves = arrays.get(key, {}), {leaf.path: leaf for leaf in entry.value.leaves}
            placed = {path: _placed(leaf_arrays.get(path), entry, leaf) for path, leaf in leaves.items()}
            result[key] = entry.tree.like([placed[path] for path in entry.tree.leaves]).build()
        return result

    def _differences(self, directory: Any, entries: Mapping[str, _Target]) -> tuple[str, ...]:
        """Describe the first array that differs from the record, or else other possible damage."""
        try:
            tree = self._arrays.metadata(directory).tree
        except Exception as error:  # noqa: BLE001  Orbax raises many types of errors
            return (f"files are missing or damaged: its list of arrays raises {type(error).__name__}",)
        for key, entry in entries.items():
            for leaf in entry.saved.leaves if entry.saved is not None else ():
                stored = tree.get(key, {}).get(leaf.path)
                expected = f"expected: `{key}` at `{leaf.path}`, {leaf.dtype}{list(leaf.shape)}"
                if math.prod(leaf.shape) and stored is None:
                    return (expected, "found: none")
                if leaf.dtype.startswith("key"):  # random keys are saved as integers
                    continue
                if stored is not None and (str(stored.dtype), *stored.shape) != (leaf.dtype, *leaf.shape):
                    return (expected, f"found: {stored.dtype}{list(stored.shape)}")
        return ("its list of arrays is as expected, but some of their files are missing or damaged",)

    def finalize(self, directory: Any) -> None:
        self._arrays.finalize(directory)

    def close(self) -> None:
        self._arrays.close()


@ocp.args.register_with_handler(PlanCheckpointHandler, for_save=True)
@dataclasses.dataclass
class PlanSave(ocp.args.CheckpointArgs):
    """The result of `Checkpoint.save`: `arrays` by entry and path of the leaf, and the record."""

    arrays: dict[str, dict[str, Any]]
    record: CheckpointRecord


@ocp.args.register_with_handler(PlanCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class PlanRestore(ocp.args.CheckpointArgs):
    """The result of `Checkpoint.restore`. `like`: example trees by name of the value."""

    checkpoint: Checkpoint
    like: dict[str, Any]


def read(directory: Any) -> CheckpointRecord:
    """Read the record of a checkpoint. Raises CP0873 if there is none, or if it is invalid."""
    path = Path(str(directory)) / RECORD
    try:
        is_remote = "://" in str(directory)  # an object store, read by `etils.epath`
        data: bytes = (directory / RECORD).read_bytes() if is_remote else io.read(path)
        record = io.decode_json(data, CheckpointRecord)
    except FileNotFoundError:
        fail("CP0873", f"{directory} is not a checkpoint of commplan", f"it has no file `{RECORD}`")
    except (ValueError, OSError) as error:
        fail("CP0873", f"{path} cannot be read: {error}", "it was written by another program, or is damaged")
    if (record.format, record.schema) != (FORMAT, SCHEMA):
        message = f"{path} has schema {record.schema} of `{record.format}`, and this commplan reads {SCHEMA}"
        fail("CP0873", message, "restore it with the version of commplan that wrote it")
    return record


def _input_state(batches: Any) -> Any:
    """The state to save for `batches`, as in `Checkpoint.save`; a state is returned as it is."""
    if hasattr(batches, "state"):
        return batches.state()
    if isinstance(batches, Mapping):
        by_name = cast("Mapping[str, Any]", batches)
        return {name: _input_state(entry) for name, entry in by_name.items()}
    return batches


def _leaves(paths: Sequence[str], leaves: Sequence[Any]) -> dict[str, Any]:
    """The arrays for Orbax, which does not accept arrays without elements."""
    return {path: _whole_array(x) for path, x in zip(paths, leaves, strict=True) if np.size(x)}


def _whole_array(leaf: Any) -> Any:
    """An array that Orbax accepts. With several processes, process-local arrays are equal on all."""
    if isinstance(leaf, jax.Array) and (jax.process_count() == 1 or not leaf.is_fully_addressable):
        return leaf
    return np.asarray(leaf)


def _leaf(path: str, leaf: Any, whole: tuple[int, ...] | None) -> SavedLeaf:
    """The record of an array or number. `whole`: its shape before splits, if known."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return SavedLeaf(path, tuple(map(int, np.shape(leaf))), str(dtype), whole)


def _layout_of_state(context: Context, value: Value) -> SavedLayout:
    shards = {shard.state: shard.ownership for shard in context.schedule.state_shards}
    owners = shards[value.id].owners if value.id in shards else ()
    return SavedLayout.of_placement(value.placement, context.sizes, owners)


def _whole_of_state(context: Context, value: Value) -> dict[str, tuple[int, ...]]:
    """The shapes of a state's leaves before splits, by path."""
    origin = context.schedule.origin
    original = {original_value.id: original_value for original_value in origin.values} if origin else {}
    return {leaf.path: leaf.shape for leaf in original.get(value.id, value).uncut}


def _whole_like(
    value: Value | None, path: str, shape: tuple[int, ...], context: Context
) -> tuple[int, ...] | None:
    """The unsplit shape of a leaf that corresponds to a leaf of `value`, as `mu/dense/w` to `dense/w`."""
    if value is None:
        return None
    shapes = [
        whole.shape
        for leaf, whole in zip(value.leaves, value.uncut, strict=True)
        if f"/{path}".endswith(f"/{leaf.path}") and global_shape(value, leaf, context.sizes) == shape
    ]
    return shapes[0] if shapes else None


def _restore_args(entry: _Target, leaf: SavedLeaf) -> Any:
    """The Orbax arguments for reading a leaf: onto devices, or into memory if it must be split again."""
    assert entry.saved is not None
    saved = next(candidate for candidate in entry.saved.leaves if candidate.path == leaf.path)
    before, now = entry.saved.layout, entry.value.layout
    sharding = entry.shardings[leaf.path]
    if is_as_saved(saved, leaf, before, now):  # includes random keys, whose data has another shape
        return ocp.ArrayRestoreArgs(sharding=sharding)
    if is_resized(saved, leaf, before, now):
        return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, strict=False)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _placed(array: Any, entry: _Target, leaf: SavedLeaf) -> Any:
    """Convert an array read by Orbax to an array on this mesh; None for a leaf without elements."""
    assert entry.saved is not None
    if isinstance(array, jax.Array):
        return array
    saved = next(candidate for candidate in entry.saved.leaves if candidate.path == leaf.path)
    if array is None:
        host = np.zeros(leaf.shape, jnp.dtype(leaf.dtype))
    else:
        host = cut_again(np.asarray(array), saved, leaf, entry.saved.layout, entry.value.layout)

    def part(index: Any) -> Any:
        return host[index]

    return jax.make_array_from_callback(leaf.shape, entry.shardings[leaf.path], part)
