"""Faults, one a job, everywhere that processes wait for one another: the blamed process, and the delay."""
