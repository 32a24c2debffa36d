"""What a user writes: a `Recipe` or a function that builds one, with its settings, schedules and anneals."""

from holdfast.recipe.recipe import Recipe, Stateful

__all__ = ["Recipe", "Stateful"]
