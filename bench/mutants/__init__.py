"""Programs and schedules with one mistake, which the verifier must refuse."""
