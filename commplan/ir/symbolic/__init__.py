"""Values on symbols: what every element is, over the elements that a phase begins with.

`terms` (what an element is), `rounding` (what rounded it, and what may), `blocks` (which elements a buffer
holds, in which order), `moves` (what collectives do to them), `values` (a block for every leaf),
`interpretation` (those of a phase), `steps` (what stages and ops have in common), `compare` and `wording`.
Meanings of ops and stages stand with them, in `ir.ops` and `ir.stages`. Imports nothing of `ir.ops`,
`ir.stages`, `ir.plan` or `ir.schedule`.
"""
