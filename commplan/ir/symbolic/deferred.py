"""For the definitions of stages and ops, which say what they mean in terms of `steps`, `moves` and `values`:
these, and all of the symbols under them, are loaded when a meaning is first asked for. Checking a plan asks
for none, nor does running one."""

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
        def __init__(self, module: str) -> None:
            self._module = f"commplan.ir.symbolic.{module}"

        def __getattr__(self, name: str) -> Any:
            value = self.__dict__[name] = getattr(import_module(self._module), name)
            return value

    Block = Interpretation = SymbolicValue = Term = Any
    moves, steps, values = map(_Deferred, ("moves", "steps", "values"))
