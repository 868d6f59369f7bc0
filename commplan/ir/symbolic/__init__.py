"""Symbolic values: every element as a function of the elements at the start of a phase.

- `symbols`: the coordinates of ranks and rows that terms depend on.
- `terms`: the algebra of elements.
- `rounding`: casts in a term, and the casts that a plan allows.
- `blocks`: the elements of a buffer, in order.
- `moves`: the effect of collectives on blocks.
- `values`: one block per leaf of a value.
- `interpretation`: the values of a phase.
- `steps`: semantics shared by stages and ops.
- `compare`, `wording`: comparison and printing of terms.
- `deferred`: imports of this package by stages and ops, when they are used.

The semantics of ops and stages are defined with them, in `ir.ops` and `ir.stages`. This package imports
nothing from `ir.ops`, `ir.stages`, `ir.plan` or `ir.schedule`.
"""
