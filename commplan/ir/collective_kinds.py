"""Properties of the kinds of collectives, in one table.

Passes, costs, lowerings and the recorder read them here. The kinds of a schedule are
`ir.ops.collective.CollectiveKind`, those of chunk programs `collectives.program.Kind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class KindProperties(NamedTuple):
    """Properties of a kind of collective.

    Attributes:
        reduces: Whether it combines operands with a reduction operation.
        takes_blocks: Whether its operand consists of one block per rank.
        makes_blocks: Whether its result consists of one block per rank.
        has_root: Whether one rank differs from the others: the first holder, or the only receiver.
        is_native: Whether every backend has a native operation for it.
    """

    reduces: bool = False
    takes_blocks: bool = False
    makes_blocks: bool = False
    has_root: bool = False
    is_native: bool = False


# By kind, in the order of the enum of the MPI engine, which lacks the last two.
PROPERTIES: Mapping[str, KindProperties] = {
    "all_reduce": KindProperties(reduces=True, is_native=True),
    "reduce_scatter": KindProperties(reduces=True, takes_blocks=True, is_native=True),
    "all_gather": KindProperties(makes_blocks=True, is_native=True),
    "all_to_all": KindProperties(takes_blocks=True, makes_blocks=True),
    "broadcast": KindProperties(has_root=True, is_native=True),
    "reduce": KindProperties(reduces=True, has_root=True),
    "scatter": KindProperties(takes_blocks=True, has_root=True),
    "gather": KindProperties(makes_blocks=True, has_root=True),
    "shift": KindProperties(),
    "swap": KindProperties(takes_blocks=True, makes_blocks=True),
}
# Kinds with one property each; see `KindProperties`.
REDUCING = tuple(kind for kind, each in PROPERTIES.items() if each.reduces)
NATIVE_KINDS = tuple(kind for kind, each in PROPERTIES.items() if each.is_native)
ROOTED = tuple(kind for kind, each in PROPERTIES.items() if each.has_root)
TAKES_BLOCKS = tuple(kind for kind, each in PROPERTIES.items() if each.takes_blocks)
MAKES_BLOCKS = tuple(kind for kind, each in PROPERTIES.items() if each.makes_blocks)
# Kinds that begin with data on the root alone.
FROM_ROOT = ("broadcast", "scatter")
# Kinds that let ranks wait for only some of the others.
TOWARDS_SOME = (*ROOTED, "shift")
# Kinds whose result is one block, of the sum or of the root's operand.
SCATTERING = tuple(kind for kind in TAKES_BLOCKS if kind not in MAKES_BLOCKS)
# Kinds whose result is the concatenation of all operands.
GATHERING = tuple(kind for kind in MAKES_BLOCKS if kind not in TAKES_BLOCKS)
# Kinds that send a block from each rank to each rank.
EXCHANGING = tuple(kind for kind in TAKES_BLOCKS if kind in MAKES_BLOCKS)
# Kinds with one block for each rank. Over several axes, blocks are in the order of these axes.
BLOCKED = (*SCATTERING, *GATHERING)
