"""Names of XLA's passes that the compilation of a plan disables."""

DISABLED_PASSES = "xla_disable_hlo_passes"  # the option; its value is a list of names with commas
COPYING = "all-reduce-contiguous"  # copies the arrays of a combined all-reduce into one buffer
SLICING = "dynamic-slice-copy-fusion-async-wrapper"
