"""One process life of a run, as a flow run of its own."""

from prefect import flow
from prefect.exceptions import TerminationSignal

from holdfast.config import RunConfig
from holdfast.progress import ProgressView
from holdfast.standing import Outcome
from tasks import hooks
from tasks.chunks import commit_chunk, open_run, train_chunk


@flow(name="attempt", flow_run_name="{config.run} attempt {number}", retries=0)
def attempt(config: RunConfig, number: int) -> Outcome:
    """Train a run, chunk by chunk, from where its journal says that it stands, until it is complete.

    Told to end (SIGTERM, Ctrl-C), it finishes the step in hand, saves and commits it.

    Args:
        config: The run's configuration.
        number: The attempt's number; an attempt of a higher number fences this one off.
    """
    opened = open_run(config, number)
    resumed_from_epoch = opened.head.epoch if opened.head else None
    commit = commit_chunk.with_options(on_completion=hooks.after_commit(opened))
    try:
        with ProgressView(opened):
            while (chunk := opened.next_chunk()) is not None:
                saved = train_chunk(opened, chunk)
                if saved is not None:
                    commit(opened, saved)
        report = opened.read_retention_report()
        return Outcome(
            complete=opened.is_complete,
            resumed_from_epoch=resumed_from_epoch,
            retention=report.model_dump(mode="json") if report else {},
        )
    except (TerminationSignal, KeyboardInterrupt):
        opened.stop()
        raise
    finally:
        opened.close()
