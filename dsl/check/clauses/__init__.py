"""The clauses of a stage: `axes` (`over`, `across`), `ops` (`by`), `via`, and `options` in braces."""
