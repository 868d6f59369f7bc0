"""What all tests share: eight CPU devices, no accelerator whatever the machine has, and no haste."""

import gc
import os
import tempfile

from hypothesis import HealthCheck, settings

# Read by JAX when it is first imported, here and in the processes that tests start; tests that never
# import JAX stay free of it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# What ranks record stays where they end badly: here that is on purpose, and no affair of this user's.
_RECORDS = tempfile.TemporaryDirectory(prefix="commplan-records-")
os.environ["COMMPLAN_RECORDS"] = _RECORDS.name

# How long an example takes is the machine's affair.
settings.register_profile("commplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("commplan")


def pytest_collection_finish():
    """All tests and modules live as long as the run: no collection of garbage goes through them again."""
    gc.collect()
    gc.freeze()
