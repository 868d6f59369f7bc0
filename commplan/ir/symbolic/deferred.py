"""For the definitions of stages, which say what they mean in terms of `steps`: these, and all of the symbols
under them, are loaded when a meaning is first asked for. Checking a plan asks for none."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Interpretation", "steps"]

if TYPE_CHECKING:
    from commplan.ir.symbolic import steps
    from commplan.ir.symbolic.interpretation import Interpretation
else:

    class _Steps:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("commplan.ir.symbolic.steps"), name)

    Interpretation = Any
    steps = _Steps()
