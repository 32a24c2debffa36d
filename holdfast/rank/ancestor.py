"""The order `Begin`: load the weights with which a run begins."""

from pathlib import Path

from holdfast.rank.events import Events
from holdfast.rank.messages import Begin, Begun
from holdfast.rank.restore import load_checkpoint
from holdfast.store import open_store
from holdfast.training import Training
from holdfast.training.init_from import begin_from, begin_from_folder


def load_ancestor(training: Training, order: Begin, events: Events) -> None:
    """Give the model the weights of another run's checkpoint; report `Begun` or `Damaged`."""
    init = training.config.init_from
    assert init is not None
    if order.commit is None:
        begin_from_folder(training, Path(order.store), init)
        events.send(Begun(anneal_offset=training.progress.anneal_offset))
        return
    loaded = load_checkpoint(training, open_store(order.store).inside(order.run), order.commit, events)
    if loaded is not None:
        payload, metadata = loaded
        begin_from(training, payload, metadata, init)
        events.send(Begun(anneal_offset=training.progress.anneal_offset))
