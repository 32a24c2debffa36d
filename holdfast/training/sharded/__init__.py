"""Sharded state: FSDP2 models, and reading and exchanging their shards."""
