"""mpi4py and mpi4jax, typed as `Any` for the strict type checker."""

from __future__ import annotations

from typing import Any, cast

import mpi4jax as _mpi4jax  # pyright: ignore[reportMissingTypeStubs]
from mpi4py import MPI as _MPI

MPI: Any = _MPI
mpi4jax: Any = cast("Any", _mpi4jax)
