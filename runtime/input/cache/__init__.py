"""Results of deterministic host functions, kept by record across epochs and shared by a host's processes."""
