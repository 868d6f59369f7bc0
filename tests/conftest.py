"""Set-up of all tests: eight CPU devices, no accelerator, and long time limits."""

import gc
import os
import signal
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# Read by JAX when it is first imported, here and in the processes that tests start; tests that never
# import JAX stay free of it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Tests compile thousands of programs and run each a few times: LLVM need not make them fast.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Records of ranks remain after failures: these are on purpose, and must not appear among the user's.
_RECORDS = tempfile.TemporaryDirectory(prefix="commplan-records-")
os.environ["COMMPLAN_RECORDS"] = _RECORDS.name

# Children inherit which signals are ignored or blocked. Background jobs of a script ignore SIGINT and
# SIGQUIT; schedulers ignore or block others. SIGHUP stays ignored under `nohup`, the last three at terminals.
_INHERITED = {signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
for _number in signal.valid_signals() - _INHERITED:
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())

# How long an example takes is the machine's affair.
settings.register_profile("commplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("commplan")


def pytest_collection_finish():
    """All tests and modules live as long as the run: no collection of garbage goes through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small budget of the search, for tests that hold whatever it chooses."""
    from commplan.passes.search import trials  # noqa: PLC0415  not before the tests that need it

    monkeypatch.setattr(trials, "SCHEDULES", 8)
