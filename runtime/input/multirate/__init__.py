"""Members that advance independently: one stream of units, taken at different rates."""
