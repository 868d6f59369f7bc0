"""The properties that must be equal in all processes of a program, so that they compile the same code.

`machine.agree` compares them when a program is bound.
"""

from __future__ import annotations

import os
import re

import jax
import numpy as np

import commplan
from commplan.ir import schedule as ir

# Fixes in messages. `{noun}` is "rank" or "process".
_INSTALL = "install the same versions for every {noun}"
_CONFIGURE = "use the same value for every {noun}, and set it before JAX is used"
# The options of `jax.config` that change compiled code.
_OPTIONS = (
    "jax_enable_x64", "jax_explicit_x64_dtypes", "jax_default_matmul_precision", "jax_numpy_dtype_promotion",
    "jax_default_prng_impl", "jax_threefry_partitionable", "jax_use_shardy_partitioner",
    "jax_optimization_level", "jax_disable_most_optimizations",
)  # fmt: skip
# For each compared property, the end of `not every rank binds ..`, and the fix. Only the first difference is
# reported, so causes are listed before their effects.
ALIKE = {
    "commplan": ("with the same version of commplan", _INSTALL),
    "jax": ("with the same version of jax", _INSTALL),
    "jaxlib": ("with the same version of jaxlib", _INSTALL),
    "numpy": ("with the same version of numpy", _INSTALL),
    "platform": ("on the same platform", "use the same kind of device for every {noun}"),
    **{option: (f"with the same {option}", _CONFIGURE) for option in _OPTIONS},
    "XLA_FLAGS": ("with the same XLA_FLAGS", _CONFIGURE),
    "topology": ("for the same topology", "pass `compile` the same topology and mapping on every {noun}"),
    "mesh": ("on the same mesh", "make the mesh with the same axes and order of devices on every {noun}"),
    "program": ("the same program", "compile the same plan for the same shapes and sizes on every {noun}"),
    "seed": ("with the same seed", "pass the same seed on every {noun}: random functions depend on it"),
}
# The names of flags for files, logs and the number of devices of a process, which do not change results.
_LOCAL_FLAG = re.compile(r"(^|_)(dump|logs?|logging)(_|$)|_(dir|directory|file|path|device_count)$")


def is_local(flag: str) -> bool:
    """Whether an XLA flag, such as `--xla_dump_to=DIR`, may differ between the processes of a program."""
    return _LOCAL_FLAG.search(flag.lstrip("-").partition("=")[0]) is not None


def environment(schedule: ir.Schedule) -> dict[str, str]:
    """This process's values of the properties in `ALIKE`, except `mesh`, `program` and `seed`."""
    versions = {"commplan": commplan, "jax": jax, "jaxlib": jax.lib, "numpy": np}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not is_local(flag)]
    topology = [
        f"{axis.name} on {', '.join(f'{level.count} x {level.level}' for level in axis.levels)}"
        for axis in schedule.axes
        if axis.levels
    ]
    return {
        **{name: str(module.__version__) for name, module in versions.items()},
        "platform": str(jax.default_backend()),
        **{name: str(getattr(jax.config, name, None)) for name in _OPTIONS},
        "XLA_FLAGS": " ".join(sorted(flags)) or "none",
        "topology": "; ".join((*topology, *schedule.hosts)) or "none",
    }
