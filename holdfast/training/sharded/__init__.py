"""State that is cut over the ranks: FSDP2 models, and reading and exchanging their shards."""
