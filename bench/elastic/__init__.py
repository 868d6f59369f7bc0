"""Elastic averaging on emulated hosts: the command, a rank, and the network that it trains."""
