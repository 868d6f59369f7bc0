"""The outputs of a phase, as a pytree that users read by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax

from commplan.diagnostics import listed, near_note
from commplan.lowering.jax.pytree import Tree


@jax.tree_util.register_pytree_with_keys_class
class Outputs:
    """The outputs of a phase by name: `out.grads` or `out["grads"]`. An immutable pytree.

    Iteration gives the names, in the plan's order. An unknown name is a `KeyError`, and as an attribute an
    `AttributeError`.
    """

    # Methods read the slots through `object`. If a slot is not set yet, `self._names` would call
    # `__getattr__`, which would recurse.
    __slots__ = ("_names", "_values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_names", tuple(values))
        object.__setattr__(self, "_values", tuple(values.values()))

    def __getitem__(self, name: str) -> Any:
        names: tuple[str, ...] = object.__getattribute__(self, "_names")
        if name not in names:
            note = "; ".join((*near_note(name, names), f"its outputs: {listed(names) or 'none'}"))
            raise KeyError(f"the phase has no output `{name}`; {note}")
        return object.__getattribute__(self, "_values")[names.index(name)]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"outputs cannot be changed: {name}")

    def __iter__(self) -> Iterator[str]:
        return iter(cast("tuple[str, ...]", object.__getattribute__(self, "_names")))

    def __len__(self) -> int:
        return len(cast("tuple[str, ...]", object.__getattribute__(self, "_names")))

    def __contains__(self, name: object) -> bool:
        return name in object.__getattribute__(self, "_names")

    def __dir__(self) -> list[str]:
        return list(self)

    def __reduce__(self) -> tuple[type[Outputs], tuple[dict[str, Any]]]:
        return Outputs, ({name: self[name] for name in self},)

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}={self[name]!r}' for name in self)})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(jax.tree_util.GetAttrKey(name), self[name]) for name in self], tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> Outputs:
        return cls(dict(zip(names, values, strict=True)))


def build_outputs(
    results: Mapping[str, Tree], updates: Mapping[str, Tree], counts: Mapping[str, Any]
) -> tuple[Outputs, dict[str, Any]]:
    """Rebuild the pytrees of a call.

    Args:
        results: The outputs as leaves and structures, by name.
        updates: The states that the phase sets.
        counts: The count of calls as an entry of the state, or {}.

    Returns:
        The outputs, and the new entries of the state.
    """
    outputs = Outputs({name: tree.build() for name, tree in results.items()})
    return outputs, {name: tree.build() for name, tree in updates.items()} | dict(counts)
