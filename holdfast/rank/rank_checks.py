"""The checks that the nodes of a run have the same settings, code and versions, and the same store."""

from dataclasses import dataclass
from typing import Any

from holdfast.config import RunConfig
from holdfast.errors import ConfigDrift
from holdfast.provenance.changes import Change, compare_identities, format_value
from holdfast.provenance.fingerprint import ABSENT
from holdfast.provenance.recorded import VERSIONS, compare_records
from holdfast.rank.claim import find_attempt, find_problem, not_shared
from holdfast.rank.nodes import name_node
from holdfast.training import Training


@dataclass(frozen=True)
class NodeIdentity:
    """The facts about a node that are compared between nodes.

    Args:
        name: the node's number and host.
        settings: the settings that have to be equal on all nodes.
        environment: the node's machine, and its record of code; see `holdfast.rank.record`.
    """

    name: str
    settings: dict[str, Any]
    environment: dict[str, Any]


def check_same_training(training: Training, environment: dict[str, Any]) -> None:
    """Check that all nodes train with the same settings, code and versions. All ranks call it.

    Args:
        environment: the description of this rank's machine; in a node's first rank also the record of code.

    Raises:
        ConfigDrift: two nodes differ; the error names the nodes and their differences. All ranks raise it.
    """
    config, own = training.config, None
    if training.accelerator.is_local_main_process:
        own = NodeIdentity(name_node(config.compute), describe_settings(config), environment)
    first, *others = [node for node in training.ranks.gather(own) if node]
    for node in others:
        compare_nodes(first, node)


def compare_nodes(first: NodeIdentity, second: NodeIdentity) -> None:
    """Raise ConfigDrift if two nodes have different settings, code or versions that would make training different."""
    from holdfast.provenance.drift import SHOWN_CHANGES, is_harmless  # few runs have several nodes

    there, here = first.environment, second.environment
    versions = [
        Change(name=name, kind="package", saved=there.get(name, ABSENT), current=here.get(name, ABSENT))
        for name in VERSIONS
        if name != "holdfast" and there.get(name) != here.get(name)  # compare_records compares "holdfast"
    ]
    records = [each for each in compare_records(there, here) if each.kind == "package" or not is_harmless(each)]
    differ = [*compare_identities(first.settings, second.settings, {}), *versions, *records]
    causes = [each for each in differ if each.kind != "built"] or differ
    if causes:
        shown = [
            f"{each.name} is {format_value(each.saved)} on the first, {format_value(each.current)} on the second"
            for each in causes
        ]
        more = len(shown) - SHOWN_CHANGES
        shown[SHOWN_CHANGES:] = [f"and {more} more"] if more > 0 else []
        raise ConfigDrift(
            f"{first.name} and {second.name} would train differently: {'; '.join(shown)}",
            hint="put the same settings, code and packages on all nodes",
            fields={change.name: [change.saved, change.current] for change in causes},
        )


def describe_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that have to be equal on all nodes. Folders and waiting times may differ.

    The steps to skip aren't compared, because each order names them to all ranks.
    """
    identity = {name: value for name, value in config.identity.items() if name != "skip"}
    return {"run": config.run, "epochs": config.epochs, "checkpoint": config.checkpoint.model_dump(), **identity}


def check_same_store(training: Training) -> None:
    """Check that all nodes share a store: each has to see the attempt's claim there. All ranks call it together.

    Raises:
        StoreError: a node doesn't see the claim. All ranks raise it.
    """
    config = training.config
    attempt = training.ranks.gather(find_attempt(config) if training.accelerator.is_main_process else 0)[0]
    problem = ""
    if training.accelerator.is_local_main_process:
        problem = find_problem(config, attempt, name_node(config.compute))
    if problem := next(filter(None, training.ranks.gather(problem)), ""):
        raise not_shared(problem)
