"""Shared input between emulated hosts: the command and a rank."""
