"""Shared input against a ring of shared memory written by hand: the command, a member, and the ring."""
