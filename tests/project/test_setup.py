"""Tests of what Prefect's server is set up with: work pools from files, and the deployments' store."""

import asyncio
import copy
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from uuid import UUID, uuid4

import pytest
import yaml
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect_docker.worker import DockerWorkerJobConfiguration

from deployments import pools
from deployments.pools import POOLS, await_answer, describe_pools, parse_assignments, set_defaults
from deployments.setup import PREFECT_FILE, restore_schedules, set_store
from holdfast.errors import ConfigError, RunStopped
from tasks.server import free_port
from tests.support.waiting import await_equal

TEMPLATE = {"variables": {"properties": {"image": {"type": "string"}, "gpus": {}}}, "job_configuration": {}}


@pytest.mark.parametrize("kind", ["process", "docker"])
def test_every_placeholder_of_a_pool_is_a_variable(kind: str) -> None:
    pools = describe_pools(kind)
    assert set(pools) == set(POOLS)
    for template in pools.values():
        variables = template["variables"]["properties"]
        used = yaml.safe_dump(template["job_configuration"]).split("{{ ")[1:]
        assert {each.partition(" }}")[0] for each in used} <= set(variables)


def test_two_flow_runs_of_one_name_get_containers_of_different_names() -> None:
    """podman refuses the name of an ended container, and Prefect's worker then reports a crash."""
    template = describe_pools("docker")["gpu"]
    client: Any = object()  # asked only for blocks and variables of the server, of which the template has none
    names = []
    for number in (1, 2):
        made = asyncio.run(DockerWorkerJobConfiguration.from_template_and_values(template, {}, client=client))
        made.prepare_for_flow_run(FlowRun(id=UUID(int=number), flow_id=UUID(int=3), name="toy attempt 1"))
        names.append(made.name)
    assert names == [f"toy-attempt-1-{UUID(int=number)}" for number in (1, 2)]


def test_values_become_defaults() -> None:
    values = parse_assignments(["image=team/model:7", "gpus=2"])
    properties = set_defaults(TEMPLATE, values)["variables"]["properties"]
    assert (properties["image"]["default"], properties["gpus"]["default"]) == ("team/model:7", 2)
    assert "default" not in TEMPLATE["variables"]["properties"]["image"]


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["imgae=x"], "the job template has no variable 'imgae'; its variables are image, gpus"),
        (["image"], "--set takes NAME=VALUE, not 'image'; such as --set image=holdfast:worker"),
    ],
)
def test_a_wrong_value_is_refused(assignments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        set_defaults(TEMPLATE, parse_assignments(assignments))
    assert f"{caught.value.message}; {caught.value.hint}" == message


def test_the_store_reaches_every_deployment_and_schedule() -> None:
    known: dict[str, Any] = yaml.safe_load(PREFECT_FILE.read_text("utf-8"))
    changed = set_store(copy.deepcopy(known), "s3://team/runs")
    assert "s3://team/runs" not in str(known)
    for deployment in changed["deployments"]:
        for each in (deployment, *deployment.get("schedules", [])):
            parameters = each.get("parameters", {})
            if "config" in parameters:
                assert parameters["config"]["store"] == "s3://team/runs"
            elif deployment["name"] in ("audit", "prune") and each is deployment:
                assert parameters["store"] == "s3://team/runs"


def make_schedule(slug: str | None, hour: int, *, is_on: bool) -> DeploymentSchedule:
    schedule = CronSchedule(cron=f"0 {hour} * * *", timezone="Europe/Berlin")
    return DeploymentSchedule(id=uuid4(), schedule=schedule, active=is_on, slug=slug, parameters={"hour": hour})


def test_schedules_stay_on_or_off_and_a_persons_own_are_added_again() -> None:
    """`prefect deploy` has replaced the schedules: it has turned them on or off, and has dropped a person's own."""
    nightly, weekly, same = (make_schedule(slug, 3, is_on=False) for slug in ("nightly", "weekly", "same"))
    made = [nightly, weekly.model_copy(update={"active": True}), same]
    turned = nightly.model_copy(update={"id": uuid4(), "active": True})
    own, named = make_schedule(None, 5, is_on=True), make_schedule("own", 6, is_on=False)
    deployed = DeploymentResponse(id=uuid4(), name="audit", flow_id=uuid4(), schedules=made, labels={})
    before = deployed.model_copy(update={"schedules": [turned, weekly, same, own, named]})
    updated, added = [], []

    class Client:
        def read_deployment(self, deployment: UUID) -> DeploymentResponse:
            assert deployment == before.id
            return deployed

        def update_deployment_schedule(self, deployment: UUID, schedule: UUID, *, active: bool) -> None:
            updated.append((deployment, schedule, active))

        def request(self, method: str, path: str, path_params: dict[str, str], json: list[dict[str, Any]]) -> None:
            assert (method, path, path_params) == ("POST", "/deployments/{id}/schedules", {"id": str(before.id)})
            added.extend(json)

    client: Any = Client()
    restore_schedules(client, before)
    assert updated == [(before.id, nightly.id, True), (before.id, weekly.id, False)]
    found = [(each["schedule"]["cron"], each["active"], each.get("slug"), each["parameters"]["hour"]) for each in added]
    assert found == [("0 5 * * *", True, None, 5), ("0 6 * * *", False, "own", 6)]
    assert {each["schedule"]["timezone"] for each in added} == {"Europe/Berlin"}


def test_a_server_that_does_not_answer_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "ANSWERS_WITHIN_S", 1.0)
    url = f"http://127.0.0.1:{free_port()}/api"
    with pytest.raises(RunStopped, match=f"Prefect's server at {url} did not answer within 1 s"):
        await_answer(url)


def test_a_server_that_is_starting_is_awaited(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    waits, said = f"waiting for Prefect's server at http://127.0.0.1:{port}/api\n", list[str]()

    def listen() -> str:
        said.append(capsys.readouterr().out)
        return "".join(said)

    def serve_late() -> None:
        await_equal(listen, waits)
        with HTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler) as server:
            server.handle_request()

    thread = threading.Thread(target=serve_late)
    thread.start()
    await_answer(f"http://127.0.0.1:{port}/api")
    thread.join()
    assert listen() == waits
