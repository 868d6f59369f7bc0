"""Edits of schedule files: which are accepted, and whether those compute the same; see `__main__`."""
