"""Batches that are built ahead of time and returned in order."""
