"""The cost of a kill in a file and in a pod's annotations: the journal's numbers, and nothing that waits."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import AttemptView, Observer, live, published
from holdfast.attempt.published import (
    KillCostAnnotations,
    KillCostFile,
    count_gpus,
    spell_annotations,
)
from holdfast.config import ChunkLength, Compute, Log, RunConfig
from holdfast.journal import Commit, Journal, seconds_of
from holdfast.ledger.forecast import reserve_s
from holdfast.ledger.history import read_costs
from holdfast.ledger.interval import RECENT_COMMITS, measure_costs
from holdfast.ledger.kill_cost import KillCost
from holdfast.machine import pod
from holdfast.machine.pod import PodApi
from holdfast.rank.messages import Progress
from holdfast.store import open_store
from holdfast.testing.arrays import array_ranks
from tests.support.waiting import await_equal

NAMED = ("holdfast.attempt.published:KillCostFile",)


def make_config(folder: Path, observers: tuple[str, ...] = NAMED, **fields: Any) -> RunConfig:
    log = Log(folder=str(folder / "logs"), every=1, observers=observers, report_every_s=0)
    return RunConfig(
        recipe="any:recipe", run="run", store=str(folder), epochs=4, chunk=ChunkLength(steps=2), log=log, **fields
    )


@pytest.fixture(autouse=True)
def _published_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KillCostFile, "every_s", 0.0)


class Reader(Observer):
    """Reads the file after the observer that is named before it has written it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seen: list[tuple[str, int, KillCost]] = []

    def _read(self, what: str, step: int) -> None:
        self.seen.append((what, step, KillCost.model_validate_json(self._path.read_text("utf-8"))))

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        self._read("progressed", progress.step)

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        self._read("committed", commit.step)
        journal = attempt.journal
        found, (measured, newest) = self.seen[-1][2], (measure_costs(read_costs(journal)), journal.newest())
        assert measured is not None
        assert newest is not None
        assert (found.commit, found.commit_step, found.committed_at) == (newest.number, newest.step, newest.created_at)
        assert found.save_within_s == pytest.approx(reserve_s(measured), abs=1e-3)
        assert found.restart_s == pytest.approx(measured.restart_s, abs=1e-3)
        assert found.lost_s == pytest.approx((found.step - newest.step) * measured.step_s, abs=1e-3)


def read_commits(store: Path) -> dict[int, Commit]:
    journal = Journal(open_store(str(store)), "run")
    return {number: journal.read_commit(number) for number in journal.numbers("commits")}


def read_pairs(config: RunConfig) -> list[tuple[str, int, KillCost]]:
    """Train a run, and return what a reader of the file has seen at each step and commit."""
    reader = Reader(Path(config.log.folder) / "run" / published.FILE)
    with array_ranks():
        outcome = live(
            config.model_copy(update={"log": config.log.model_copy(update={"observers": ()})}), [KillCostFile(), reader]
        )
    assert outcome.complete
    return reader.seen


def test_the_file_has_the_numbers_of_the_journal_at_each_commit(tmp_path: Path) -> None:
    seen = read_pairs(make_config(tmp_path, ()))
    commits = read_commits(tmp_path)
    assert len(commits) > RECENT_COMMITS, "old costs don't count any more"
    assert [cost.commit for what, _, cost in seen if what == "committed"] == [*commits]
    for what, step, cost in seen:
        known = commits.get(cost.commit)
        assert cost.commit_step == (known.step if known else 0)
        assert cost.committed_at == (known.created_at if known else None)
        if known:
            assert cost.since_commit_s == pytest.approx(seconds_of(cost.as_of) - seconds_of(known.created_at), abs=0.01)
        assert cost.step >= step if what == "committed" else cost.step == step
        assert (cost.gpus, cost.lost_gpu_s) == (0, 0.0)


def test_an_observer_has_the_newest_costs_of_the_journal(tmp_path: Path) -> None:
    observer = KillCostFile()
    with array_ranks():
        assert live(make_config(tmp_path, ()), [observer]).complete
    assert observer._costs == read_costs(Journal(open_store(str(tmp_path)), "run"))


def test_the_next_safe_moment_is_that_of_the_next_commit(tmp_path: Path) -> None:
    """The steps of the chunk at the measured speed, and the save; the ranks may be ahead of it."""
    seen = read_pairs(make_config(tmp_path, ()))
    commits = read_commits(tmp_path)
    last = max(commits)
    for _, _, cost in seen:
        if cost.commit in (0, last):
            continue
        assert cost.safe_at is not None
        left_s = seconds_of(cost.safe_at) - seconds_of(cost.as_of)
        assert 0.0 <= left_s <= 2 * 1.0 + (cost.save_within_s or 0.0)
    assert seen[-1][2].safe_at is None, "the run is complete"


def test_a_run_that_names_the_observer_leaves_no_file(tmp_path: Path) -> None:
    """A number of an attempt that has ended would mislead."""
    config = make_config(tmp_path)
    seen: list[bool] = []

    class Look(Observer):
        def ended(self, attempt: AttemptView) -> None:
            seen.append((tmp_path / "logs" / "run" / published.FILE).exists())

    with array_ranks():
        assert live(config, [Look()]).complete
    assert seen == [True]
    assert [*(tmp_path / "logs" / "run").glob("*kill-cost*")] == []


def test_between_commits_the_file_is_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KillCostFile, "every_s", 3600.0)
    seen = read_pairs(make_config(tmp_path, ()))
    assert all(cost.step == cost.commit_step or what == "committed" for what, _, cost in seen)


@pytest.mark.parametrize(
    ("device", "compute", "gpus"),
    [
        ("cpu", {}, 0),
        ("cuda:0", {"ranks": 8}, 8),
        ("cuda:0", {"ranks": 8, "nodes": 2, "rendezvous": "a:1"}, 16),
        ("cuda:0", {"ranks": 4, "nodes": "1:3", "rendezvous": "a:1", "virtual_ranks": 12}, 12),
    ],
)
def test_gpus_are_those_of_all_nodes(device: str, compute: dict[str, Any], gpus: int, tmp_path: Path) -> None:
    views: list[AttemptView] = []

    class Look(Observer):
        def opened(self, attempt: AttemptView) -> None:
            views.append(attempt)

    with array_ranks():
        live(make_config(tmp_path, ()), [Look()])
    (view,) = views
    assert view.built is not None
    config = view.config.model_copy(update={"compute": Compute(**compute)})
    built = view.built.model_copy(update={"device": device})
    assert count_gpus(AttemptView(**vars(view) | {"config": config, "built": built})) == gpus


# ---- annotations


class Pods:
    """The part of a cluster's API that annotates one pod.

    Attributes:
        status: the answer.
        is_slow: whether it answers only when it is closed.
    """

    def __init__(self) -> None:
        self.status, self.is_slow = 200, False
        self.patches: list[tuple[str, dict[str, str], Any]] = []
        self._closed = threading.Event()
        pods = self

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pods.patches.append((self.path, dict(self.headers), body))
                if pods.is_slow:
                    pods._closed.wait(60)
                    return
                self.send_response(pods.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def annotations(self) -> dict[str, str]:
        """Return the pod's annotations after all patches."""
        known: dict[str, Any] = {}
        for _, _, body in self.patches:
            known |= body["metadata"]["annotations"]
        return {name: value for name, value in known.items() if value is not None}


@pytest.fixture
def pods() -> Iterator[Pods]:
    pods = Pods()
    yield pods
    pods.close()


def find_api(pods: Pods, folder: Path) -> PodApi:
    (folder / "rights").mkdir()
    (folder / "rights" / "namespace").write_text("team\n")
    (folder / "rights" / "token").write_text("a-token\n")
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(pods.port), "POD_NAME": "train-0"}
    api = PodApi.find(environ, folder / "rights", scheme="http")
    assert isinstance(api, PodApi)
    return api


class Noting(KillCostAnnotations):
    """Notes what it publishes."""

    every_s = 0.0

    def __init__(self, api: PodApi | str) -> None:
        super().__init__(api)
        self.costs: list[KillCost] = []

    def publish(self, attempt: AttemptView, cost: KillCost) -> None:
        self.costs.append(cost)
        super().publish(attempt, cost)


class Await(Observer):
    """Waits at the second commit until the pod has annotations."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        if commit.number == 2:
            await_equal(lambda: self._pods.annotations().get("kill-cost.holdfast/commit"), "2")


def test_a_pod_has_the_numbers_as_annotations(pods: Pods, tmp_path: Path) -> None:
    observer = Noting(find_api(pods, tmp_path))
    with array_ranks():
        assert live(make_config(tmp_path, ()), [observer, Await(pods)]).complete
    path, headers, _ = pods.patches[0]
    assert path == "/api/v1/namespaces/team/pods/train-0"
    assert headers["Authorization"] == "Bearer a-token"
    assert headers["Content-Type"] == "application/merge-patch+json"
    sent = [body["metadata"]["annotations"] for _, _, body in pods.patches]
    known = [spell_annotations(each) for each in observer.costs]
    assert all(each in known for each in sent)
    (second,) = [each for each in sent if each["kill-cost.holdfast/commit"] == "2"][:1]
    commit = Journal(open_store(str(tmp_path)), "run").read_commit(2)
    assert second["kill-cost.holdfast/committed-at"] == commit.created_at
    assert second["kill-cost.holdfast/commit-step"] == str(commit.step)
    assert set(second) == {f"kill-cost.holdfast/{name.replace('_', '-')}" for name in KillCost.model_fields}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "annotations" in each.getMessage()]


def test_a_refusal_is_one_warning_and_no_second_request(
    pods: Pods, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pods.status = 403
    observer = Noting(find_api(pods, tmp_path))

    class Look(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            await_equal(lambda: len(warnings_of(caplog)), 1)

    with array_ranks():
        assert live(make_config(tmp_path, ()), [observer, Look()]).complete
    assert warnings_of(caplog) == ["the pod's annotations can't be written: 403 Forbidden; the run continues"]
    assert len(pods.patches) == 1


def test_a_failure_is_one_warning_and_another_try(pods: Pods, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pods.status = 503
    observer = Noting(find_api(pods, tmp_path))

    class Look(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            await_equal(lambda: len(pods.patches) > commit.number, True)

    with array_ranks():
        assert live(make_config(tmp_path, ()), [observer, Look()]).complete
    assert warnings_of(caplog) == ["the pod's annotations can't be written: 503 Service Unavailable; the run continues"]


class AwaitFirst(Observer):
    """Waits at the first commit until the pod has been asked."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        await_equal(lambda: len(self._pods.patches), 1)


def test_an_api_that_does_not_answer_delays_nothing(
    pods: Pods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "ANSWER_WITHIN_S", 600.0)
    pods.is_slow = True
    observer = Noting(find_api(pods, tmp_path))
    with array_ranks():
        assert live(make_config(tmp_path, ()), [observer, AwaitFirst(pods)]).complete
    assert len(pods.patches) == 1, "the first request is still waiting"
    assert observer._thread.is_alive()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "KUBERNETES_SERVICE_HOST is not set"),
        ({"KUBERNETES_SERVICE_HOST": "a", "KUBERNETES_SERVICE_PORT": "1"}, "POD_NAME is not set"),
        (
            {"KUBERNETES_SERVICE_HOST": "a", "KUBERNETES_SERVICE_PORT": "1", "POD_NAME": "p"},
            "none/namespace: No such file or directory",
        ),
    ],
)
def test_outside_of_a_pod_there_is_one_warning(
    environ: dict[str, str], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = PodApi.find(environ, tmp_path / "none")
    assert isinstance(found, str)
    assert found.endswith(message)
    observer = KillCostAnnotations(found)

    class Look(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            await_equal(lambda: len(warnings_of(caplog)), 1)

    with array_ranks():
        assert live(make_config(tmp_path, ()), [observer, Look()]).complete
    assert len(warnings_of(caplog)) == 1


def test_an_address_of_ipv6_is_in_brackets(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("team")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443", "POD_NAME": "a/b"}
    api = PodApi.find(environ, tmp_path)
    assert isinstance(api, PodApi)
    assert api.url == "https://[fd00::1]:443/api/v1/namespaces/team/pods/a%2Fb"
