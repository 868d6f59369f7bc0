"""Proofs that the records delivered to each member in an epoch satisfy the contract of their load."""
