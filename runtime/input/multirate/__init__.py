"""Members with clocks of their own: one stream of units, taken at different rates."""
