"""share: computes values that are equal for all members of an ensemble once, and then distributes them.

`share` is the pass, `frontier` finds the values at which members start to differ, and `cost` predicts the
cost of each design on `machine`.
"""
