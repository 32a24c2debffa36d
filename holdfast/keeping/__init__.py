"""What is done with checkpoints on the store: retention, verification, packing and export."""
