"""Proofs of chunk programs: by symbolic execution, for hierarchies by composition; counter-examples."""
