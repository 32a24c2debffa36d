"""The program of a run in one process: the engine's loop over a recipe, or a loop of the user's own."""

import contextlib
import pkgutil
from collections.abc import Callable, Generator

from holdfast.config import RunConfig
from holdfast.machine import determinism
from holdfast.recipe.annotations import takes_run
from holdfast.recipe.function import find_program
from holdfast.training.build import Training
from holdfast.training.loop import train_step

# Yields before each step that is trained, as `holdfast.training.steps` does.
Serve = Callable[[Training], Generator[None, None, None]]
# named as text and imported late, because a rank with a recipe doesn't need this module
OWN_LOOP = "holdfast.training.own_loop.running:run_loop"


def run_program(config: RunConfig, serve: Serve) -> None:
    """Run a configuration's program until the generator from ``serve`` yields no further step.

    Args:
        serve: called once with the training that the program has built; returns the generator of the steps.

    Raises:
        RecipeError: the program can't be found or built, or has left its loop before the run's end.
        ConfigError: the program doesn't fit the configuration.
    """
    before = determinism.read_seeds()
    program = find_program(config.recipe)
    replaced = determinism.describe_replaced(before, config.seed)

    def serve_noted(training: Training) -> Generator[None, None, None]:
        training.notes += replaced
        return serve(training)

    if not takes_run(program):
        training = Training(config)
        with contextlib.closing(serve_noted(training)) as steps:
            for _ in steps:
                training.record.trained = train_step(training)
        return
    pkgutil.resolve_name(OWN_LOOP)(config, program, serve_noted)
