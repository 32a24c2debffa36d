"""The shadow of a stop: steps that ranks train after their last save, and that no checkpoint contains.

Ranks that are told to stop know how the run would have continued. So they train a few more steps once their save is
durable, and leave the trail of these steps. The next attempt has to train the same steps with the same trail before it
commits anything. The save comes first: the shadow may be cut short at any moment.
"""

from collections.abc import Generator

from holdfast.checkpoint.departure import MOST_DETAILED, MOST_SHADOWED
from holdfast.rank.events import Events
from holdfast.rank.messages import Shadowed
from holdfast.rank.orders import Orders
from holdfast.rank.survivor import Survivor
from holdfast.training import Training, examine_recipe, spell_lines, steps

# The part of `resume.stop_within_s` in which the save and the steps have to end after an order to stop at once.
SHARE = 0.25


def train_shadow(
    training: Training, orders: Orders, events: Events, survivor: Survivor, first: int
) -> Generator[None, None, None]:
    """Wait until the last save is durable, then train a few steps and report their trail. Yield before each step.

    Don't train a step for which there is no time, or the run's last step, after which a user's loop would end. All
    ranks call this together.

    Args:
        first: the step of the last save. If the ranks have trained steps after it already, report these, too.

    Raises:
        StoreError: the last save has failed.
    """
    record = training.record
    training.saver.wait()
    stop = min(first + MOST_SHADOWED, training.total_steps - 1)
    if training.config.proof.rehearse == "off" or first >= stop:
        return
    survivor.begin_shadow()
    record.is_rehearsal = True
    record.ends.saves_first = lambda end: False
    within_s = SHARE * training.config.resume.stop_within_s
    unregistered = examine_recipe(training.recipe).found
    events.send(Shadowed(lines=spell_lines(training, first), unregistered=unregistered))
    while (step := training.progress.step) < stop and all(training.ranks.gather(orders.has_time(within_s))):
        record.is_detailed = step < first + MOST_DETAILED
        yield from steps(training, step + 1, lambda: False)
        events.send(Shadowed(lines=spell_lines(training, step)))
