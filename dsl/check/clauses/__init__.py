"""What a stage is written with: `axes` (`over`, `across`), `ops` (`by`), `via`, and `options` in braces."""
