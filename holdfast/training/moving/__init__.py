"""The import of another program's checkpoint: a reader for each format, and the matching of names."""

from holdfast.training.moving.taking_over import TakenOver, move_in

__all__ = ["TakenOver", "move_in"]
