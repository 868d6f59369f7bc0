"""Rehearse every phase of a plan on CPUs, with real data and random inputs."""
