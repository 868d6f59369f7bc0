"""Shared memory between the processes of one host: slots and their layout, locks, wake-ups."""
