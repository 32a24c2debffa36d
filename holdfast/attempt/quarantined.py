"""The check that this machine, and the GPUs that a run takes here, are not in the store's quarantine."""

from holdfast.config import Compute
from holdfast.errors import MachineQuarantined
from holdfast.journal.machines import MachineRecord, list_quarantined
from holdfast.machine.gpus import list_taken, list_visible, read_report
from holdfast.machine.host import name_host
from holdfast.store import open_store


def check_machine(store: str, compute: Compute) -> None:
    """Check that a run may train here. It costs one request, and asks for GPUs only if one is in quarantine.

    Args:
        store: the folder or URL that holds the runs.

    Raises:
        MachineQuarantined: this machine, or a GPU that the run would take, has computed wrongly.
    """
    records = list_quarantined(open_store(store))
    gpus = _list_gpus(compute) if any(each.gpus for each in records) and compute.device != "cpu" else set()
    for record in records:
        if gpus & {*record.gpus} or (record.host == name_host() and _is_whole(record, gpus, compute)):
            raise MachineQuarantined(
                f"this machine is quarantined in {store}: {record}",
                hint="start the run on another one; once this one is repaired, "
                f"holdfast doctor --store {store} --release {record.host}",
            )


def _is_whole(record: MachineRecord, gpus: set[str], compute: Compute) -> bool:
    """Return whether a record of this machine refuses the run whichever GPUs it takes, or they aren't known."""
    return not record.gpus or (compute.device != "cpu" and not gpus)


def _list_gpus(compute: Compute) -> set[str]:
    """Return the UUIDs of the GPUs that a run takes here; none if nvidia-smi doesn't tell."""
    visible = list_visible(read_report())
    return {gpu.uuid for gpu in list_taken(visible, compute.rank_count)} if visible else set()
