"""commplan compiles communication plans for training. Everything public is here."""

from typing import TYPE_CHECKING, Any

from commplan.diagnostics import CommplanError as CommplanError
from commplan.diagnostics import Diagnostic as Diagnostic

if TYPE_CHECKING:
    from commplan.api import Plan as Plan
    from commplan.api import Program as Program
    from commplan.api import load as load
    from commplan.api import loads as loads

__version__ = "0.1.0"
__all__ = ["CommplanError", "Diagnostic", "Plan", "Program", "load", "loads"]


def __getattr__(name: str) -> Any:
    """The compiler is loaded when it is first asked for: `commplan check` and `fmt` do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from commplan import api  # noqa: PLC0415

    return getattr(api, name)
