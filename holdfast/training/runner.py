"""The program of a run in one process: the engine's loop over a recipe, or a loop of the user's own."""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.machine import determinism
from holdfast.recipe.annotations import takes_run
from holdfast.recipe.function import find_program, make_build_error
from holdfast.recipe.settings import make_arguments, resolve_settings
from holdfast.training.build import Training
from holdfast.training.devices import prepare_device
from holdfast.training.loop import train_step
from holdfast.training.own_loop.loop import OwnLoop, Serve, Stopped
from holdfast.training.own_loop.run import Run


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
    settings = resolve_settings(program, config.settings)
    accelerator = prepare_device(config)
    arguments = make_arguments(program, config.settings, accelerator.device)
    loop = OwnLoop(config, accelerator, program, settings, serve_noted)
    try:
        _run_loop(program, loop, arguments)
    except HoldfastError:
        raise
    except Exception as error:
        if loop.has_begun:
            raise
        raise make_build_error(config.recipe, error) from error


def _run_loop(function: Callable[..., object], loop: OwnLoop, arguments: Mapping[str, Any]) -> None:
    """Call a training function until the run ends or stops.

    Args:
        arguments: the values of the function's parameters after its `Run`, by name.

    Raises:
        RecipeError: the function has left its loop before the run's end.
    """
    try:
        with loop.taking_plugins():
            function(Run(loop), **arguments)
        loop.check_end()
    except Stopped:
        pass
    finally:
        loop.close()
