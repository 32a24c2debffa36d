"""The present state of a run: its progress, newest commit and live attempt, read from journal and metadata alone."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from holdfast.checkpoint import read_committed
from holdfast.errors import RunStopped
from holdfast.journal import Commit, Journal
from holdfast.journal.endings import Ending
from holdfast.journal.exactness import describe_resume
from holdfast.terminal.columns import align


class LiveAttempt(BaseModel):
    """An attempt without a recorded ending: it is training the run, or it died before it could record its ending.

    Attributes:
        since: the time when it claimed the run.
        last_sign: the time of its newest record: its claim of the run, or a commit.
    """

    attempt: int
    host: str
    pid: int
    since: str
    last_sign: str


class Standing(BaseModel):
    """The state of a run at its newest commit.

    Attributes:
        verdict: a sentence on the run's rehearsals; see `describe_resume`. It isn't a verdict of audits.
    """

    model_config = ConfigDict(protected_namespaces=())

    run: str
    recipe: str
    created_at: str
    complete: bool
    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    epochs: int | None = None
    commit: int = 0
    path: str = ""
    checkpoint_sha256: str = ""
    verdict: str = ""
    origin: str = ""  # the source of the imported checkpoint with which the run began; empty without an import
    previous_checkpoint_sha256: str = ""
    config_fingerprint: str = ""
    attempts: int = 0
    quarantined: int = 0
    model_params: int = 0
    avg_loss: float | None = None
    metrics: dict[str, float | None] = {}
    anneals: dict[str, float] = {}
    probe: dict[str, float | None] = {}
    learning_rate_history: list[list[float]] = []
    live: LiveAttempt | None = None
    ending: Ending | None = None  # the last attempt's ending, if it is on record


def read_standing(journal: Journal) -> Standing:
    """Return the state of a run at its newest commit, without reading a checkpoint's payload.

    Raises:
        RunUnknown: there is no such run.
    """
    record = journal.read_run()
    known: dict[str, Any] = {
        "run": journal.run,
        "recipe": record.recipe,
        "created_at": record.created_at,
        "complete": False,
        "attempts": journal.attempts(),
        "quarantined": len(journal.quarantine_reasons()),
    }
    commit, first = journal.newest(), journal.find_commit(record.first_commit)
    if known["attempts"]:
        ended = journal.read_ending(known["attempts"])
        known["ending"] = ended.ending if ended else None
        known["live"] = None if ended else _read_live_attempt(journal, known["attempts"], commit)
    if commit is None:
        return Standing(**known)
    known |= commit.model_dump(exclude={"created_at", "attempt", "files", "number"}) | {
        "commit": commit.number,
        "verdict": describe_resume(journal, commit),
        "origin": str(first.origin) if first and first.origin else "",
    }
    metadata = read_committed(journal.store, commit)
    epochs = journal.read_epochs()
    if metadata is not None:
        shown = {"avg_loss", "metrics", "anneals", "model_params", "learning_rate_history"}
        known |= metadata.model_dump(include=shown) | {"probe": metadata.probe.values}
        if epochs is not None:
            total_steps = epochs * metadata.steps_per_epoch
            known |= {"epochs": epochs, "total_steps": total_steps, "complete": commit.step >= total_steps}
    if known["complete"]:  # the attempt isn't live, even without an ending: it was killed after the last commit
        known["live"] = None
    return Standing(**{name: value for name, value in known.items() if name in Standing.model_fields})


def _read_live_attempt(journal: Journal, number: int, newest: Commit | None) -> LiveAttempt | None:
    """Return the run's last attempt, which has no recorded ending; None if its own record is lost or damaged.

    Args:
        number: the attempt's number.
        newest: the newest commit.
    """
    record = journal.find_attempt(number)
    if record is None:
        return None
    last_sign = newest.created_at if newest is not None and newest.attempt == number else record.created_at
    return LiveAttempt(
        attempt=number, host=record.host, pid=record.pid, since=record.created_at, last_sign=last_sign
    )  # fmt: skip


def is_trained(journal: Journal, epochs: int) -> bool:
    """Return whether the newest commit is at the end of this number of epochs, or beyond."""
    newest = journal.newest()
    metadata = read_committed(journal.store, newest) if newest else None
    return newest is not None and metadata is not None and newest.step >= epochs * metadata.steps_per_epoch


def is_finished(journal: Journal, epochs: int) -> bool:
    """Return whether a run is trained to its end, and its last attempt has finished its work after the last commit."""
    ending = journal.read_ending(journal.attempts())
    return ending is not None and ending.reason == "completed" and is_trained(journal, epochs)


class Outcome(BaseModel):
    """The result of one attempt.

    Attributes:
        complete: whether all steps of the run are committed.
        retention: which checkpoints the last prune kept and deleted, and why; empty if nothing was pruned.
    """

    complete: bool
    retention: dict[str, Any]


class TrainResult(BaseModel):
    """The result of `flows.train.train`.

    Attributes:
        steps, epochs: the numbers of steps and epochs completed over the whole run.
        checkpoint_sha256_last: the content id of the run's newest checkpoint.
        previous_checkpoint_sha256: the content id of the checkpoint from which the last checkpoint was trained; empty
            for a run's first checkpoint.
        resumed_from_epoch: the number of epochs that were complete when this call began; None for a fresh start.
        learning_rate_history: for each epoch, the learning rates of its first step, one for each parameter group.
        retention: the last prune's report: ``kept`` and ``pruned``.
    """

    run: str
    complete: bool
    steps: int
    epochs: int
    commit: int
    checkpoint_sha256_last: str
    previous_checkpoint_sha256: str
    resumed_from_epoch: int | None
    learning_rate_history: list[list[float]]
    retention: dict[str, Any]
    path: str
    avg_loss: float | None
    metrics: dict[str, float | None]

    @classmethod
    def of(cls, standing: Standing, outcome: Outcome, resumed_from_epoch: int | None) -> Self:
        return cls(
            run=standing.run,
            complete=outcome.complete,
            steps=standing.step,
            epochs=standing.epoch,
            commit=standing.commit,
            checkpoint_sha256_last=standing.checkpoint_sha256,
            previous_checkpoint_sha256=standing.previous_checkpoint_sha256,
            resumed_from_epoch=resumed_from_epoch,
            learning_rate_history=standing.learning_rate_history,
            retention=outcome.retention,
            path=standing.path,
            avg_loss=standing.avg_loss,
            metrics=standing.metrics,
        )

    def describe(self, store: str) -> str:
        """Return the result as text for a person.

        Args:
            store: the URL of the run's store.
        """
        measured = {"final loss": self.avg_loss, **self.metrics}
        rows = {name.replace("_", " "): f"{value:.4f}" for name, value in measured.items() if value is not None}
        stored_in = f"{store.rstrip('/')}/{self.run}/{self.path}"
        rows |= {"checkpoint": self.checkpoint_sha256_last, "stored in": stored_in}
        first = f"run {self.run} is complete: step {self.steps}, epoch {self.epochs}"
        return "\n".join([first, *align(rows, indent="  ")])


def stopped_early(run: str) -> RunStopped:
    """Return the error with which a command ends if its run isn't complete yet."""
    return RunStopped(f"run {run} was stopped early", hint="the same command continues it")
