"""The properties that all processes of a program must share so that they compile and compute the same."""

from __future__ import annotations

import os
import re

import jax
import numpy as np

import commplan
from commplan.ir import schedule as ir

_INSTALL = "install the same versions for every {who}"
_CONFIGURE = "set it alike for every {who}, before JAX is used"
_OPTIONS = (
    "jax_enable_x64", "jax_explicit_x64_dtypes", "jax_default_matmul_precision", "jax_numpy_dtype_promotion",
    "jax_default_prng_impl", "jax_threefry_partitionable", "jax_use_shardy_partitioner",
    "jax_optimization_level", "jax_disable_most_optimizations",
)  # fmt: skip
# The properties that are compared: the words of the error and the fix. The first difference is reported, so
# causes come before their effects.
ALIKE = {
    "commplan": ("with the same version of commplan", _INSTALL),
    "jax": ("with the same version of jax", _INSTALL),
    "jaxlib": ("with the same version of jaxlib", _INSTALL),
    "numpy": ("with the same version of numpy", _INSTALL),
    "platform": ("on the same platform", "give every {who} the same kind of device"),
    **{option: (f"with the same {option}", _CONFIGURE) for option in _OPTIONS},
    "XLA_FLAGS": ("with the same XLA_FLAGS", _CONFIGURE),
    "topology": ("for the same topology", "give `compile` the same topology and mapping for every {who}"),
    "mesh": ("on the same mesh", "make it in every {who} with the same axes, and devices in the same order"),
    "program": ("the same program", "every {who} must compile the same plan, for the same shapes and sizes"),
    "seed": ("with the same seed", "random functions draw from it: give every {who} the same one"),
}
# Names of flags that set files and logs of a process, or count its devices: they change no result.
_LOCAL_FLAG = re.compile(r"(^|_)(dump|logs?|logging)(_|$)|_(dir|directory|file|path|device_count)$")


def is_local(flag: str) -> bool:
    """Whether a flag of XLA may differ between processes that must compute the same."""
    return _LOCAL_FLAG.search(flag.lstrip("-").partition("=")[0]) is not None


def environment(schedule: ir.Schedule) -> dict[str, str]:
    """The values of this process for the names of `ALIKE`, except `mesh`, `program` and `seed`."""
    versions = {"commplan": commplan, "jax": jax, "jaxlib": jax.lib, "numpy": np}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not is_local(flag)]
    spread = {axis.name: axis.levels for axis in schedule.axes if axis.levels}
    levels = [
        f"{name} on {', '.join(f'{level.count} x {level.level}' for level in levels)}"
        for name, levels in spread.items()
    ]
    return {
        **{name: str(module.__version__) for name, module in versions.items()},
        "platform": str(jax.default_backend()),
        **{name: str(getattr(jax.config, name, None)) for name in _OPTIONS},
        "XLA_FLAGS": " ".join(sorted(flags)) or "none",
        "topology": "; ".join((*levels, *schedule.hosts)) or "none",
    }
