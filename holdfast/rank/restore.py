"""The order `Restore`: load a commit's state, and check it with the gate."""

from typing import TYPE_CHECKING, Any

from holdfast import checkpoint
from holdfast.checkpoint import Metadata, Payload
from holdfast.errors import CheckpointDamaged, GateTripped
from holdfast.journal import Commit
from holdfast.rank.events import Events
from holdfast.rank.messages import Damaged, Restore, Restored, Skipped, Tripped
from holdfast.store import Store
from holdfast.training import Training, resume, resume_weights, take_up
from holdfast.training.reading import read_state

if TYPE_CHECKING:
    from holdfast.checkpoint.near import NearReader


def restore_commit(training: Training, folder: Store, order: Restore, events: Events) -> bool:
    """Load a commit's state, check it with the gate, and report `Restored`, `Damaged` or `Tripped`.

    Returns:
        True if all ranks have restored the state.
    """
    near = None
    if training.saver.near is not None and not order.aside:
        from holdfast.checkpoint.near import NearReader  # few runs have a near folder

        near = NearReader(training.saver.near, order.commit)
    folder = folder.inside(order.aside) if order.aside else folder
    loaded = load_checkpoint(training, folder, order.commit, events, near)
    if loaded is None:
        return False
    resumed, problem = None, None

    def watch(done: int, total: int) -> None:
        events.send(Skipped(done=done, total=total))

    try:
        payloads, metadata = [loaded[0]], loaded[1]
        loaded = None
        resumed = resume(training, payloads.pop(), metadata, order.gate, watch)  # `resume` frees the payload
        if order.aside:
            take_up(training, folder, order.commit.path, metadata)
    except GateTripped as error:
        problem = Tripped.of(error)
    problems = training.ranks.gather(problem)
    if any(problems):
        events.send(_name_rank(problems))
    elif resumed is not None:
        events.send(Restored(**vars(resumed), **_describe_near(training, near)))
        return True
    return False


def restore_again(
    training: Training, folder: Store, order: Restore, events: Events, *, are_weights: bool = False
) -> None:
    """Load a commit's state a second time, after `restore_commit` has loaded and checked it.

    Args:
        are_weights: whether to restore only weights and an optimizer's moments, because the first step has begun; see
            `resume_weights`.

    Raises:
        CheckpointDamaged: the checkpoint was damaged meanwhile.
        GateTripped: the state can't be restored exactly after a step.
    """
    folder = folder.inside(order.aside) if order.aside else folder
    loaded = load_checkpoint(training, folder, order.commit, events)
    if loaded is None:
        raise CheckpointDamaged(
            f"checkpoint {order.commit.path} was damaged meanwhile: the ranks have read it before, and can't read it "
            "now"
        )
    if are_weights:
        resume_weights(training, loaded[0])
    else:
        payloads, metadata = [loaded[0]], loaded[1]
        loaded = None
        resume(training, payloads.pop(), metadata, order.gate, lambda done, total: None)


def _describe_near(training: Training, near: "NearReader | None") -> dict[str, Any]:
    """Return the fields of `Restored` about files that were read from node-local copies. All ranks call it together."""
    if near is None:
        return {}
    found = training.ranks.gather((len(near.taken), near.problem))
    return {
        "near": sum(taken for taken, _ in found),
        "near_problem": next(filter(None, (each for _, each in found)), ""),
    }


def _name_rank(problems: list[Tripped | None]) -> Tripped:
    """Return the problem of the first rank that has a problem.

    The text names the rank, unless all ranks have problems.
    """
    rank, problem = next((rank, each) for rank, each in enumerate(problems) if each)
    return problem if all(problems) else problem.model_copy(update={"message": f"rank {rank}: {problem.message}"})


def load_checkpoint(
    training: Training, folder: Store, commit: Commit, events: Events, near: "NearReader | None" = None
) -> tuple[Payload, Metadata] | None:
    """Return a commit's verified checkpoint.

    If any rank finds damage, report it and return None on all ranks.

    Args:
        near: the reader of this node's local copies, which are tried before the store; None if the run has no near
            folder.
    """
    loaded, problem = None, None
    try:
        payload = read_state(training, folder, commit, near)
        metadata = checkpoint.read_metadata(folder, commit.path)
        if metadata is None:  # the checkpoint was deleted after its payload was read
            raise CheckpointDamaged(
                f"checkpoint {commit.path} was deleted while it was read: its metadata.json is missing"
            )
        loaded = payload, metadata
    except CheckpointDamaged as error:
        problem = Damaged.of(error)
    problems = [each for each in training.ranks.gather(problem) if each]
    if problems:
        events.send(problems[0])
        return None
    return loaded
