"""`--shapes`: load the shapes of trees from a JSON file or a user function."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from commplan.cli.console import Console
from commplan.diagnostics import CommplanError, fail, text_of, type_of
from commplan.ir.plan import Plan

# A note of errors.
_EXAMPLE = 'such as {"params": {"w": {"shape": [3, 4], "dtype": "f32"}}}'


def is_function(location: str) -> bool:
    """Whether `location` is MODULE:FUNCTION rather than a file name."""
    return ":" in location and not os.path.exists(location)  # noqa: PTH110  `Path.exists` raises for EACCES


def read_shapes(
    location: str, console: Console, plan: Plan | None = None, device: str | None = "cpu", /, **sizes: int
) -> dict[str, Any]:
    """Load trees of shapes by name.

    Args:
        location: a JSON file, or MODULE:FUNCTION.
        console: reads the file.
        plan: JAX is configured with as many devices as its ranks before user code is imported.
        device: see `jax_side.choose_devices`.
        sizes: sizes of axes that the plan leaves open.

    Raises:
        CommplanError: CP1103 if the file or the function's result is invalid, CP1109 if the function cannot
            be imported, CP1107 if it needs JAX, CP1112 if it exits the process, or CP0001 or CP0002 if the
            file cannot be read.
    """
    if location.lstrip().startswith(("{", "[")):
        fail("CP1103", "--shapes is JSON text: expected the name of a JSON file", "write the text to a file")
    if not is_function(location):
        return _of_file(location, console)
    from commplan.cli import jax_side

    axis_sizes = [sizes.get(axis.name, axis.size) for axis in plan.axes] if plan else []
    ranks = math.prod(size or 1 for size in axis_sizes)
    jax_side.choose_devices(ranks if ranks <= jax_side.MOST_RANKS else 1, device)
    with jax_side.user_code():
        return _of_function(location, jax_side.function_at(f"--shapes {location}", location))


def _of_function(location: str, function: Callable[[], Any]) -> dict[str, Any]:
    """Trace `function` with `jax.eval_shape`, so that nothing is computed, and return its shapes."""
    from commplan.cli.jax_side import raised_at
    from commplan.lowering.jax.pytree import flatten
    from commplan.pytree import is_like_spec, leaves_of, nest

    jax: Any = importlib.import_module("jax")
    trees: dict[str, Any] = {}

    def traced() -> None:
        """Call the function, and convert its result to `trees` while its arrays are tracers."""
        returned = function()
        if not isinstance(returned, dict):
            message = f"--shapes {location} returned {type_of(returned)}: expected a dictionary of trees"
            fail("CP1103", message, 'such as {"params": shapes, "grads": shapes}')
        for name, tree in returned.items():  # pyright: ignore[reportUnknownVariableType]
            paths, flat = flatten(tree, is_like_spec)
            specs = [_shape(leaf) for leaf in flat.leaves]
            leaves_of(zip(paths, specs, strict=True))  # refuses duplicate paths
            trees[str(name)] = nest(paths, specs) if paths else None  # pyright: ignore[reportUnknownArgumentType]

    try:
        jax.eval_shape(traced)
    except (CommplanError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  the user's own code
        reason = text_of(error).partition("\n")[0]
        fail("CP1103", f"--shapes {location} cannot be traced: {reason}", *raised_at(error))
    return trees


def _shape(leaf: Any) -> Any:
    """The shape and dtype of an array or tracer; other leaves are returned as they are."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return leaf if shape is None or dtype is None else {"shape": list(shape), "dtype": str(dtype)}


def _of_file(path: str, console: Console) -> dict[str, Any]:
    """The trees in a JSON file. Raises CP1103 unless it is an object without duplicate keys."""
    import json

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
    """Convert the pairs of a JSON object. Raises CP1103 for duplicate keys."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        fail("CP1103", f"the key `{duplicate}` is written twice in one object", "each name has one value")
    return entries


def _json_kind(value: object) -> str:
    """The JSON type of a decoded value that is not an object."""
    names = {"list": "array", "str": "string", "bool": "boolean", "int": "number", "float": "number"}
    return names.get(type(value).__name__, "null")
