"""Which machines the store's quarantine refuses, and which checkpoints those machines may have trained."""

from collections.abc import Sequence

from holdfast.checkpoint import Saved
from holdfast.config import Compute, RunConfig
from holdfast.errors import MachineQuarantined
from holdfast.extensions.quarantine.records import MachineRecord, list_doubted, list_quarantined
from holdfast.journal import Journal
from holdfast.machine.gpus.report import read_report
from holdfast.machine.gpus.visible import list_taken, list_visible
from holdfast.machine.host import name_host
from holdfast.store import open_store


def refuse_quarantined(config: RunConfig) -> str:
    """Check that a run may train on this machine. The check costs one request to the store.

    This machine's GPUs are listed only if the store has a GPU in quarantine.

    Raises:
        MachineQuarantined: this machine, or a GPU that the run would take, has computed wrongly.
    """
    compute = config.compute
    records = list_quarantined(open_store(config.store))
    gpus = _list_gpus(compute) if any(each.gpus for each in records) and compute.device != "cpu" else set()
    for record in records:
        if _concerns(record, {name_host()}, gpus, compute.device == "cpu"):
            raise MachineQuarantined(
                f"this machine is quarantined in {config.store}: {record}",
                hint="start the run on another machine; once this machine is repaired, "
                f"holdfast doctor --store {config.store} --release {record.host}",
            )
    return ""


def find_doubt(journal: Journal, saved: Saved, attempts: Sequence[int]) -> str:
    """Return a text if a machine that computes wrongly may have trained a checkpoint without a commit; else empty.

    Args:
        attempts: the numbers of the attempts of which one has saved the checkpoint.
    """
    trained = saved.metadata
    records = list_doubted(open_store(journal.store_url), trained.trained_at or trained.created_at)
    if not records:
        return ""
    hosts = {each.host for each in map(journal.find_attempt, attempts) if each and each.is_training}
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
