"""Compare values that must be equal on several processes, by checksums, before a step first runs.

A checksum covers the bits of a leaf and their order; all NaN count as equal. On CPUs it reads the memory of
the array; on other backends large leaves are summed on the device that holds them.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import Signature
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax

from commplan.diagnostics import fail
from commplan.ir.types import Placement
from commplan.lowering.jax.pytree import flatten

_ON_DEVICE = 1 << 16  # Leaves of this many bytes or more are summed on the device.
_BLOCK = 1 << 18  # The number of elements that are summed at once on the host.
# By type: the unsigned type of the same width, and the bits of infinity. Without the sign, those of NaN are
# greater.
_NAN: dict[str, tuple[Any, int]] = {
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float32": (np.uint32, 0x7F800000),
    "float64": (np.uint64, 0x7FF0000000000000),
}
_NARROW = re.compile(r"u?int[124]$|float4")  # Types with several elements in a byte.
_HOST = (np.ndarray, np.generic, bool, int, float, complex)  # The types of leaves on the host.
_SHOWN = 3  # The most elements, and processes that differ, in a message.
_THREADS = 8  # The number of threads that compute checksums.


class Declared(NamedTuple):
    """The parameters of a step under `run.spmd`.

    Attributes:
        signature: The signature of the step.
        state: The name of the first parameter.
        placements: The placements of the other declared parameters, by name.
        states: The placements of the plan's states, by name.
    """

    signature: Signature
    state: str
    placements: Mapping[str, Placement]
    states: Mapping[str, Placement]


class NamedLeaf(NamedTuple):
    """A leaf of an argument.

    Attributes:
        name: The name of the leaf, for messages.
        leaf: An array, or a number of Python.
        placement: The declared placement; None if the step declares none.
    """

    name: str
    leaf: Any
    placement: Placement | None


class Copies(NamedTuple):
    """The copies of a leaf, or of a piece of one, that this process holds.

    Attributes:
        name: The name of the leaf, for messages.
        holders: The numbers of the processes that hold a copy, in increasing order.
        arrays: The copies of this process, at least one, by the name of the device. The name is "" for an
            array of the host, and under MPI.
    """

    name: str
    holders: tuple[int, ...]
    arrays: Mapping[str, Any]


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a process.

    Attributes:
        sums: By the text of `Copies.holders`, a digest of the checksums of all copies with these holders.
        wrong: A message about a leaf that differs between devices of this process, or "".
    """

    sums: dict[str, str] = {}
    wrong: str = ""


class ChecksumTable(msgspec.Struct, frozen=True, array_like=True):
    """The second message of a process, if digests differ.

    Attributes:
        rows: The name, the holders, the checksum and the first elements of each of its `Copies`, as texts.
    """

    rows: tuple[tuple[str, str, str, str], ...] = ()


def named_leaves(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[NamedLeaf]:
    """The leaves of the arguments of a step, with their placements if `run.spmd` declares them.

    Leaves without elements, donated arrays, and other objects than arrays and numbers are left out.

    Args:
        function: The step. It has an attribute `declared` if `run.spmd` decorates it.
        args: The positional arguments of a call.
        kwargs: The keyword arguments of the call.
    """
    declared: Declared | None = getattr(function, "declared", None)
    try:
        arguments = None if declared is None else dict(declared.signature.bind(*args, **kwargs).arguments)
    except TypeError:  # The arguments do not fit: they are those of a function around the step.
        arguments = None
    if declared is None or arguments is None:
        for path, leaf in jax.tree_util.tree_leaves_with_path((*args, dict(kwargs))):
            if _is_array(leaf):
                yield NamedLeaf(f"argument {jax.tree_util.keystr(path)}", leaf, None)
        return
    state: Mapping[str, Any] = arguments.get(declared.state) or {}
    trees = [(name, state[name], placement) for name, placement in declared.states.items() if name in state]
    trees += [
        (name, arguments[name], placement)
        for name, placement in declared.placements.items()
        if name in arguments
    ]
    for name, tree, placement in trees:
        paths, flat = flatten(tree)
        for path, leaf in zip(paths, flat.leaves, strict=True):
            if _is_array(leaf):
                yield NamedLeaf(f"leaf `{path}` of `{name}`" if path else f"`{name}`", leaf, placement)


def check_copies(
    copies: Sequence[Copies], exchange: Callable[[Any], Mapping[int, Any]], noun: str, file: str
) -> None:
    """Compare the copies of all processes.

    Args:
        copies: The copies of this process. Processes that hold the same leaves list them in the same order.
        exchange: Returns the values of all processes, by number; all of them call this function.
        noun: The noun for a process in messages, such as `rank`.
        file: The plan's file, for errors.

    Raises:
        CommplanError: CP0861, on all processes, if a leaf differs between processes, or between devices of
            one process.
    """
    # Compare the devices of this process. Threads do not inherit the caller's context, such as a mesh.
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(lambda leaf: [_checksum(x) for x in leaf.arrays.values()], copies))
    unequal = (pair for pair in zip(copies, sums, strict=True) if len({*pair[1]}) > 1)
    wrong = next((_differing(*pair) for pair in unequal), "")

    # Compare processes by one digest for each set of holders.
    groups: dict[str, Any] = {}
    for leaf, checksums_of_leaf in zip(copies, sums, strict=True):
        if len(leaf.holders) > 1:
            groups.setdefault(str(leaf.holders), hashlib.sha256()).update(checksums_of_leaf[0].encode())
    answers = exchange(Sums({key: group.hexdigest() for key, group in groups.items()}, wrong))
    fix = (
        f"every {noun} must hold the same value: take it from one seed, one file, or a broadcast of the plan"
    )
    option = "run.jit(.., check_same=False) leaves this check out"
    for number, answer in sorted(answers.items()):
        if answer.wrong:
            fail("CP0861", f"{answer.wrong} of {noun} {number}", fix, option, file=file)
    digests: dict[str, set[str]] = {}
    for answer in answers.values():
        for key, digest in answer.sums.items():
            digests.setdefault(key, set()).add(digest)
    if all(len(values) == 1 for values in digests.values()):
        return

    # Find the first leaf that differs. Its pieces with the same holders are numbered in order.
    rows = tuple(
        (leaf.name, str(leaf.holders), checksums_of_leaf[0], _sample(next(iter(leaf.arrays.values()))))
        for leaf, checksums_of_leaf in zip(copies, sums, strict=True)
        if len(leaf.holders) > 1
    )
    tables = exchange(ChecksumTable(rows))
    pieces: dict[tuple[str, str, int], dict[int, tuple[str, str]]] = {}
    for number, table in sorted(tables.items()):
        counts: dict[tuple[str, str], int] = {}
        for name, holders, checksum, sample in table.rows:
            index = counts.get((name, holders), 0)
            counts[name, holders] = index + 1
            pieces.setdefault((name, holders, index), {})[number] = (checksum, sample)
    for (name, _, _), copies_of_piece in pieces.items():
        first, *other_numbers = copies_of_piece
        differing = [n for n in other_numbers if copies_of_piece[n][0] != copies_of_piece[first][0]]
        if differing:
            shown = [f"{noun} {n}: {copies_of_piece[n][1]}" for n in (first, *differing[:_SHOWN])]
            count = f"{len(differing)} of {len(copies_of_piece)}"
            more = [f"it differs from {noun} {first} on {count}"] if len(differing) > _SHOWN else []
            message = f"{name} differs between {noun} {first} and {noun} {differing[0]}"
            fail("CP0861", message, *shown, *more, fix, option, file=file)


def _differing(leaf: Copies, sums: Sequence[str]) -> str:
    """The message for copies on this process with the checksums `sums`, which are not all equal."""
    devices = list(leaf.arrays)
    odd = next(index for index, checksum in enumerate(sums) if checksum != sums[0])
    return f"{leaf.name} differs between {devices[0]} and {devices[odd]}"


def _is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array or number with elements that can be read."""
    if isinstance(leaf, jax.Array):
        return not leaf.is_deleted() and leaf.size > 0
    return isinstance(leaf, _HOST) and int(np.size(cast("Any", leaf))) > 0


def _checksum(x: Any) -> str:
    """The checksum of a leaf on the host or on one device, in hexadecimal digits.

    It does not depend on the place of the leaf, except that CPUs and other backends use different checksums
    for large leaves. All processes of a run have the same backend.
    """
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        x = _plain(x)
        if jax.default_backend() == "cpu" or x.nbytes < _ON_DEVICE:
            return f"{_crc(np.asarray(x)):08x}"
        on_device = x if isinstance(x, jax.Array) else jax.device_put(x, jax.local_devices()[0])
        return np.asarray(_mixed(on_device)).tobytes().hex()


def _plain(x: Any) -> Any:
    """`x` as an array of numbers, in a type that JAX supports with its present configuration.

    Random keys become their data.
    """
    if not isinstance(x, jax.Array):
        host = np.asarray(x)
        return host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _crc(x: Any) -> int:
    """CRC-32 of the bits of `x`, with all NaN equal, in blocks that fit into a cache."""
    flat: Any = np.ascontiguousarray(x).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    unsigned, infinity = _NAN.get(str(flat.dtype), (np.uint8, 0))
    words, crc = flat.view(unsigned), 0  # Bytes, if the type has no NaN.
    for start in range(0, words.size, _BLOCK):
        block: Any = words[start : start + _BLOCK]
        if infinity:
            magnitude: Any = block & unsigned(np.iinfo(unsigned).max >> 1)  # Without the sign.
            if magnitude.max() > infinity:
                block = cast("Any", np.where(magnitude > infinity, unsigned(infinity + 1), block))
        crc = zlib.crc32(block.data, crc)
    return crc


@jax.jit
def _mixed(x: Any) -> Any:
    """Two 32-bit sums of the elements of `x`, each mixed with its index; u32[2].

    The constants are those of the hashes MurmurHash3 and xxHash, whose mixing steps these resemble. The sums
    do not depend on the order of the additions, so devices may add in parallel.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jnp.where(jnp.isnan(x), jnp.nan, x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    elif _NARROW.match(str(x.dtype)):
        x = x.astype(jnp.float32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    words = lax.bitcast_convert_type(x, unsigned).reshape(-1).astype(jnp.uint32)  # Two for 8 bytes.
    mixed = words + lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA6B)
    mixed = mixed ^ (mixed >> 13)
    other = (mixed ^ jnp.uint32(0xC2B2AE35)) * jnp.uint32(0x27D4EB2F)
    return jnp.stack([mixed.sum(dtype=jnp.uint32), (other ^ (other >> 16)).sum(dtype=jnp.uint32)])


def _sample(x: Any) -> str:
    """The type, the shape and the first elements of `x`, as text."""
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        host = np.asarray(_plain(x))
    first = ", ".join(str(element) for element in host.reshape(-1)[:_SHOWN].tolist())
    return f"{host.dtype}{list(host.shape)}, {first}{', ...' if host.size > _SHOWN else ''}"
