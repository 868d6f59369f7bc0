"""From a checked plan, a mesh and shapes to the first schedule: `bind_axes`, `infer_shapes`, then `lower`.

The compiler calls these three in this order. What can be wrong with shapes is worded in `shape_errors`.
Passes come afterwards (`commplan.passes`) and are not imported here.
"""
