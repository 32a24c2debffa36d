"""Tests of preemption notices from clouds and drain files, and of the time that they leave."""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.machine import preemption
from holdfast.machine.preemption import MAX_WITHIN_S, Notice, find_cloud, find_sources, read_drain_file, watch
from tests.support.metadata_server import MetadataStub, be_in, metadata_server
from tests.support.waiting import WITHIN_S, await_equal


@pytest.fixture
def stub() -> Iterator[MetadataStub]:
    with metadata_server() as stub:
        yield stub


def ask(stub: MetadataStub, cloud: str) -> list[Notice]:
    """Return the notices that a cloud's sources give now."""
    with pytest.MonkeyPatch.context() as patch:
        be_in(stub, cloud, patch)
        patch.setattr(preemption, "ANSWER_WITHIN_S", WITHIN_S)  # a busy machine may take longer than the engine waits
        return [notice for source in find_sources(None) if (notice := source()) is not None]


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_quiet_cloud_gives_no_notice(stub: MetadataStub, cloud: str) -> None:
    assert ask(stub, cloud) == []
    assert stub.asked


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_missing_metadata_server_gives_no_notice(cloud: str) -> None:
    assert ask(MetadataStub("http://127.0.0.1:9"), cloud) == []


@pytest.mark.parametrize("answer", ["", "[]", "no JSON", "{}", "null"])
def test_a_malformed_answer_gives_no_notice(stub: MetadataStub, answer: str) -> None:
    for path in (
        "/latest/meta-data/spot/instance-action",
        "/latest/meta-data/events/recommendations/rebalance",
        "/computeMetadata/v1/instance/preempted",
        "/metadata/scheduledevents?api-version=2020-07-01",
    ):
        stub.paths[path] = answer
    assert [ask(stub, cloud) for cloud in ("aws", "gcp", "azure")] == [[], [], []]


@contextlib.contextmanager
def counted_down(within_s: float) -> Iterator[list[Notice]]:
    """Assert that the notices which the block lists leave these seconds, less those that the block took."""
    notices, began = list[Notice](), time.monotonic()
    yield notices
    least_s = within_s - (time.monotonic() - began) - 1  # a cloud's times have whole seconds
    assert [each for each in notices if max(least_s, 0) <= each.within_s <= within_s] == notices != []


def test_an_interruption_on_aws_is_a_notice(stub: MetadataStub) -> None:
    with counted_down(120) as notices:
        stub.interrupt_on_aws(within_s=120)
        notices += ask(stub, "aws")
    (notice,) = notices
    assert not notice.is_advice
    assert str(notice) == f"AWS will terminate this spot instance: {notice.within_s:.0f} s are left to save"


def test_a_rebalance_recommendation_on_aws_is_advice(stub: MetadataStub) -> None:
    stub.recommend_rebalance_on_aws()
    (notice,) = ask(stub, "aws")
    assert notice.is_advice
    assert str(notice) == "AWS reports a higher risk of a spot interruption: saving a checkpoint now"


def test_a_preemption_on_gcp_is_a_notice(stub: MetadataStub) -> None:
    stub.preempt_on_gcp()
    (notice,) = ask(stub, "gcp")
    assert notice.within_s == 30


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_a_scheduled_event_on_azure_is_a_notice(stub: MetadataStub, kind: str) -> None:
    with counted_down(30) as notices:
        stub.schedule_on_azure(kind, within_s=30)
        notices += ask(stub, "azure")
    (notice,) = notices
    assert kind in str(notice)


def test_harmless_events_and_those_of_other_machines_are_no_notice(stub: MetadataStub) -> None:
    stub.schedule_on_azure("Freeze", within_s=30)
    assert ask(stub, "azure") == []
    stub.schedule_on_azure("Preempt", within_s=30, machine="trainer_8")
    assert ask(stub, "azure") == []


@pytest.mark.parametrize("time_", ["", "yesterday", "2000-01-01T00:00:00Z"])
def test_a_past_or_unreadable_time_leaves_no_seconds(stub: MetadataStub, time_: str) -> None:
    action = {"action": "stop", "time": time_}
    stub.paths["/latest/meta-data/spot/instance-action"] = json.dumps(action)
    (notice,) = ask(stub, "aws")
    assert notice.within_s == 0


@pytest.mark.parametrize(
    ("said", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2"}, "aws"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11"}, ""),
        ({"product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation"}, ""),  # a laptop
        ({}, ""),
    ],
)
def test_the_firmware_names_the_cloud(tmp_path: Path, said: dict[str, str], cloud: str) -> None:
    for name, text in said.items():
        (tmp_path / name).write_text(text + "\n")
    assert find_cloud(tmp_path) == cloud


def test_outside_of_a_cloud_there_are_no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "find_cloud", str)  # the tests may run in a cloud
    assert find_sources(None) == []


@pytest.mark.parametrize(("text", "within_s"), [("", 0.0), ("90", 90.0), ("90.5\n", 90.5), ("soon", 0.0), ("-3", 0.0)])
def test_a_drain_file_holds_the_seconds_that_are_left(tmp_path: Path, text: str, within_s: float) -> None:
    path = tmp_path / "drain"
    assert read_drain_file(path) is None
    path.write_text(text)
    notice = read_drain_file(path)
    assert notice is not None
    assert notice.within_s == within_s


@pytest.mark.parametrize(
    ("data", "within_s"),
    [
        ("90".encode("utf-16"), 90.0),  # as PowerShell writes it
        (b"\xef\xbb\xbf90\r\n", 90.0),
        ("soon".encode("utf-16"), 0.0),
        (b"\xff\xfe\xff", 0.0),
        (b"\x80\x81", 0.0),
        (b"\0" * 5000, 0.0),
        (b"nan", 0.0),
        (b"1e308", MAX_WITHIN_S),
        (b"inf", MAX_WITHIN_S),
        (b"9" * 1023, MAX_WITHIN_S),
    ],
)
def test_a_drain_file_is_a_notice_whatever_it_holds(tmp_path: Path, data: bytes, within_s: float) -> None:
    path = tmp_path / "drain"
    path.write_bytes(data)
    notice = read_drain_file(path)
    assert notice
    assert notice.within_s == within_s
    assert 0 <= notice.left_s() <= threading.TIMEOUT_MAX


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/"])
def test_a_folder_or_a_device_is_refused_as_a_drain_file(path: str) -> None:
    with pytest.raises(ValueError, match="is not a file"):
        read_drain_file(Path(path))


def test_a_drain_file_below_a_file_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert read_drain_file(tmp_path / "file" / "drain") is None


def test_a_broken_source_is_reported_once_and_others_are_polled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    asked = iter([None] * 5 + [Notice("another says so", 9)])
    with watch([lambda: read_drain_file(tmp_path), lambda: next(asked)], told.put, every_s=0.01):
        assert told.get(timeout=WITHIN_S).reason == "another says so"
    assert [record.getMessage() for record in caplog.records if "is not a file" in record.getMessage()] != []
    assert len(caplog.records) == 1


def test_a_time_in_the_far_future_is_cut(stub: MetadataStub) -> None:
    stub.schedule_on_azure("Preempt", within_s=30)
    path = next(path for path in stub.paths if "scheduledevents" in path)
    events = json.loads(stub.paths[path])
    events["Events"][0]["NotBefore"] = "9999-12-31T23:59:59Z"
    stub.paths[path] = json.dumps(events)
    (notice,) = ask(stub, "azure")
    assert notice.left_s() <= MAX_WITHIN_S


def test_a_notice_counts_down() -> None:
    notice, soon = Notice("so it is", 600), Notice("so it is", 0.2)
    assert 0 < notice.left_s() <= 600
    time.sleep(0.25)
    assert 0 < notice.left_s() <= 600 - 0.25
    assert soon.left_s() == 0


def test_each_notice_is_reported_once_and_polling_ends_with_an_end(
    stub: MetadataStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: queue.SimpleQueue[Notice] = queue.SimpleQueue()
    drain = tmp_path / "drain"
    stub.recommend_rebalance_on_aws()
    be_in(stub, "aws", monkeypatch)
    with watch(find_sources(str(drain)), told.put, every_s=0.05):
        assert told.get(timeout=WITHIN_S).is_advice
        asked = len(stub.asked)
        await_equal(lambda: len(stub.asked) > asked + 8, True)  # two rounds: a token and an answer for each source
        assert told.empty()
        drain.write_text("7")
        assert told.get(timeout=WITHIN_S).within_s == 7
        asked = len(stub.asked)
        stub.interrupt_on_aws(60)
        time.sleep(0.3)
        assert len(stub.asked) == asked
    assert told.empty()
