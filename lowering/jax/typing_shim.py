"""JAX, typed as `Any` for the strict type checker, which cannot resolve many of its annotations."""

from __future__ import annotations

from typing import Any

import jax as _jax
import jax.numpy as _jnp
from jax import ad_checkpoint as _ad_checkpoint
from jax import lax as _lax

jax: Any = _jax
jnp: Any = _jnp
lax: Any = _lax
ad_checkpoint: Any = _ad_checkpoint
