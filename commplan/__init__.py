"""commplan compiles communication plans for training. Everything public is here."""

from commplan.api import Plan as Plan
from commplan.api import Program as Program
from commplan.api import load as load
from commplan.api import loads as loads
from commplan.diagnostics import CommplanError as CommplanError
from commplan.diagnostics import Diagnostic as Diagnostic

__version__ = "0.1.0"
