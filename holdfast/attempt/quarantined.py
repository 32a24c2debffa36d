"""Which machines may not train: those that the store has quarantined, and those that an extension refuses."""

from holdfast.checkpoint import Saved
from holdfast.config import Compute, RunConfig
from holdfast.errors import MachineQuarantined, MachineRefused
from holdfast.extending import call_all
from holdfast.journal import Commit, Journal
from holdfast.journal.machines import MachineRecord, list_doubted, list_quarantined
from holdfast.machine.gpus import list_taken, list_visible, read_report
from holdfast.machine.host import name_host
from holdfast.store import open_store


def check_machine(store: str, compute: Compute) -> None:
    """Check that a run may train on this machine. The check costs one request to the store.

    This machine's GPUs are listed only if the store has a GPU in quarantine.

    Args:
        store: the folder or URL that holds the runs.

    Raises:
        MachineQuarantined: this machine, or a GPU that the run would take, has computed wrongly.
    """
    records = list_quarantined(open_store(store))
    gpus = _list_gpus(compute) if any(each.gpus for each in records) and compute.device != "cpu" else set()
    for record in records:
        if _concerns(record, {name_host()}, gpus, compute.device == "cpu"):
            raise MachineQuarantined(
                f"this machine is quarantined in {store}: {record}",
                hint="start the run on another machine; once this machine is repaired, "
                f"holdfast doctor --store {store} --release {record.host}",
            )


def ask_extensions(config: RunConfig) -> None:
    """Check that no extension refuses this machine.

    Raises:
        MachineRefused: an extension refuses it.
    """
    for name, reason in call_all("admission", config):
        if reason:
            raise MachineRefused(f"{name} refuses this machine: {reason}", hint="start the run on another machine")


def find_doubt(journal: Journal, head: Commit | None, attempt: int, saved: Saved) -> str:
    """Return a text if a machine that computes wrongly may have trained a checkpoint without a commit; else empty.

    No file of the checkpoint says which attempt's ranks have saved it. So any attempt since the parent's commit may
    have saved it.

    Args:
        head: the checkpoint's parent; None before the run's first commit.
        attempt: the present attempt's number.
    """
    trained = saved.metadata
    records = list_doubted(open_store(journal.store_url), trained.trained_at or trained.created_at)
    if not records:
        return ""
    attempts = map(journal.find_attempt, range(journal.first_attempt_after(head), attempt + 1))
    hosts = {each.host for each in attempts if each and each.is_training}
    gpus = set(map(str, trained.environment.get("gpu_uuids") or ()))
    is_on_cpu = trained.environment.get("device") == "cpu"
    doubted = (record for record in records if _concerns(record, hosts, gpus, is_on_cpu))
    return next((f"a quarantined machine may have trained the checkpoint: {record}" for record in doubted), "")


def _concerns(record: MachineRecord, hosts: set[str], gpus: set[str], is_on_cpu: bool) -> bool:
    """Return whether a quarantine covers a training on one of these hosts.

    Args:
        gpus: the UUIDs of the training's GPUs; empty if they aren't known.
    """
    is_whole = not record.gpus or not (is_on_cpu or gpus)  # the quarantine covers every training on its host
    return bool(gpus & {*record.gpus}) or (record.host in hosts and is_whole)


def _list_gpus(compute: Compute) -> set[str]:
    """Return the UUIDs of the GPUs that a run takes on this machine; an empty set if nvidia-smi doesn't list them."""
    visible = list_visible(read_report())
    return {gpu.uuid for gpu in list_taken(visible, compute.rank_count)} if visible else set()
