"""Classifies JAX primitives by name: those that communicate between ranks, of JAX and of `lowering/jax`.

It does not import JAX, so the audit of compiled text can use it too.
"""

from __future__ import annotations

GROUPED = "commplan_grouped"  # of `jax/collectives/subgroups.py`; its parameter `kind` is the reduction

# The kind of collective by prefix of the name. The rest of the name differs between versions of JAX.
_KINDS = {
    "psum": "all_reduce(sum)",
    "unreduced_psum": "all_reduce(sum)",
    "pmax": "all_reduce(max)",
    "pmin": "all_reduce(min)",
    "psum_scatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "pgather": "gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "pbroadcast": "broadcast",
    "ppermute": "permute",
    "psend": "send",
    "precv": "receive",
    GROUPED: "all_reduce",
}
_LONGEST_FIRST = sorted(_KINDS, key=len, reverse=True)  # "psum_scatter" also begins with "psum"


def collective_kind(name: str) -> str | None:
    """The kind of collective of the primitive `name`; None if it does not communicate.

    Leading underscores of the name are ignored. A reduction follows the kind in parentheses if the name
    determines it.

    >>> collective_kind("psum_invariant"), collective_kind("axis_index")
    ('all_reduce(sum)', None)
    """
    name = name.lstrip("_")
    return next((_KINDS[prefix] for prefix in _LONGEST_FIRST if name.startswith(prefix)), None)


def is_replicating(name: str) -> bool:
    """Whether the result of the primitive `name` is the same on all ranks that participate."""
    return (collective_kind(name) or "").startswith(("all_reduce", "all_gather", "broadcast"))
