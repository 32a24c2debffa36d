"""Tests of the deployments: each one can be started, with the parameters that the README shows."""

import importlib
import tomllib
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.events.actions import CallWebhook
from prefect.events.schemas.events import Event
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.utilities.schema_tools.validation import validate

from deployments import automations
from deployments.automations import EARLIER, describe_automations, make_automations
from flows.train import train
from holdfast.config import load_config, parse_config
from holdfast.recipe.function import default_settings
from tasks.heartbeat import EVENT, LAST_EVENT
from tasks.hooks import OVERDUE_EVENT
from tests.conftest import ROOT
from tests.support.waiting import await_equal

DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]


def find(name: str) -> dict[str, Any]:
    return next(deployment for deployment in DEPLOYMENTS if deployment["name"] == name)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_the_entrypoint_is_a_flow_that_takes_the_parameters(deployment: dict[str, Any]) -> None:
    module, _, name = deployment["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), name)
    schedules = [schedule.get("parameters", {}) for schedule in deployment.get("schedules", [])]
    for parameters in (deployment.get("parameters", {}), *schedules):
        assert set(parameters) <= set(flow.parameters.properties)
    assert deployment["description"].strip()


def test_the_form_begins_with_the_run_of_make_train() -> None:
    """The form and `make train` start the same run: no identity setting differs."""
    from_form = parse_config(find("train")["parameters"]["config"])
    from_file = load_config(ROOT / "holdfast" / "recipes" / "language.toml")
    identities = [
        config.identity | {"settings": default_settings(config.recipe) | config.settings}
        for config in (from_form, from_file)
    ]
    assert identities[0] == identities[1]
    assert (from_form.store, from_form.run, from_form.epochs) == (from_file.store, from_file.run, from_file.epochs)


@pytest.mark.parametrize("path", sorted((ROOT / "holdfast/recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_the_form_takes_every_recipe(path: Path) -> None:
    """The server checks the form's values against this schema, and refuses others with the field's name."""
    schema = train.parameters.model_dump_for_openapi()
    config = tomllib.loads(path.read_text("utf-8"))
    assert not validate({"config": config}, schema)
    (refused,) = validate({"config": config | {"epochs": "many"}}, schema)
    assert "'many' is not of type 'integer'" in refused.message


def test_only_prune_and_audit_are_scheduled_by_default() -> None:
    active = {
        deployment["name"]: schedule["cron"]
        for deployment in DEPLOYMENTS
        for schedule in deployment.get("schedules", [])
        if schedule.get("active", True)
    }
    assert active == {"audit": "0 3 * * *", "prune": "0 4 * * 0"}


def test_a_run_that_ends_is_not_taken_for_lost() -> None:
    lost, *_ = describe_automations()
    trigger: Any = lost.trigger
    assert trigger.after == {EVENT}
    assert {EVENT, LAST_EVENT, "prefect.flow-run.*"} <= trigger.expect


@pytest.mark.slow
def test_automations_that_did_not_change_are_left_alone(
    prefect_api: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update changes a trigger's id, and the server then forgets for which flow runs it was waiting."""

    def triggers() -> dict[str, str]:
        with get_client(sync_client=True) as client:
            answer = client.request("POST", "/automations/filter", json={})
        return {automation["name"]: automation["trigger"]["id"] for automation in answer.json()}

    known = {PREFECT_API_URL: prefect_api["PREFECT_API_URL"]}
    known[PREFECT_API_AUTH_STRING] = prefect_api["PREFECT_API_AUTH_STRING"]
    with temporary_settings(known):
        make_automations()
        first = triggers()
        make_automations()
        assert triggers() == first
        assert set(first) == {automation.name for automation in describe_automations()}
        monkeypatch.setattr(automations, "LOST_AFTER_S", 20.0)
        make_automations()
        changed = {name for name, trigger in triggers().items() if trigger != first[name]}
    assert changed == {"holdfast: crash a flow run without heartbeats"}


@pytest.mark.slow
def test_an_overdue_commit_raises_an_alarm_whose_actions_stay(prefect_api: dict[str, str]) -> None:
    """People give an alarm an action in Prefect's UI; an update of the automations keeps it."""
    name = "holdfast: alarm when a commit is overdue"
    known = {PREFECT_API_URL: prefect_api["PREFECT_API_URL"]}
    known[PREFECT_API_AUTH_STRING] = prefect_api["PREFECT_API_AUTH_STRING"]
    with temporary_settings(known), get_client(sync_client=True) as client:
        make_automations()
        [alarm] = client.read_automations_by_name(name)
        own = CallWebhook(type="call-webhook", block_document_id=uuid4())
        [described] = [each for each in describe_automations() if each.name == name]
        client.update_automation(alarm.id, described.model_copy(update={"actions": [own], "name": EARLIER[name]}))
        make_automations()
        [alarm] = client.read_automations_by_name(name)
        assert alarm.actions == [own]
        run = f"store/{uuid4()}"
        event = Event(event=OVERDUE_EVENT, resource={"prefect.resource.id": f"holdfast.run.{run}"}, payload={})

        def is_raised() -> bool:
            client.request("POST", "/events", json=[event.model_copy(update={"id": uuid4()}).model_dump(mode="json")])
            wanted = {"filter": {"event": {"name": ["prefect.automation.triggered"]}}}
            found = client.request("POST", "/events/filter", json=wanted).json()["events"]
            return any(each["resource"]["prefect.resource.id"].endswith(str(alarm.id)) for each in found)

        await_equal(is_raised, True)
