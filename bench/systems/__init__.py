"""commplan and its peers, each behind the same two functions: see `bench.harness.work.System`."""
