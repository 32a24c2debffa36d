"""The order `Observe`: train a step again, and report what was observed in it."""

from collections.abc import Generator

from holdfast.machine import heartbeats
from holdfast.rank.events import Events
from holdfast.rank.messages import Observe, Observed
from holdfast.training import Training, spell_lines, steps
from holdfast.training.observing import StepObserver


def observe(training: Training, order: Observe, events: Events) -> Generator[None, None, None]:
    """Train until the order's step, and report the observations of that step. Yield before each step."""
    observer = StepObserver(training, order.step, order.most)
    first = training.progress.step
    with observer.watching():
        for _ in steps(training, order.step, lambda: False):
            with observer.trained(training.progress.step + 1):
                yield
    lines = spell_lines(training, first)
    heartbeats.begin(heartbeats.Phase.EVALUATING)
    events.send(Observed(lines=lines, **vars(observer.finish())))
