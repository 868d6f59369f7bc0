"""`--shapes`: the shapes of trees, from a JSON file or from a function of the user's program."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from commplan.cli.console import Console
from commplan.diagnostics import CommplanError, fail, text_of
from commplan.ir.plan import Plan

_EXAMPLE = 'such as {"params": {"w": {"shape": [3, 4], "dtype": "f32"}}}'


def is_function(where: str) -> bool:
    """Whether `where` is MODULE:FUNCTION and not the name of a file."""
    return ":" in where and not Path(where).exists()


def read_shapes(
    where: str, console: Console, plan: Plan | None = None, device: str | None = "cpu", /, **sizes: int
) -> dict[str, Any]:
    """Trees of shapes by name. Raises CP1103 where the file or what the function returns is none, CP1109 for
    a function that cannot be found.

    plan, sizes: as many devices as it has ranks are asked for before a function's program loads JAX; device:
    see `jax_side.choose_devices`.
    """
    if not is_function(where):
        return _of_file(where, console)
    from commplan.cli import jax_side

    known = [sizes.get(axis.name, axis.size) for axis in plan.axes] if plan else []
    ranks = math.prod(size or 1 for size in known)
    jax_side.choose_devices(ranks if ranks <= jax_side.MOST_RANKS else 1, device)
    with jax_side.user_code():
        return _of_function(where, jax_side.function_at(f"--shapes {where}", where))


def _of_function(where: str, function: Callable[[], Any]) -> dict[str, Any]:
    """What `function` returns, traced by `jax.eval_shape`, so that nothing is computed."""
    from commplan.cli.jax_side import raised_at
    from commplan.lowering.jax.pytree import flatten
    from commplan.lowering.jax.typing_shim import jax
    from commplan.pytree import is_like_spec, leaves_of, nest

    trees: dict[str, Any] = {}

    def traced() -> None:
        returned = function()
        if not isinstance(returned, dict):
            message = f"--shapes {where} returned a {type(returned).__name__}: expected a dictionary of trees"
            fail("CP1103", message, 'such as {"params": shapes, "grads": shapes}')
        for name, tree in returned.items():  # pyright: ignore[reportUnknownVariableType]
            paths, flat = flatten(tree, is_like_spec)
            specs = [_shape(leaf) for leaf in flat.leaves]
            leaves_of(zip(paths, specs, strict=True))  # two of one path would become one
            trees[str(name)] = nest(paths, specs) if paths else None  # pyright: ignore[reportUnknownArgumentType]

    try:
        jax.eval_shape(traced)
    except (CommplanError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  the user's own code
        reason = text_of(error).partition("\n")[0]
        fail("CP1103", f"--shapes {where} cannot be traced: {reason}", *raised_at(error))
    return trees


def _shape(leaf: Any) -> Any:
    """A leaf without the trace that it belongs to."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return leaf if shape is None or dtype is None else {"shape": list(shape), "dtype": str(dtype)}


def _of_file(path: str, console: Console) -> dict[str, Any]:
    text = console.read(path)
    try:
        shapes = json.loads(text, object_pairs_hook=_unique)
    except CommplanError as error:
        raise CommplanError(*(replace(d, file=path) for d in error.diagnostics)) from None
    except ValueError as error:
        fail("CP1103", f"the shapes are not JSON: {error}", file=path)
    except RecursionError:
        fail("CP1103", "the shapes are nested too deep", "trees this deep cannot be read", file=path)
    if not isinstance(shapes, dict):
        message = f"the shapes are a JSON {_json_kind(shapes)}: expected an object"
        fail("CP1103", message, _EXAMPLE, file=path)
    return {str(name): tree for name, tree in shapes.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises CP1103 where a key is in it twice: one of the two would be lost."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        fail("CP1103", f"the key `{twice}` is written twice in one object", "each name has one value")
    return entries


def _json_kind(value: object) -> str:
    names = {"list": "array", "str": "string", "bool": "boolean", "int": "number", "float": "number"}
    return names.get(type(value).__name__, "null")
