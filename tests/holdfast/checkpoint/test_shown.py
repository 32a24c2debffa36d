"""Texts and pictures that are shown: kept beside the trail, the same after every death, and no part of the state."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import METRICS, SHOWN
from holdfast.checkpoint.shown import (
    MAX_BYTES,
    MAX_FILE_BYTES,
    PNG,
    SVG,
    TEXT,
    Gallery,
    Shown,
    list_shown,
    read_newest,
    read_shown,
    to_shown,
)
from holdfast.config import Determinism, Retention, RunConfig
from holdfast.errors import RecipeError, RecordDamaged
from holdfast.journal import Commit
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from tests.support.makers import STEPS_PER_EPOCH, assert_good, make_line, root, save_next, train
from tests.support.showing import PER_EPOCH, PICTURE, png
from tests.support.trainings import content_id, live, make, save_step, train_to

TOTAL = 3 * PER_EPOCH


# ---- one text or picture


@pytest.mark.parametrize(
    ("value", "media_type", "suffix"),
    [
        ("two\nlines, \u2028 and \u00fc", TEXT, "txt"),
        ("<svg>", TEXT, "txt"),
        (PICTURE, SVG, "svg"),
        (png(), PNG, "png"),
    ],
)
def test_it_is_read_back_as_it_was_shown(value: str | bytes, media_type: str, suffix: str) -> None:
    shown = to_shown("a_name", value, 12, 3)
    assert shown == Shown(12, 3, "a_name", media_type, value.encode() if isinstance(value, str) else value)
    assert shown.file_name == f"a_name-00000012.{suffix}"
    line = shown.to_line()
    assert line.splitlines() == [line.removesuffix(b"\n")]
    assert Shown.from_line(line, "a file") == shown


def test_text_that_utf8_cannot_hold_is_shown_all_the_same() -> None:
    assert to_shown("text", "half \ud800", 1, 1).data == b"half ?"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("picture", b"\xff\xd8\xff\xe0 a JPEG", "picture: expected the bytes of a PNG or an SVG"),
        ("text", b"a text", "text: expected the bytes of a PNG or an SVG, found b'a text'"),
        ("number", 1.5, "number: expected a text or a picture, found a float"),
        ("long", "x" * (MAX_BYTES + 1), "long has 1,048,577 bytes, too many"),
        ("../up", "text", "'../up' can't be the name"),
        ("", "text", "'' can't be the name"),
    ],
)
def test_what_cannot_be_shown_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        to_shown(name, value, 1, 1)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"[]", b"{", b'{"step": 1, "epoch": 1, "name": "a", "type": "text/html", "text": ""}',
        b'{"step": 1, "epoch": 1, "name": "../a", "type": "text/plain", "text": ""}',
        b'{"step": 1, "epoch": 1, "name": "a", "type": "image/png", "base64": "?"}',
        b'{"step": 1, "epoch": 1, "name": "a", "type": "image/png", "text": ""}',
        b'{"step": 1, "epoch": 1, "name": "a", "type": "text/plain", "text": "\\ud800"}',
    ],
)  # fmt: skip
def test_a_line_of_another_form_is_damage(line: bytes) -> None:
    with pytest.raises(RecordDamaged, match=r"a file has a line that isn't a text or picture"):
        Shown.from_line(line, "a file")


def test_a_checkpoint_has_a_bounded_number_of_bytes(caplog: pytest.LogCaptureFixture) -> None:
    gallery, large = Gallery(), to_shown("large", "x" * MAX_BYTES, 1, 1)
    for _ in range(20):
        gallery.add(large)
    gallery.add(to_shown("small", "x", 2, 1))
    data = gallery.take()
    assert MAX_FILE_BYTES - MAX_BYTES - 1000 < len(data) <= MAX_FILE_BYTES
    assert [json.loads(line)["name"] for line in data.splitlines()] == ["large"] * 15 + ["small"]
    assert "large of step 1 is not stored: the texts and pictures of this chunk already have 16 MiB" in caplog.text
    assert gallery.take() == b""


# ---- on the store


def shown_at(step: int, *names: str) -> bytes:
    return b"".join(to_shown(name, f"{name} of {step}", step, 1).to_line() for name in names or ["text"])


def read(line: Any, commit: Commit) -> list[str]:
    return [shown.data.decode() for shown in read_shown(line.journal, commit)]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "store"))


def test_it_outlives_its_checkpoint(store: LocalStore) -> None:
    line = make_line(store)
    first = train(line, shown=shown_at(10))
    train(line)
    last = train(line, shown=shown_at(30, "a", "b"))
    prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
    assert (read(line, first), read(line, last)) == (["text of 10"], ["a of 30", "b of 30"])
    assert [shown.step for shown in list_shown(line.journal)] == [10, 30, 30]
    assert [shown.name for shown in read_newest(line.journal)] == ["a", "b"]
    assert_good(store)


def test_what_a_quarantined_commit_has_shown_does_not_count(store: LocalStore) -> None:
    line = make_line(store)
    train(line, shown=shown_at(10))
    bad = train(line, shown=shown_at(20))
    line.journal.quarantine(bad.number, "damaged", 1)
    assert [shown.data for shown in list_shown(line.journal)] == [b"text of 10"]


def test_a_copy_that_a_kill_left_out_is_made_by_the_next_attempt(store: LocalStore) -> None:
    line = make_line(store)
    commit = train(line, shown=shown_at(10))
    (root(line) / "shown/00000001.jsonl").unlink()
    assert read(line, commit) == ["text of 10"]  # from the checkpoint
    make_line(store)
    assert (root(line) / "shown/00000001.jsonl").read_bytes() == shown_at(10)


def test_an_adopted_checkpoint_has_what_its_steps_have_shown(store: LocalStore) -> None:
    line = make_line(store)
    save_next(line, shown=shown_at(10))
    again = make_line(store)
    assert again.head is not None
    assert (again.head.why, read(again, again.head)) == ("adopted", ["text of 10"])
    assert_good(store)


def test_an_orphan_whose_pictures_are_damaged_is_not_adopted(store: LocalStore) -> None:
    line = make_line(store)
    saved = save_next(line, shown=shown_at(10))
    (root(line) / saved.path / SHOWN).write_bytes(shown_at(11))
    assert make_line(store).head is None


@pytest.mark.parametrize("damaged", ["shown/00000001.jsonl", f"epoch-0001/{SHOWN}"])
def test_verify_finds_a_changed_picture(store: LocalStore, damaged: str) -> None:
    line = make_line(store)
    commit = train(line, shown=shown_at(10))
    train(line)
    (root(line) / damaged).write_bytes(shown_at(11))
    (problem,) = verify_run(line.journal).problems
    assert damaged in problem
    if damaged.startswith("shown"):
        with pytest.raises(RecordDamaged, match="and commit 1 contradict each other"):
            read_shown(line.journal, commit)


def test_a_packed_checkpoint_brings_what_was_shown(store: LocalStore, tmp_path: Path) -> None:
    packing = pytest.importorskip("holdfast.extensions.pack.pack")
    line = make_line(store)
    commit = train(line, shown=shown_at(10))
    with (tmp_path / "packed.tar").open("wb") as file:
        packing.pack(line.journal, commit, file)
    with (tmp_path / "packed.tar").open("rb") as packed:
        journal = packing.unpack(packed, MemoryStore("unpacked"))
    assert [shown.data for shown in list_shown(journal)] == [b"text of 10"]
    assert verify_run(journal).ok


# ---- in training


@pytest.mark.usefixtures("same_process")
def test_what_evaluate_shows_is_kept_and_is_no_part_of_the_state(tmp_path: Path) -> None:
    ids = []
    for shows in (True, False):
        training = make(tmp_path / str(shows), "tests.support.showing:painted", shows=shows)
        train_to(training, 4)
        store = LocalStore(str(tmp_path / str(shows) / "run"))
        saved = save_step(training, store)
        assert [*saved.metadata.metrics] == ["weight"]
        lines = store.read(f"{saved.path}/{SHOWN}").splitlines() if shows else []
        found = [Shown.from_line(line, "") for line in lines]
        assert [(each.name, each.step, each.epoch) for each in found[3:]] == [
            ("noise", 4, 2), ("picture", 4, 2), ("plot", 4, 2)
        ][: len(found)]  # fmt: skip
        assert (SHOWN in [file.name for file in saved.files]) == shows
        ids.append(saved.metadata.checkpoint_sha256)
    assert ids[0] == ids[1]


def read_lines(folder: Path, name: str) -> list[Any]:
    lines = [json.loads(line) for file in folder.glob(f"run/*/{name}") for line in file.read_bytes().splitlines()]
    return sorted(lines, key=lambda line: int(line["step"]))


@pytest.mark.usefixtures("same_process")
def test_a_loop_that_is_cut_at_every_step_shows_and_logs_the_same(tmp_path: Path) -> None:
    configs = [
        RunConfig(
            recipe="tests.support.showing:epochs", run="r", store=str(tmp_path / name), epochs=3,
            determinism=Determinism(mode="fast"),
        )
        for name in ("straight", "cut")
    ]  # fmt: skip
    straight, _ = live(configs[0], TOTAL)
    saved = None
    for stop in range(1, TOTAL + 1):
        saved, _ = live(configs[1], stop, saved)
    assert saved is not None
    assert content_id(saved) == content_id(straight)
    expected = read_lines(tmp_path / "straight", SHOWN)
    assert [(each["step"], each["name"]) for each in expected] == [
        (1, "beginning"), (2, "weight"), (4, "weight"), (4, "end"), (5, "beginning"), (6, "weight"), (8, "weight"),
        (8, "end"), (9, "beginning"), (10, "weight"), (12, "weight"),
    ]  # fmt: skip
    assert read_lines(tmp_path / "cut", SHOWN) == expected
    logged = [line.get("logged") for line in read_lines(tmp_path / "straight", METRICS)]
    assert [step for step, numbers in enumerate(logged, start=1) if numbers] == [1, 5, 9]
    assert [line.get("logged") for line in read_lines(tmp_path / "cut", METRICS)] == logged


@pytest.mark.usefixtures("same_process")
def test_a_loop_that_shows_no_picture_is_told_its_line(tmp_path: Path) -> None:
    config = RunConfig(
        recipe="tests.support.showing:careless", run="r", store=str(tmp_path), determinism=Determinism(mode="fast")
    )
    with pytest.raises(RecipeError, match=r"showing\.py:\d+: picture: expected the bytes of a PNG or an SVG"):
        live(config, 1)
