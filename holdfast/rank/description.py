"""The description of a rank's training (model, data, optimizer), which the rank sends to the attempt."""

from typing import Any

from holdfast.machine.environment import describe_environment
from holdfast.machine.host import HOSTS, name_host
from holdfast.machine.self_test import KEY, SelfTest, find_fault, refuse, run_self_test
from holdfast.provenance.fingerprint import to_plain
from holdfast.rank.messages import Ready
from holdfast.rank.record import CodeRecord
from holdfast.recipe.function import default_settings
from holdfast.training import Training, count_params, find_idle


def describe_training(training: Training, record: CodeRecord | None) -> Ready:
    """Test the devices of all ranks. Return a description of the training, for fingerprint, journal and log.

    All ranks call it together.

    Raises:
        SelfTestFailed: a self-test has failed, and the configuration refuses that.
    """
    test, health = test_device(training)
    machine = describe_environment(training.accelerator.device.type) | ({KEY: test.describe()} if test else {})
    return Ready(
        settings=training.settings,
        defaults={name: to_plain(value) for name, value in default_settings(training.config.recipe).items()},
        data=describe_data(training),
        steps_per_epoch=training.steps_per_epoch,
        samples_per_step=training.samples_per_step,
        sample_size=training.recipe.sample_size,
        unit=training.recipe.unit,
        flops_per_sample=training.recipe.flops_per_sample,
        model_params=count_params(training),
        device=str(training.accelerator.device),
        environment=(record.describe() if record else {}) | machine | list_hosts(training),
        warnings=[*health, *find_idle(training), *find_unused_workers(training)],
        notes=training.notes,
        hints=training.record.hints,
    )


def list_hosts(training: Training) -> dict[str, list[str]]:
    """Return the hosts of all ranks, for the record of the machine; an empty dict if all ranks are on one node.

    All ranks call it together.
    """
    compute = training.config.compute
    hosts = training.ranks.gather(name_host())
    return {HOSTS: hosts} if compute.has_nodes or compute.has_cluster or len({*hosts}) > 1 else {}


def test_device(training: Training) -> tuple[SelfTest | None, list[str]]:
    """Test this rank's device, and collect the results of the other ranks' tests.

    Returns:
        the result of this rank's test (None if the test can't run), and a warning that names the devices whose tests
        failed.

    Raises:
        SelfTestFailed: a test has failed, and the configuration refuses that.
    """
    own: SelfTest | None = None
    warnings: list[str] = []
    try:
        own = run_self_test(str(training.accelerator.device))
    # a test that can't run, because of the recipe's torch settings or too little memory, must not end the run
    except Exception as error:
        warnings.append(f"the self-test can't run here, and is left out: {type(error).__name__}: {error}")
    tests = training.ranks.gather(own)
    fault = find_fault(tests) if all(tests) else ""
    if fault and training.config.compute.gpu_health == "refuse":
        raise refuse(fault)
    return own, [*warnings, f'{fault}; compute.gpu_health = "warn" trains anyway'] if fault else warnings


def find_unused_workers(training: Training) -> list[str]:
    """Return a warning if a ``DataLoader`` asks for workers, and the configuration sets no workers."""
    asked = getattr(training.batches, "unused_workers", 0)
    if not asked:
        return []
    return [
        f"the DataLoader's num_workers = {asked} is not used: compute.loader_workers = 0 loads its data in the rank; "
        f"compute.loader_workers = {asked} would give the same bytes"
    ]


def describe_data(training: Training) -> dict[str, Any]:
    """Return the fingerprint's part about the data: its content, and how ranks and workers divide the samples."""
    if training.order is not None:
        size = {"samples": training.order.samples}
    elif training.recipe.batch_size is None:
        size = training.batches.describe()
    else:
        # the number of workers matters, because each worker reads a part of a stream
        size = {"loader_workers": training.config.compute.loader_workers}
    content = {"content": dict(training.recipe.content)} if training.recipe.content else {}
    return {"sha256": training.recipe.data_sha256, **size, **content}
