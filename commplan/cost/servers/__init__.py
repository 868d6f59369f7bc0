"""Seconds and bytes of what workers and servers send each other."""
