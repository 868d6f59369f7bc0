"""Deferred imports of `steps`, `moves` and `values` for the definitions of stages and ops.

These modules are loaded when semantics are first evaluated, which neither checking nor running a plan does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Block", "Interpretation", "SymbolicValue", "Term", "moves", "steps", "values"]

if TYPE_CHECKING:
    from commplan.ir.symbolic import moves, steps, values
    from commplan.ir.symbolic.blocks import Block
    from commplan.ir.symbolic.interpretation import Interpretation
    from commplan.ir.symbolic.terms import Term
    from commplan.ir.symbolic.values import SymbolicValue
else:

    class _Deferred:
        """A module of this package that is imported when an attribute of it is first used."""

        def __init__(self, module: str) -> None:
            self._module = f"commplan.ir.symbolic.{module}"

        def __getattr__(self, name: str) -> Any:
            value = self.__dict__[name] = getattr(import_module(self._module), name)
            return value

    Block = Interpretation = SymbolicValue = Term = Any
    moves, steps, values = map(_Deferred, ("moves", "steps", "values"))
