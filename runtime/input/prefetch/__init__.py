"""Batches that are built ahead of time, and handed over in order."""
