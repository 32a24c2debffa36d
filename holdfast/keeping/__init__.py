"""Checkpoints at rest: retention, verification, packing and export."""
