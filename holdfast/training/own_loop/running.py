"""The call of a user's training function, whose loop the engine follows."""

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.recipe.function import make_build_error
from holdfast.recipe.settings import make_arguments, resolve_settings
from holdfast.training.devices import prepare_device
from holdfast.training.own_loop.loop import OwnLoop, Serve, Stopped
from holdfast.training.own_loop.run import Run


def run_loop(config: RunConfig, program: Callable[..., object], serve: Serve) -> None:
    """Call a training function until the generator from ``serve`` yields no further step; see `run_program`."""
    settings = resolve_settings(program, config.settings)
    accelerator = prepare_device(config)
    arguments = make_arguments(program, config.settings, accelerator.device)
    loop = OwnLoop(config, accelerator, program, settings, serve)
    try:
        _call(program, loop, arguments)
    except HoldfastError:
        raise
    except Exception as error:
        if loop.has_begun:
            raise
        raise make_build_error(config.recipe, error) from error


def _call(function: Callable[..., object], loop: OwnLoop, arguments: Mapping[str, Any]) -> None:
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
