"""From a checked plan, a mesh and shapes to the first schedule: `bind_axes`, `infer_shapes`, then `lower`.

The compiler calls these three functions in this order. `shape_errors` has the diagnostics about shapes.
Passes (`commplan.passes`) run afterwards and are not imported here.
"""
