"""Metric sinks: TensorBoard and Weights & Biases show a run as one curve, however often the run dies.

A sink gets its numbers from commits alone, so that it never draws a step which the run later loses. Each sink is its
own process, `python -m holdfast.extensions.sinks`. The attempt starts this process, and never waits for it
during training. So no sink's library is ever loaded in a training process.
"""

from typing import TYPE_CHECKING

from holdfast.extending import Extension

if TYPE_CHECKING:
    from holdfast.attempt import Observer
    from holdfast.config import RunConfig


def observe_sinks(config: "RunConfig") -> "list[Observer]":
    """Return the observer for ``log.sinks``; an empty list if the run has no sinks.

    Raises:
        ConfigError: a sink can't be used on this machine.
    """
    if not config.log.sinks:
        return []
    from holdfast.extensions.sinks.observer import Sending  # not imported by a run without sinks

    return [Sending(config)]


extension = Extension("sinks", observers=f"{__name__}:observe_sinks")
