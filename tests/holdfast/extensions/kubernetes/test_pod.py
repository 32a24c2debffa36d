"""Tests of the question whether Kubernetes disrupts this pod, and of the endings of attempts that follow from it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.attempt import AttemptView, Observer, live
from holdfast.attempt.life import find_ending
from holdfast.config import ChunkLength, Log, RunConfig
from holdfast.errors import RankDied, RecipeError, StoreError
from holdfast.extensions.kubernetes import pod
from holdfast.extensions.kubernetes.pod import ask_pod
from holdfast.journal import Commit, Journal
from holdfast.machine.preemption import Notice
from holdfast.store import open_store
from holdfast.testing.arrays import array_ranks
from tests.support.pod import EVICTED, READY, TOKEN, PodServer, within_a_pod

REASON = "EvictionByEvictionAPI: Eviction API: evicting"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodServer]:
    folder = tmp_path / "rights"
    folder.mkdir()
    with within_a_pod(folder, monkeypatch) as server:
        yield server


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "disrupts this pod" in each.getMessage()]


def test_the_pods_condition_says_why_it_is_disrupted(server: PodServer) -> None:
    assert ask_pod() == "", "it is ready"
    server.conditions = [READY, EVICTED]
    assert ask_pod() == REASON
    server.conditions = [EVICTED | {"status": "False"}]
    assert ask_pod() == "", "the disruption was called off"
    server.conditions = [{"type": "DisruptionTarget", "status": "True"}]
    assert ask_pod() == "unknown reason"
    assert {*server.asked} == {("GET", "/api/v1/namespaces/team/pods/train-0", f"Bearer {TOKEN}")}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"kind": "Status"}', 403, "HTTP Error 403: Forbidden"),
        (b"no JSON", 200, "Expecting value"),
        (b'{"status": {"conditions": [1]}}', 200, "has no attribute 'get'"),
    ],
)
def test_an_api_that_gives_no_pod_is_one_warning(
    server: PodServer, caplog: pytest.LogCaptureFixture, body: bytes, status: int, said: str
) -> None:
    server.body, server.status = body, status
    assert ask_pod() == ""
    (warning,) = warnings_of(caplog)
    assert warning.startswith("can't ask Kubernetes whether it disrupts this pod: ")
    assert said in warning
    assert len(server.asked) == 1


def test_the_server_has_to_have_the_clusters_certificate(
    server: PodServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    PodServer(other).close()
    (tmp_path / "rights" / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    assert ask_pod() == ""
    assert server.asked == [], "the token went to nobody else"
    assert "CERTIFICATE_VERIFY_FAILED" in warnings_of(caplog)[0]


def test_an_api_that_does_not_answer_is_not_awaited(server: PodServer, caplog: pytest.LogCaptureFixture) -> None:
    server.is_silent = True
    began = time.monotonic()
    assert ask_pod(0.3) == ""
    assert time.monotonic() - began < pod.ANSWER_WITHIN_S
    assert warnings_of(caplog) == [
        "can't ask Kubernetes whether it disrupts this pod: no answer within 0.3 s",
    ]


@pytest.mark.parametrize("missing", [pod.POD_VARIABLE, pod.HOST_VARIABLE, "namespace"])
def test_who_is_in_no_pod_or_has_no_token_asks_nobody(
    server: PodServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    if missing == "namespace":
        (tmp_path / "rights" / missing).unlink()
    else:
        monkeypatch.delenv(missing)
    assert ask_pod() == ""
    assert (server.asked, warnings_of(caplog)) == ([], [])


# ---- the endings of attempts


def test_a_disruption_is_why_a_signal_came_or_ranks_or_the_store_failed(server: PodServer) -> None:
    server.conditions = [EVICTED]
    ending = find_ending(SystemExit(143))
    assert (ending.reason, ending.message) == ("preempted", f"Kubernetes disrupts the pod: {REASON}")
    for error in (RankDied("rank 0 died"), StoreError("no network")):
        ending = find_ending(error)
        assert ending.reason == "preempted"
        assert ending.message.startswith(f"Kubernetes disrupts the pod: {REASON}; ")
        assert str(error) in ending.message
    server.asked.clear()
    assert find_ending(None).reason == "completed"
    assert find_ending(RecipeError("no recipe")).reason == "settings"
    assert find_ending(Notice("the cloud takes it", 30)).message == "the cloud takes it"
    assert server.asked == [], "these endings say themselves why"


def test_a_signal_without_a_disruption_stays_a_signal(server: PodServer) -> None:
    ending = find_ending(SystemExit(143))
    assert (ending.reason, ending.message) == ("preempted", "told to end by a signal")
    assert find_ending(RankDied("rank 0 died")).reason == "rank_crashed"


def test_an_attempt_asks_once_its_last_step_is_committed(
    server: PodServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.conditions = [EVICTED]
    journal = Journal(open_store(str(tmp_path)), "run")
    seen: list[Commit | None] = []
    describe = server.describe
    monkeypatch.setattr(server, "describe", lambda: (seen.append(journal.newest()), describe())[1])

    class Tell(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            if commit.number == 2:
                raise SystemExit(143)

    config = RunConfig(
        recipe="any:recipe", run="run", store=str(tmp_path), epochs=4, chunk=ChunkLength(steps=2),
        log=Log(folder=str(tmp_path / "logs"), report_every_s=0),
    )  # fmt: skip
    with array_ranks(), pytest.raises(SystemExit):
        live(config, [Tell()])
    newest = journal.newest()
    assert newest is not None
    assert newest.number >= 2
    assert seen == [newest], "the request came after the last commit"
    ending = journal.read_ending(1)
    assert ending is not None
    assert (ending.reason, ending.message) == ("preempted", f"Kubernetes disrupts the pod: {REASON}")
    assert ending.step == newest.step
