"""Measure links, messages, collectives and input work, as a `Calibration`."""
