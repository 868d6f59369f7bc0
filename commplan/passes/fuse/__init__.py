"""fuse_update: runs updates of shards bucket by bucket; `bucketed_update_match` finds the candidates."""
