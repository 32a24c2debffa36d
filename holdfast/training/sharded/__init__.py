"""Sharded state: FSDP2 models, the exchange of shards between ranks, and the restore of a checkpoint."""
