"""Proofs of chunk programs: symbolic execution, composition for hierarchies, and counterexamples."""
