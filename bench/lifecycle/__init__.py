"""Processes that share their input start, stop, die and return."""
