"""Shared memory between the processes of one host: the segment, its slots, and who is alive."""
