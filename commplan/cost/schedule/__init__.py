"""Seconds of a whole phase: tasks on lanes (`timeline`, `list_scheduler`), and the trace that shows them."""
