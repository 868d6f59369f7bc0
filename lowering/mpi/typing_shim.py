"""mpi4py and mpi4jax, typed as `Any` for the strict type checker."""

from __future__ import annotations

import warnings
from typing import Any, cast

with warnings.catch_warnings():
    # mpi4jax warns about every JAX release newer than itself. Supported versions of JAX are tested with it.
    warnings.filterwarnings("ignore", message=r"\s*The latest supported JAX version", category=UserWarning)
    import mpi4jax as _mpi4jax  # pyright: ignore[reportMissingTypeStubs]
from mpi4py import MPI as _MPI

MPI: Any = _MPI
mpi4jax: Any = cast("Any", _mpi4jax)
