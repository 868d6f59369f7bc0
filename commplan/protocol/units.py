"""The layout of a state on its servers.

Leaves of one dtype are flattened and joined to a flat *part*. Parts are cut into *units*, each with one
owner. The state of an optimizer is cut in the same way: its leaves that match leaves of the weights (the same
shape, and a path with the same end) form *slots* with the units of the weights. Scalar leaves, such as the
step count, are stored with every unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from commplan.diagnostics import CommplanError, Diagnostic, Note, Span
from commplan.ir.analysis.optimizer_leaf_match import weights_of
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType
from commplan.protocol import chunks


class Flat(msgspec.Struct, frozen=True):
    """Leaves of one dtype, flattened and joined.

    Attributes:
        dtype: The dtype.
        leaves: The indices of the leaves in their value, in the order of the buffer.
        size: The number of elements.
    """

    dtype: DType
    leaves: tuple[int, ...]
    size: int


class StateUnit(msgspec.Struct, frozen=True):
    """A run of elements of a part, which one server owns.

    Attributes:
        number: The index of the unit in `StateLayout.units`.
        part: The index of the part in `StateLayout.parts`.
        start: The first element in the part.
        size: The number of elements, at least 1.
        server: The owner, counted from 0 among the servers of the state.
    """

    number: int
    part: int
    start: int
    size: int
    server: int


class StateLayout(msgspec.Struct, frozen=True):
    """The layout of a state on `servers` servers.

    Attributes:
        servers: The number of servers.
        slots: The flat parts of each copy of the weights' structure. Weights have one slot; an auxiliary
            state has any number, also none.
        scalars: The indices of leaves that are stored with every unit; empty for weights.
        units: The units of the weights, in the order of parts and elements. Every slot is divided in the same
            way. Empty if the weights have no elements.
    """

    servers: int
    slots: tuple[tuple[Flat, ...], ...]
    scalars: tuple[int, ...]
    units: tuple[StateUnit, ...]

    @property
    def parts(self) -> tuple[Flat, ...]:
        """The flat parts of the first slot. Raises IndexError if the layout has no slot."""
        return self.slots[0]

    def owned(self, server: int) -> tuple[StateUnit, ...]:
        """The units of server `server`, counted from 0, in order."""
        return tuple(unit for unit in self.units if unit.server == server)

    def nbytes(self, unit: StateUnit) -> int:
        """The bytes of a unit in the first slot."""
        return unit.size * self.parts[unit.part].dtype.nbytes

    @property
    def stored(self) -> tuple[int, ...]:
        """The bytes that each server stores in all slots, without scalars."""
        return self._nbytes(self.slots)

    @property
    def loads(self) -> tuple[int, ...]:
        """The bytes of the first slot that each server stores."""
        return self._nbytes(self.slots[:1])

    def _nbytes(self, slots: Sequence[tuple[Flat, ...]]) -> tuple[int, ...]:
        totals = [0] * self.servers
        for slot in slots:
            for unit in self.units:
                totals[unit.server] += unit.size * slot[unit.part].dtype.nbytes
        return tuple(totals)


def layout_weights(
    leaves: Sequence[Leaf], keys: Sequence[object], servers: int, chunk: int | None
) -> StateLayout:
    """Lay out weights, or a state that is never exchanged, on servers.

    Args:
        leaves: The leaves; those without elements belong to no part.
        keys: A hashable key for each leaf. Leaves with equal keys, which have equal dtypes, form a part. Keys
            of weights contain the dtype of the gradient too, since a part is sent as one buffer.
        servers: The number of servers, at least 1.
        chunk: The largest unit in bytes, rounded down to elements, but at least one element; None for the
            default size.
    """
    groups: dict[object, Flat] = {}  # in the order of first appearance
    for index, (leaf, key) in enumerate(zip(leaves, keys, strict=True)):
        if leaf.size:
            flat = groups.get(key, Flat(leaf.dtype, (), 0))
            groups[key] = Flat(flat.dtype, (*flat.leaves, index), flat.size + leaf.size)
    parts = tuple(groups.values())
    total = sum(part.size * part.dtype.nbytes for part in parts)
    largest = chunk or chunks.usual(total, servers)
    runs = [
        (number, start, size)
        for number, part in enumerate(parts)
        for start, size in chunks.cut(part.size, max(1, largest // part.dtype.nbytes))
    ]
    owners = chunks.assign([size * parts[number].dtype.nbytes for number, _, size in runs], servers)
    units = tuple(
        StateUnit(number, *run, owner) for number, (run, owner) in enumerate(zip(runs, owners, strict=True))
    )
    return StateLayout(servers, (parts,), (), units)


def layout_auxiliary_state(
    state_leaves: Sequence[Leaf], leaves: Sequence[Leaf], weights: StateLayout, span: Span, file: str
) -> StateLayout:
    """Lay out the state of an optimizer with the units of its weights.

    Args:
        state_leaves: The leaves of the state.
        leaves: The leaves of the weights.
        weights: The layout of the weights.
        span: The span of the stage, for errors.
        file: The file of the plan, for errors.

    Raises:
        CommplanError: CP0726 for a leaf that is neither a scalar nor part of a whole copy of the weights, and
            for a copy with several dtypes in one part of the weights.
    """
    # For each copy of the weights, by the prefix of its paths: the index of the leaf of the state for that of
    # each leaf of the weights.
    copies: dict[str, dict[int, int]] = {}
    scalars: list[int] = []
    matches = weights_of(state_leaves, leaves)
    for index, (leaf, weight) in enumerate(zip(state_leaves, matches, strict=True)):
        if weight is not None:
            prefix = leaf.path[: len(leaf.path) - len(leaves[weight].path)]
            copies.setdefault(prefix, {})[weight] = index
        elif leaf.shape == ():
            scalars.append(index)
        else:
            _fail_indivisible(
                leaf, "no leaf of the weights has its shape and the end of its path", span, file
            )
    slots: list[tuple[Flat, ...]] = []
    for copy in copies.values():
        missing = [leaf.path for weight, leaf in enumerate(leaves) if weight not in copy]
        if missing and all(state_leaves[index].shape == () for index in copy.values()):
            scalars += copy.values()  # a step count, and weights with the same name
        elif missing:
            first = state_leaves[next(iter(copy.values()))]
            _fail_indivisible(first, f"its copy of the weights lacks `{missing[0]}`", span, file)
        else:
            slots.append(_slot(copy, state_leaves, weights, span, file))
    return StateLayout(weights.servers, tuple(slots), tuple(sorted(scalars)), weights.units)


def _slot(
    copy: dict[int, int], state_leaves: Sequence[Leaf], weights: StateLayout, span: Span, file: str
) -> tuple[Flat, ...]:
    """The flat parts of a copy of the weights.

    Args:
        copy: For each leaf of the weights, the leaf of the state, both as indices.
        state_leaves: The leaves of the state.
        weights: The layout of the weights.
        span: The span of the stage, for errors.
        file: The file of the plan, for errors.
    """
    flats: list[Flat] = []
    for part in weights.parts:
        indices = tuple(copy[weight] for weight in part.leaves)
        dtypes = {state_leaves[index].dtype for index in indices}
        if len(dtypes) > 1:
            reason = "its copy of the weights mixes dtypes, unlike the weights"
            _fail_indivisible(state_leaves[indices[0]], reason, span, file)
        flats.append(Flat(dtypes.pop(), indices, part.size))
    return tuple(flats)


def _fail_indivisible(leaf: Leaf, reason: str, span: Span, file: str) -> None:
    path = f"`{leaf.path}` " if leaf.path else ""
    raise CommplanError(
        Diagnostic(
            "CP0726",
            f"the leaf {path}({leaf.dtype}{list(leaf.shape)}) cannot be divided among owners: {reason}",
            span,
            (
                Note("a state may hold scalars and whole copies of the weights' structure"),
                Note("an optimizer that needs the whole tree updates after `reduce` instead"),
            ),
            file=file,
        )
    )
