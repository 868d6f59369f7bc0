"""Campaigns against the servers of parameter exchange: `bench.replays` and `bench.soak`."""
