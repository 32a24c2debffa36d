"""Tests of how long a server keeps events: heartbeats for an hour, wherever the server runs."""

import json

import pytest
import yaml
from prefect.settings.models.server.services import ServerServicesDBVacuumSettings

from deployments.ledger import ROOT
from tasks.heartbeat import EVENT
from tasks.server import KEPT_S, RETENTION, describe_server


def test_a_server_of_ours_keeps_heartbeats_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RETENTION, raising=False)
    described = describe_server("http://127.0.0.1:4200/api", "user:secret")
    monkeypatch.setenv(RETENTION, described[RETENTION])
    kept = ServerServicesDBVacuumSettings().event_retention_overrides
    assert {name: each.total_seconds() for name, each in kept.items()} == KEPT_S
    assert KEPT_S[EVENT] == 3600


def test_the_users_own_retention_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RETENTION, '{"holdfast.heartbeat": 60}')
    assert describe_server("http://127.0.0.1:4200/api", "user:secret")[RETENTION] == '{"holdfast.heartbeat": 60}'


def test_all_servers_keep_events_alike() -> None:
    compose = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text("utf-8"))
    values = yaml.safe_load((ROOT / "infra" / "kubernetes" / "server-values.yaml").read_text("utf-8"))
    chart = {each["name"]: each["value"] for each in values["global"]["prefect"]["env"]}
    for text in (compose["services"]["server"]["environment"][RETENTION], chart[RETENTION]):
        assert json.loads(text) == KEPT_S
