"""The import of another program's checkpoint: its readers, one for each form, and the match of its names."""

from holdfast.training.moving.taking_over import TakenOver, move_in

__all__ = ["TakenOver", "move_in"]
