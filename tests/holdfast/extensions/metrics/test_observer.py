"""The metrics and spans of an attempt: scraped over HTTP, received by OpenTelemetry's protocol, and in nobody's way."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import AttemptView, CheckpointVerdict, Observer, live
from holdfast.config import RunConfig, load_config
from holdfast.config.metrics import MetricsTarget
from holdfast.errors import ConfigError, HoldfastError
from holdfast.extensions.metrics.observer import Measuring
from holdfast.extensions.metrics.readings import Readings
from holdfast.extensions.metrics.spans import DeadAttempt, SpanRecord
from holdfast.extensions.metrics.table import METRICS
from holdfast.journal import Commit, Journal, seconds_of
from holdfast.ledger.goodput import BUCKETS
from holdfast.rank.messages import Progress, Ready
from holdfast.store import open_store
from holdfast.testing.arrays import array_ranks
from holdfast.testing.faults import fault
from tasks.server import free_port
from tests.conftest import ROOT, Engine, Reference, assert_same_bytes
from tests.support.scraped import Received, Series, otlp_receiver, read_attributes, scrape, scraped, value
from tests.support.waiting import WITHIN_S, await_equal

PROMETHEUS = pytest.mark.extras("prometheus_client")
OTLP = pytest.mark.extras("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def make_config(folder: Path, metrics: str = "", *settings: str) -> RunConfig:
    places = [f"store={folder}/runs", f"log.folder={folder}/logs", "log.every=1"]
    places += [f"log.metrics={metrics!r}"] if metrics else []
    return load_config(ROOT / "examples/chat/chat.toml", [*places, "epochs=3", "chunk.steps=5", *settings])


class Told(Observer):
    """Notes the verdicts and failures that an attempt tells its observers of, and when it ended."""

    def __init__(self) -> None:
        self.verdicts: list[CheckpointVerdict] = []
        self.failures: list[str] = []
        self.ended_at = 0.0

    def judged(self, attempt: AttemptView, verdict: CheckpointVerdict) -> None:
        self.verdicts.append(verdict)

    def failed(self, attempt: AttemptView, error: HoldfastError) -> None:
        self.failures.append(error.reason)

    def ended(self, attempt: AttemptView) -> None:
        self.ended_at = time.monotonic()


class Waiting(Observer):
    """Keeps the attempt from going on at its commits until a condition holds."""

    def __init__(self, condition: threading.Event) -> None:
        self.condition = condition

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        assert self.condition.wait(WITHIN_S)


def test_observers_are_told_of_failures_and_of_the_gate(tmp_path: Path) -> None:
    told = Told()
    with array_ranks(kill_at=[7, 21]):
        assert live(make_config(tmp_path), [told]).complete
    assert told.failures == ["rank_crashed"] * 2
    assert [(each.judge, each.result, each.commit) for each in told.verdicts] == [
        ("gate", "passed", 1),
        ("gate", "passed", 4),
    ]
    assert all(each.took_s > 0 for each in told.verdicts)


@PROMETHEUS
def test_a_scrape_has_the_numbers_of_a_run_and_the_last_one_shows_that_it_is_complete(tmp_path: Path) -> None:
    port = free_port()
    with scraped(port) as found, array_ranks(kill_at=[7, 21]):
        assert live(make_config(tmp_path, f"prometheus:{port}")).complete
    last = found[-1]
    expected = {
        "holdfast_attempt": 1,
        "holdfast_run_complete": 1,
        "holdfast_run_steps": 30,
        "holdfast_step": 30,
    }
    assert {name: value(last, name) for name in expected} == expected
    assert value(last, "holdfast_commits_total", reason="chunk") == 6
    assert value(last, "holdfast_rank_restarts_total", reason="rank_crashed") == 2
    assert value(last, "holdfast_verdicts_total", judge="gate", result="passed") == 2
    assert value(last, "holdfast_verdicts_total", judge="gate", result="refused") == 0
    assert value(last, "holdfast_restarts_total", reason="vanished") == 0
    assert (value(last, "holdfast_throughput_per_second", unit="samples") or 0) > 0
    assert value(last, "holdfast_goodput_ratio") is not None  # of steps that take no time it may be 0
    assert {dict(labels)["bucket"] for name, labels in last if name == "holdfast_spent_seconds"} == set(BUCKETS)
    assert 0 <= (value(last, "holdfast_commit_age_seconds") or 0) < WITHIN_S
    assert {name for name, _ in last} <= {metric.exposed for metric in METRICS.values()}


@PROMETHEUS
def test_a_port_that_is_taken_is_one_line_and_is_taken_over_when_it_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.extensions.metrics import prometheus

    monkeypatch.setattr(prometheus, "RETRY_S", 0.0)
    served = threading.Event()
    with socket.socket() as taken, array_ranks():
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def free() -> None:
            await_equal(lambda: any("is taken" in line or "in use" in line for line in caplog.messages), True)
            time.sleep(2)  # several tries
            taken.close()
            await_equal(lambda: is_served(port), True)
            served.set()

        threading.Thread(target=free, daemon=True).start()
        assert live(make_config(tmp_path, f"prometheus:{port}"), [Waiting(served)]).complete
    warnings = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert warnings == [
        f"metrics can't be served on port {port} of 127.0.0.1: Address already in use; the run continues, and tries "
        f"again (log.metrics = prometheus:{port}-{port + 7} takes the first free port of eight)"
    ]


def is_served(port: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(scrape(port))
    return False


@PROMETHEUS
def test_of_several_ports_the_first_free_one_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        while True:
            first = free_port()
            with contextlib.suppress(OSError, OverflowError):
                taken.bind(("127.0.0.1", first))
                taken.listen()
                break
        with scraped(first + 1) as found, array_ranks():
            assert live(make_config(tmp_path, f"prometheus:{first}-{first + 1}")).complete
    assert found


@PROMETHEUS
@pytest.mark.slow
def test_a_run_that_was_killed_twice_counts_its_restarts_on_the_same_port(engine: Engine, reference: Reference) -> None:
    """Each attempt is a process of its own; what it knows of the others, it has from the journal."""
    port = free_port()
    metrics, seen = f"log.metrics='prometheus:{port}'", dict[int, Series]()
    for number in (1, 2, 3):
        with scraped(port) as found:
            faulty = fault("commit-recorded", 2, "self", engine.folder / f"struck{number}") if number < 3 else {}
            # Slow steps, because on a busy machine a scrape takes a second, and a killed attempt is short.
            done = engine.run(metrics, TOY_DELAY_S="0.8" if number < 3 else "0.2", **faulty)
        assert "can't be served" not in done.stderr + done.stdout
        own = [each for each in found if value(each, "holdfast_restarts_total", reason="vanished") is not None]
        assert own, f"attempt {number} was not scraped"
        assert {value(each, "holdfast_attempt") for each in own} == {number}
        seen[number] = own[-1]
    lost = {number: value(series, "holdfast_restarts_total", reason="vanished") for number, series in seen.items()}
    assert lost == {1: 0, 2: 1, 3: 2}
    died = [each for (name, _), each in seen[3].items() if name == "holdfast_host_failures_total"]
    assert died == [2]
    assert value(seen[3], "holdfast_run_complete") == 1
    own_commits = sum(each for (name, _), each in seen[3].items() if name == "holdfast_commits_total")
    assert own_commits == engine.journal().newest_number() - sum(
        engine.journal().read_commit(number).attempt < 3 for number in engine.journal().numbers("commits")
    )
    assert 0 < (value(seen[3], "holdfast_goodput_ratio") or 0) <= 1
    assert_same_bytes(engine, reference)


READY = {
    "settings": {}, "defaults": {}, "data": {}, "steps_per_epoch": 10, "samples_per_step": 8, "sample_size": 100,
    "unit": "tokens", "model_params": 1, "device": "cpu", "environment": {},
}  # fmt: skip


@pytest.mark.parametrize(("flops", "peak", "mfu"), [(5e6, 1e9, 0.02), (None, 1e9, None), (5e6, None, None)])
def test_mfu_is_the_share_of_the_peak_of_all_ranks(
    tmp_path: Path, flops: float | None, peak: float | None, mfu: float | None
) -> None:
    """One step of 8 samples a second on two ranks: 8 times 5e6 FLOP/s, of twice 1e9."""
    config = make_config(tmp_path, "prometheus:1", "compute.ranks=2", *([f"log.peak_flops={peak}"] if peak else []))
    built = Ready.model_validate(READY | {"flops_per_sample": flops})
    journal = Journal(open_store(config.store), config.run)
    view = AttemptView(config, journal, 1, None, 1, 10, built, lambda number: None)
    measuring = Measuring(config, MetricsTarget("prometheus"))
    measuring._thread = threading.Thread(target=lambda: None)
    measuring.progressed(view, Progress(step=1, loss=None, steps_per_s=1.0))
    read = measuring._readings.read
    assert [number for _, number in read(METRICS["holdfast.mfu"])] == ([] if mfu is None else [pytest.approx(mfu)])
    assert read(METRICS["holdfast.throughput"]) == [({"run": config.run, "unit": "tokens"}, pytest.approx(800))]


# ---- OpenTelemetry


@pytest.fixture
def received() -> Iterator[Received]:
    with otlp_receiver() as receiver:
        yield receiver


def newest(received: Received, name: str) -> dict[frozenset[str], float]:
    """Return the newest value of each series of a metric, by the values of its labels."""
    return {frozenset(str(each) for each in labels.values()): number for labels, number in received.points[name]}


@OTLP
def test_a_receiver_gets_the_metrics_of_a_run(tmp_path: Path, received: Received) -> None:
    with array_ranks(kill_at=[7]):
        assert live(make_config(tmp_path, f"otlp:{received.url}")).complete
    assert newest(received, "holdfast.commits")[frozenset({"chat", "chunk"})] == 6
    assert newest(received, "holdfast.run.complete") == {frozenset({"chat"}): 1}
    assert newest(received, "holdfast.rank.restarts") == {
        frozenset({"chat", "rank_crashed"}): 1,
        frozenset({"chat", "rank_hung"}): 0,
    }
    assert received.points.keys() <= METRICS.keys()
    assert all(each["service.name"] == "holdfast" for each in received.resources)
    assert all(each["service.instance.id"] == "chat" for each in received.resources)


@OTLP
@pytest.mark.slow
def test_spans_are_within_each_other_as_the_work_is(engine: Engine, forked_ranks: None, received: Received) -> None:
    for epochs in (1, 2):
        config = load_config(engine.config, [f"epochs={epochs}", "chunk.steps=4", f"log.metrics='otlp:{received.url}'"])
        assert live(config).complete
    by_id = {span.span_id: span for span in received.spans}
    facts = {span.span_id: read_attributes(span.attributes) for span in received.spans}
    parents = {(span.name, by_id[span.parent_span_id].name if span.parent_span_id else "") for span in received.spans}
    assert parents == {("attempt", ""), ("chunk", "attempt"), ("save", "chunk"), ("restore", "attempt")}
    attempts = {facts[span.span_id]["holdfast.attempt"]: span for span in received.spans if span.name == "attempt"}
    assert attempts.keys() == {1, 2}
    assert {facts[span.span_id]["holdfast.reason"] for span in attempts.values()} == {"completed"}
    chunks = {facts[span.span_id]["holdfast.commit"]: span for span in received.spans if span.name == "chunk"}
    journal = engine.journal()
    for number in journal.numbers("commits"):
        commit, span = journal.read_commit(number), chunks[number]
        assert span.parent_span_id == attempts[commit.attempt].span_id
        assert span.trace_id == attempts[commit.attempt].trace_id
        [save] = [each for each in received.spans if each.parent_span_id == span.span_id]
        assert (save.end_time_unix_nano - save.start_time_unix_nano) / 1e9 == pytest.approx(commit.save_s, abs=1e-3)
        assert span.start_time_unix_nano <= save.start_time_unix_nano
        assert save.end_time_unix_nano <= span.end_time_unix_nano
        assert attempts[commit.attempt].start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= attempts[commit.attempt].end_time_unix_nano
    [restore] = [span for span in received.spans if span.name == "restore"]
    assert restore.parent_span_id == attempts[2].span_id


@OTLP
@pytest.mark.slow
def test_the_next_attempt_sends_the_span_of_one_that_was_killed(engine: Engine, received: Received) -> None:
    """The killed attempts are processes of their own, and die by SIGKILL after a commit."""
    metrics = f"log.metrics='otlp:{received.url}'"
    for number in (1, 2, 3):
        faulty = fault("commit-recorded", 2, "self", engine.folder / f"struck{number}") if number < 3 else {}
        engine.run(metrics, **faulty)
    journal = engine.journal()
    spans = [span for span in received.spans if span.name == "attempt"]
    facts = {span.span_id: read_attributes(span.attributes) for span in spans}
    assert {facts[span.span_id]["holdfast.attempt"] for span in spans} == {1, 2, 3}
    assert len(facts) == 3, "the first one's span has the same ids whoever sends it"
    for span in spans:
        fact = facts[span.span_id]
        number = fact["holdfast.attempt"]
        record, ending = journal.read_attempt(number), journal.read_ending(number)
        assert ending is not None
        assert fact["holdfast.reason"] == ending.reason == ("completed" if number == 3 else "vanished")
        assert (span.status.code == 2) == (number < 3)  # ERROR
        if number == 3:
            continue
        assert span.status.message.startswith("vanished")
        began, ended = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
        assert abs(began - seconds_of(record.created_at)) < 5
        commits = [journal.read_commit(each) for each in journal.numbers("commits")]
        own = [each for each in commits if each.attempt == number]
        assert ended >= max(seconds_of(each.created_at) for each in own)
        assert ended <= seconds_of(journal.read_attempt(number + 1).began_at)  # created_at has whole seconds
        assert fact["holdfast.step"] >= max(each.step for each in own)


@OTLP
def test_the_span_of_a_killed_attempt_is_the_parent_of_the_chunks_that_it_had_sent(received: Received) -> None:
    from holdfast.extensions.metrics.otlp import OtlpExporter

    killed = OtlpExporter(received.url, Readings({"run": "a"}), 1, 1000.0, "a-token")
    killed.add(SpanRecord("chunk", 1001.0, 1002.0))
    killed._tracers.force_flush()
    later = OtlpExporter(received.url, Readings({"run": "a"}), 2, 2000.0, "another-token")
    later.add_dead(DeadAttempt(1, "a-token", 1000.0, 1003.5, "vanished", {"holdfast.reason": "vanished"}))
    later.add(SpanRecord("chunk", 2001.0, 2002.0))
    later.close(2003.0, {}, is_complete=True)
    attempts = {
        read_attributes(span.attributes)["holdfast.attempt"]: span for span in received.spans if span.name == "attempt"
    }
    chunks = [span for span in received.spans if span.name == "chunk"]
    assert [(each.trace_id, each.parent_span_id) for each in chunks] == [
        (attempts[number].trace_id, attempts[number].span_id) for number in (1, 2)
    ]
    dead = attempts[1]
    assert (dead.start_time_unix_nano, dead.end_time_unix_nano) == (1000 * 10**9, 10**9 * 2007 // 2)
    assert (dead.status.code, dead.status.message) == (2, "vanished")
    assert not any(attempt.parent_span_id for attempt in attempts.values())
    assert attempts[2].status.code == 0
    killed._tracers.shutdown()
    killed._meters.shutdown()


@OTLP
def test_a_receiver_that_never_answers_delays_neither_a_step_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.extensions.metrics import otlp

    monkeypatch.setattr(otlp, "COMPLETE_WITHIN_S", 0.5)
    monkeypatch.setattr(otlp, "WITHIN_S", 2 * WITHIN_S)  # whoever waits for a request waits longer than the test
    told, answers = Told(), threading.Event()
    with otlp_receiver(hangs=answers) as received, array_ranks(kill_at=[7]):
        assert live(make_config(tmp_path, f"otlp:{received.url}"), [told]).complete
        waited_s = time.monotonic() - told.ended_at
        assert not answers.is_set()
    assert waited_s < WITHIN_S
    assert (
        f"metrics and spans can't be sent to {received.url}: no answer within 0.5 s; "
        "the run continues without sending them" in (caplog.messages)
    )


@OTLP
@pytest.mark.parametrize("status", [0, 404, 503])
def test_a_receiver_that_refuses_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    from holdfast.extensions.metrics import otlp

    monkeypatch.setattr(otlp, "WITHIN_S", 5.0)
    monkeypatch.setattr(otlp, "COMPLETE_WITHIN_S", WITHIN_S)
    monkeypatch.setattr(otlp, "EVERY_S", 0.1)
    register = otlp.MeterProvider

    def register_late(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.3)  # the reader's thread runs before its provider has it, as on a busy machine
        return register(*arguments, **options)

    monkeypatch.setattr(otlp, "MeterProvider", register_late)
    with otlp_receiver(status or 200) as received, array_ranks():
        url = received.url if status else f"http://127.0.0.1:{free_port()}"
        assert live(make_config(tmp_path, f"otlp:{url}")).complete
    [warning] = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    reason = {0: "Connection refused", 404: "code: 404, reason: Not Found", 503: "Service Unavailable"}[status]
    assert warning.startswith(f"metrics and spans can't be sent to {url}: ")
    assert reason in warning
    assert warning.endswith("; the run continues without sending them")


# ---- bad input


@pytest.mark.parametrize(
    ("kind", "library"), [("prometheus", "prometheus_client"), ("otlp", "opentelemetry-exporter-otlp-proto-http")]
)
def test_a_library_that_is_missing_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, library: str
) -> None:
    from importlib import util

    monkeypatch.setattr(util, "find_spec", lambda name: None)
    place = {"prometheus": "9464", "otlp": "http://127.0.0.1:4318"}[kind]
    with array_ranks(), pytest.raises(ConfigError, match=f"^log.metrics: {library} is not installed") as caught:
        live(make_config(tmp_path, f"{kind}:{place}"))
    assert caught.value.hint == f"pip install 'holdfast-train[{kind}]'"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ("9464", "expected prometheus:PORT"),
        ("prometheus", "an address and several ports are"),
        ("prometheus:", "an address and several ports are"),
        ("prometheus:0", "expected ports from 1 to 65535"),
        ("prometheus:65536", "expected ports from 1 to 65535"),
        ("prometheus:9465-9464", "the lower one first"),
        ("prometheus:::1:9464", "an address and several ports are"),
        ("otlp:127.0.0.1:4318", "the URL begins with http"),
        ("otlp:grpc://127.0.0.1:4317", "the URL begins with http"),
        ("otlp:http://", "the URL begins with http"),
        ("otlp:http://127.0.0.1:port", "the URL begins with http"),
        ("otlp:http://me:secret@127.0.0.1:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("otlp:http://127.0.0.1:4318?key=secret", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("statsd:8125", "expected prometheus:PORT"),
    ],
)
def test_a_wrong_target_is_refused_in_one_line(tmp_path: Path, metrics: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(tmp_path, metrics)
    assert "log.metrics = " in str(caught.value)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    if "secret" in metrics:
        assert "secret" not in str(caught.value)
