"""Collective algorithms as chunk programs: one definition, and many that read it."""
