"""The oracle: a schedule executed in NumPy for all ranks at once, the reference for every lowering."""

from .run import Oracle as Oracle
