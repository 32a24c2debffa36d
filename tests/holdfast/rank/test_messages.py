"""Every order and every event crosses the wire unchanged; any other line is refused with a clear message."""

import json
import math
import subprocess
import sys
from typing import get_args

import pytest

from holdfast.checkpoint import Saved
from holdfast.checkpoint.found import Found
from holdfast.checkpoint.observed import Activation, SampleLoss, Update
from holdfast.errors import CheckpointDamaged, GateTripped, RankDied, RunStopped
from holdfast.journal import Origin
from holdfast.rank.messages import (
    Begin,
    Begun,
    Call,
    Called,
    Damaged,
    End,
    Evaluate,
    Evaluated,
    Event,
    Examine,
    Examined,
    Failed,
    Finished,
    Keep,
    Observe,
    Observed,
    Order,
    Proceed,
    Progress,
    Ready,
    Rehearse,
    Rehearsed,
    Restore,
    Restored,
    Save,
    SavedAside,
    Shadowed,
    Skipped,
    Stop,
    Train,
    Tripped,
    Woken,
    decode_event,
    decode_order,
    encode_message,
)  # fmt: skip
from holdfast.recipe.probe import Gate, Probe
from holdfast.store import open_store
from tests.support.makers import commit_of, make_line, save_next

ORIGIN = Origin(form="torch", source="/a b.pt", sha256="0" * 64, step=7, lacks=["scheduler"])
LONG = 'ä\n\x00"\\' * 100_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_next(make_line(open_store(str(tmp_path_factory.mktemp("store")))))


@pytest.fixture(scope="module")
def orders(saved: Saved) -> list[Order]:
    commit = commit_of(saved)
    return [
        Restore(commit=commit, gate=Gate("tolerance", 1e-3)), Begin(store="s3://else", run="other", commit=commit),
        Train(stop=40, fingerprint="f" * 64), Train(stop=sys.maxsize, fingerprint="", into="/a b", is_detailed=True),
        Call(function="module:function", arguments={"source": "/a b.pt", "step": None}),
        Keep(fingerprint="f" * 64, origin=ORIGIN),
        Proceed(), Rehearse(stop=44, fingerprint="f" * 64, is_kept=False),
        Observe(step=7, most=5),
        Save(), Stop(), Stop(within_s=0.25), Evaluate(), Examine(), End(),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def events(saved: Saved) -> list[Event]:
    found = Found(name="a.b", kind="C", reached_by="loss", place="m.py:3: ", remedy="x", sha256="", is_plain=True)
    return [
        Ready(
            settings={"lr": 0.1, "nested": {"a": [1, None, True]}}, defaults={"lr": math.inf}, data={"sha256": LONG},
            steps_per_epoch=10, samples_per_step=8, sample_size=1, unit="samples", model_params=9, device="cpu",
            environment={"sources": {"m": "0" * 64}},
        ),
        Restored(step=4, summary="lr 0.1", taken_over=["lr"], note=LONG), Skipped(done=1, total=2),
        Begun(anneal_offset=7), Called(values={"taken": ["model"], "notes": [LONG]}),
        Progress(step=1, loss=-0.0, steps_per_s=1e300), saved,
        Rehearsed(lines=[{"step": 41, "loss": "nan", "state": {"model": "0" * 16}}]),
        Shadowed(lines=[{"step": 41, "loss": "nan"}], unregistered=[found]), SavedAside(saved=saved),
        Observed(
            lines=[{"step": 41, "loss": "nan"}], updates=[Update(step=41, name="w", size=math.inf)],
            samples=[SampleLoss(step=41, rank=1, index=7, content="0" * 16, loss=math.inf, grad_norm=None)],
            activations=[Activation(layer="first", rank=0, largest=math.inf, before=1.0)], notes=[LONG],
        ),
        Evaluated(
            metrics={"loss": math.inf}, measured=["seconds"], anneals={"beta": 5e-324},
            probe=Probe(sha256="0" * 64, values={"loss_window": None}, sample=[1.5, None]),
        ),
        Examined(unregistered=[found], events={"the end of anneal 'beta'": 100.0}, own_steps_per_epoch=5, looked_at=9),
        Damaged.of(CheckpointDamaged(LONG, hint="verify")), Tripped.of(GateTripped("differs", different=["model.w"])),
        Failed.of(RankDied("lost", is_effect=True)), Finished(), Woken(),
    ]  # fmt: skip


def test_every_order_crosses_unchanged(orders: list[Order]) -> None:
    assert {type(order) for order in orders} == {*get_args(Order)}
    for order in orders:
        assert encode_message(order).count("\n") == 1
        assert decode_order(encode_message(order)) == order


def test_every_event_crosses_unchanged(events: list[Event]) -> None:
    assert {type(event) for event in events} == {*get_args(Event)}
    for event in events:
        assert encode_message(event).count("\n") == 1
        assert decode_event(encode_message(event)) == event


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_crosses(loss: float) -> None:
    event = decode_event(encode_message(Progress(step=1, loss=loss, steps_per_s=0.0)))
    assert isinstance(event, Progress)
    assert repr(event.loss) == repr(loss)


def test_an_error_keeps_its_class_and_its_facts() -> None:
    event = decode_event(encode_message(Failed.of(RankDied("lost", hint="again", is_effect=True, step=3))))
    assert isinstance(event, Failed)
    error = event.error
    assert isinstance(error, RankDied)
    assert (error.message, error.hint, error.data) == ("lost", "again", {"is_effect": True, "step": 3})


def test_bytes_that_are_not_utf_8_in_an_error_are_escaped() -> None:
    """A file's name may have such bytes; no file or pipe could encode them as UTF-8."""
    event = decode_event(encode_message(Failed.of(RunStopped("no file a\udcff"))))
    assert isinstance(event, Failed)
    assert event.error.message == "no file a\\udcff"


def test_an_error_of_an_unknown_class_becomes_run_stopped() -> None:
    assert type(Failed(kind="SystemExit", message="x").error) is RunStopped


def test_fields_of_a_later_version_are_ignored(saved: Saved) -> None:
    assert decode_order('["Save", {"into": "/tmp"}]') == Save()
    name, fields = json.loads(encode_message(saved))
    assert decode_event(json.dumps([name, fields | {"later": 1}])) == saved


REFUSED = (
    "", "{}", "[]", "null", '["Train"]', '["Train", 1]', '["Train", {"stop": "x"}]', '["No", {}]', '["Ready", {}]',
    '["__class__", {}]', "[" * 100_000, "\udcff",
)  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_that_is_no_message_is_refused(line: str) -> None:
    for decode in (decode_order, decode_event):
        with pytest.raises(RunStopped, match="don't understand each other") as caught:
            decode(line)
        assert len(str(caught.value)) < 300


def test_orders_and_events_are_told_apart(orders: list[Order]) -> None:
    for order in orders:
        with pytest.raises(RunStopped):
            decode_event(encode_message(order))


def test_a_frequent_message_is_small() -> None:
    assert len(encode_message(Progress(step=1_000_000, loss=0.123456789, steps_per_s=12.3456789))) < 100


def test_messages_import_no_torch() -> None:
    code = "import sys, holdfast.rank.messages, holdfast.rank.launching; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
