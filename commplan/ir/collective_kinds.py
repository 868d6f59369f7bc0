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
        reduces: It combines operands with a reduction operation.
        takes_blocks: Its operand consists of one block per rank.
        makes_blocks: Its result consists of one block per rank.
        has_root: One rank differs from the others: the first holder, or the only receiver.
        is_native: Every backend has a native operation for it.
    """

    reduces: bool = False
    takes_blocks: bool = False
    makes_blocks: bool = False
    has_root: bool = False
    is_native: bool = False


# In the order of the enum of the MPI engine, which lacks the last two.
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
REDUCING = tuple(kind for kind, each in PROPERTIES.items() if each.reduces)
NATIVE_KINDS = tuple(kind for kind, each in PROPERTIES.items() if each.is_native)
ROOTED = tuple(kind for kind, each in PROPERTIES.items() if each.has_root)
FROM_ROOT = ("broadcast", "scatter")
# Ranks wait for only some of the others.
TOWARDS_SOME = (*ROOTED, "shift")
TAKES_BLOCKS = tuple(kind for kind, each in PROPERTIES.items() if each.takes_blocks)
MAKES_BLOCKS = tuple(kind for kind, each in PROPERTIES.items() if each.makes_blocks)
# The result is one block of the sum or of the root's operand; the operands are concatenated; both at once.
SCATTERING = tuple(kind for kind in TAKES_BLOCKS if kind not in MAKES_BLOCKS)
GATHERING = tuple(kind for kind in MAKES_BLOCKS if kind not in TAKES_BLOCKS)
EXCHANGING = tuple(kind for kind in TAKES_BLOCKS if kind in MAKES_BLOCKS)
# Collectives over several axes order their blocks by these axes.
BLOCKED = (*SCATTERING, *GATHERING)
