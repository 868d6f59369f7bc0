"""Streaming DiLoCo between islands with slow links, on simulated devices: `python -m bench.diloco`."""
