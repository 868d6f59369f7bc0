"""Plans bound to meshes of CPU devices, for the tests of the embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import commplan
from commplan.diagnostics import CommplanError

PLANS = Path(__file__).parents[2] / "examples" / "plans"


def mesh_of(**axes: int) -> Any:
    """A mesh of the first devices with these axes, all Auto."""
    count = int(np.prod(list(axes.values()), dtype=int))
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=jax.devices()[:count])


def bind(text: str, mesh: Any, shapes: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """The plan `text` (or the example of that name) compiled for `mesh` and bound to it."""
    if "\n" not in text:
        text = (PLANS / f"{text}.plan").read_text(encoding="utf-8")
    passes = options.pop("passes", None)
    program = commplan.loads(text).compile(mesh, shapes=shapes, passes=passes)
    return program.bind(mesh, **options)


def code_of(error: Any) -> str:
    """The code of the one diagnostic of a caught error."""
    raised: CommplanError = error.value
    assert len(raised.diagnostics) == 1
    return raised.diagnostics[0].code


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    """The code and the words of the one error of `call`."""
    with pytest.raises(CommplanError) as error:
        call()
    return code_of(error), str(error.value)
