"""The parts of `bench.gpu`, each in a process of its own."""
