"""The parts of `bench.gpu`, each in a separate process."""
