"""What all tests share: eight CPU devices, and no accelerator whatever the machine has."""

import os

# Read by JAX when it is first imported, here and in the processes that tests start; tests that never
# import JAX stay free of it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
