"""fuse_update: an update on shards runs bucket by bucket; `bucketed_update_match` finds what can."""
