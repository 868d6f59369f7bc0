"""The oracle: a schedule executed in NumPy for all ranks at once, the reference for every lowering."""

from support.oracle.run import Oracle as Oracle
