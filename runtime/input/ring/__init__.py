"""The ring: units of shared input, made once and consumed by every cursor."""
