"""What the benches of parameter exchange and elastic averaging have in common."""
