"""Random lives of a run, held against a perfect model that sees every write and judges it.

Writers start, save, commit, are killed between any two writes, go on beside a successor that fences them off; bytes are
damaged; retention runs under any policy. At every write the model checks that it was allowed; at every resume, that it
ended where it had to; at the end, that what must be kept can be loaded and that verification finds all damage and
nothing else.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.attempt import Line
from holdfast.checkpoint import METADATA, METRICS, PAYLOAD, Metadata
from holdfast.config import KeepBest, Retention
from holdfast.errors import NoVerifiedCheckpoint, Superseded
from holdfast.journal import Commit, Journal
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.store import Bytes, Store, Writer, open_store
from tests.conftest import IS_SOAK
from tests.support.makers import STEPS_PER_EPOCH, load, make_line, save_next

# The same lives every time, but for a soak, which continues where tests must end.
EXAMPLES = int(os.environ.get("HOLDFAST_EXAMPLES", "80"))
STEPS = 30
WRITERS = (0, 1)
FILES = (PAYLOAD, METADATA, METRICS)


class Killed(BaseException):
    """As SIGKILL: nothing but the store outlives it."""


class Mortal(Store):
    """One writer's way to the store; every write is shown to the model, and may be its last."""

    def __init__(self, store: Store, model: "Model", life: "Life") -> None:
        self.store, self.model, self.life = store, model, life
        self.url = store.url

    def inside(self, folder: str) -> "Mortal":
        return Mortal(self.store.inside(folder), self.model, self.life)

    @contextlib.contextmanager
    def _write(self, kind: str, name: str, data: Bytes = b"") -> Iterator[None]:
        self.life.pass_point()
        self.model.before(kind, name, bytes(data), self.life)
        yield
        self.model.after(kind, name, bytes(data), self.life)
        self.life.pass_point()

    def create(self, name: str, data: Bytes) -> None:
        with self._write("create", name, data):
            self.store.create(name, data)

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[Writer]:
        pieces: list[bytes] = []

        class Keeping:
            def write(self, data: Bytes) -> None:
                pieces.append(bytes(data))

        self.life.pass_point()
        yield Keeping()
        self.life.pass_point()
        with self.store.creating(name) as writer:
            for piece in pieces:
                writer.write(piece)
        self.model.after("create", name, b"".join(pieces), self.life)
        self.life.pass_point()

    def replace(self, name: str, data: Bytes) -> None:
        with self._write("replace", name, data):
            self.store.replace(name, data)

    def delete(self, name: str) -> None:
        with self._write("delete", name):
            self.store.delete(name)

    def delete_folder(self, folder: str) -> None:
        with self._write("delete folder", folder):
            self.store.delete_folder(folder)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.store.read(name, start, stop)

    def pieces(self, name: str, piece_bytes: int = 2**20) -> Iterator[bytes]:
        return self.store.pieces(name, piece_bytes)

    def size_bytes(self, name: str) -> int:
        return self.store.size_bytes(name)

    def list(self, folder: str = "", after: str = "") -> list[str]:
        return self.store.list(folder, after)

    def modified(self, name: str) -> datetime:
        return datetime.fromtimestamp(0, UTC)  # everything is old: debris is collected at once

    def sweep(self, before: datetime, is_spared: object = None) -> int:
        return 0


class Life:
    """How many points a writer still passes before it is killed; it is dead for good then."""

    def __init__(self, points: int | None = None) -> None:
        self.points = points
        self.allowed: set[int] = set()  # the commits that it may give up, while it prunes

    def pass_point(self) -> None:
        if self.points is not None:
            if self.points <= 0:
                raise Killed
            self.points -= 1


class Model:
    """What is on the store, and what may become of it."""

    def __init__(self) -> None:
        self.owner: Life | None = None
        self.attempts = 0
        self.commits: dict[int, Commit] = {}
        self.records_lost: set[int] = set()
        self.quarantined: set[int] = set()
        self.pruned: set[int] = set()
        self.pins: set[int] = set()
        self.folders: dict[str, dict[str, str]] = {}
        self.deleted: set[str] = set()
        self.metadata: dict[str, Metadata] = {}
        self.trails: dict[str, str] = {}  # the SHA-256 of each trail as it was written

    # ---- what is so

    def is_damaged(self, number: int) -> bool:
        commit = self.commits[number]
        there = self.folders.get(commit.path, {})
        return any(there.get(file.name) != file.sha256 for file in commit.files)

    def live(self) -> list[int]:
        """What a run may continue from by the records, newest first."""
        gone = self.quarantined | self.pruned | self.records_lost
        return sorted(self.commits.keys() - gone, reverse=True)

    def expected_content(self) -> str | None:
        """The content id that a resume must end on; empty for a fresh start, None if nothing is left."""
        quarantined = set(self.quarantined)
        while True:
            head = next((n for n in self.live() if n not in quarantined), None)
            parent, step = (self.commits[head].checkpoint_sha256, self.commits[head].step) if head else ("", 0)
            adopted = self.find_adopted(parent, step, quarantined)
            if adopted:
                return adopted
            if head is None:
                return None if self.commits else ""
            if not self.is_damaged(head):
                return parent
            quarantined.add(head)

    def find_adopted(self, parent: str, step: int, quarantined: set[int]) -> str:
        """The content id at the end of the line of complete checkpoints that no commit counts."""
        # A folder belongs to its commit for good if its record can be read, also after retention has given it up.
        taken = {self.commits[number].path for number in (quarantined | self.pruned) - self.records_lost}
        found = [
            (metadata.optimizer_steps_total, path, metadata.checkpoint_sha256)
            for path, metadata in self.metadata.items()
            if path not in taken
            and metadata.previous_checkpoint_sha256 == parent
            and metadata.optimizer_steps_total > step
            and self.is_whole(path)
        ]
        if not found:
            return ""
        step, _, content = max(found)
        return self.find_adopted(content, step, quarantined) or content

    def is_whole(self, path: str) -> bool:
        """Return whether a checkpoint is complete and undamaged, with its trail, which has to continue the parent's."""
        there, metadata = self.folders.get(path, {}), self.metadata[path]
        return (
            there.get(METADATA) == hashlib.sha256(metadata.to_bytes()).hexdigest()
            and there.get(PAYLOAD) == metadata.checkpoint_sha256
            and METRICS in there
            and there[METRICS] == self.trails[path]
        )

    def kept(self, policy: Retention) -> set[int]:
        """What the policy, the pins and caution keep."""
        live = self.live()
        steps = {n: self.commits[n].step for n in live}
        kept = set(live[: policy.keep_last])
        if policy.keep_every:
            kept |= {n for n in live if steps[n] % (policy.keep_every * STEPS_PER_EPOCH) == 0}
        if policy.keep_every_steps:
            kept |= {n for n in live if steps[n] % policy.keep_every_steps == 0}
        if policy.keep_best:
            losses = sorted((self.commits[n].metrics["avg_loss"], -n) for n in live)
            kept |= {-n for _, n in losses[: policy.keep_best.count]}
        for n in live:
            kept.add(n)
            if not self.is_damaged(n):
                break
        return kept | self.pins & set(live)

    # ---- what is done

    def before(self, kind: str, name: str, data: bytes, life: Life) -> None:
        """A write is about to be done: is it allowed?"""
        folder, _, number = name.removesuffix(".json").partition("/")
        if kind == "create" and folder == "quarantine":
            assert int(number) in self.records_lost or self.is_damaged(int(number)), "a good commit is quarantined"
            assert life is self.owner
        elif kind == "create" and folder == "pruned":
            assert int(number) in life.allowed, f"commit {number} is given up"
        elif kind == "create" and folder.startswith("epoch-"):
            assert folder not in self.deleted, f"the name {folder} is used again"
        elif kind == "delete folder":
            self.deleted.add(name)
            named = {number for number, commit in self.commits.items() if commit.path == name}
            assert not named & set(self.live()), f"{name} is deleted"
            assert not named or named & self.pruned, f"{name} is deleted, which no retention gave up"
        elif kind == "replace":
            assert folder in ("latest", "config.snapshot", "configs", "metrics", "prunes"), f"{name} is replaced"

    def after(self, kind: str, name: str, data: bytes, life: Life) -> None:
        folder, _, rest = name.partition("/")
        if kind == "create" and folder == "attempts":
            self.attempts, self.owner = int(rest[:8]), life
        elif kind == "create" and folder == "commits":
            self._judge_commit(Commit.from_bytes(data, name), life)
        elif kind == "create" and folder in ("quarantine", "pruned"):
            getattr(self, {"quarantine": "quarantined", "pruned": "pruned"}[folder]).add(int(rest[:8]))
        elif kind == "create" and folder.startswith("epoch-"):
            self.folders.setdefault(folder, {})[rest] = hashlib.sha256(data).hexdigest()
            if rest == METRICS:
                self.trails[folder] = self.folders[folder][rest]
            if rest == METADATA:
                self.metadata[folder] = Metadata.from_bytes(data, name)
        elif kind == "delete folder":
            self.folders.pop(name, None)
            self.metadata.pop(name, None)

    def _judge_commit(self, commit: Commit, life: Life) -> None:
        assert life is self.owner, "a superseded writer has committed"
        assert commit.number not in self.commits
        if commit.parent:
            assert commit.parent not in self.quarantined | self.pruned, "a commit continues what does not count"
            parent = self.commits[commit.parent]
            assert (parent.checkpoint_sha256, True) == (commit.previous_checkpoint_sha256, parent.step < commit.step)
        self.commits[commit.number] = commit
        assert not self.is_damaged(commit.number), "what was committed is not there"


policies = st.builds(
    Retention,
    keep_last=st.integers(1, 3),
    keep_every=st.integers(0, 2),
    keep_every_steps=st.sampled_from([0, 0, 15]),
    keep_best=st.none() | st.builds(KeepBest, metric=st.just("avg_loss"), count=st.integers(1, 2)),
)
# Mostly it lives; else it dies between any two writes of what it is about to do.
points = st.sampled_from([None, None, None]) | st.integers(0, 24)
chunks = st.sampled_from([5, 5, 10, 10, 3])


class Lives(RuleBasedStateMachine):
    """Two writers, one of them or both alive, and a store that rots."""

    open: Callable[[], Store]

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).open()
        self.model = Model()
        self.writers: dict[int, tuple[Line, Life]] = {}
        self.saves = 0

    @property
    def run(self) -> Store:
        return self.store.inside("run")

    def fresh(self) -> Journal:
        return Journal(self.store, "run")

    @contextlib.contextmanager
    def mortal(self, writer: int, life: Life) -> Iterator[None]:
        try:
            yield
        except Killed:
            self.writers.pop(writer, None)

    @initialize(lengths=st.lists(chunks, min_size=1, max_size=8))
    def begin(self, lengths: list[int]) -> None:
        """There is some history."""
        self.start(0, None)
        for steps in lengths:
            self.train(0, None, steps, True)

    @rule(writer=st.sampled_from(WRITERS), points=points)
    def start(self, writer: int, points: int | None) -> None:
        """A new process takes the run over; its forerunner under this number is dead, the other continues."""
        self.writers.pop(writer, None)
        life = Life(points)
        expected = self.model.expected_content()
        with self.mortal(writer, life):
            try:
                line = make_line(Mortal(self.store, self.model, life))
            except NoVerifiedCheckpoint:
                assert expected is None
                return
            assert (line.head.checkpoint_sha256 if line.head else "") == expected
            assert line.head is None or load(self.run, line.head) is None
            self.writers[writer] = line, life

    @rule(writer=st.sampled_from(WRITERS), points=points, steps=chunks, commits=st.sampled_from([True, True, False]))
    def train(self, writer: int, points: int | None, steps: int, commits: bool) -> None:
        """A chunk is saved, and mostly committed: else it is what an orphan leaves."""
        if writer not in self.writers:
            self.start(writer, None)
        if writer not in self.writers:
            return  # nothing is left that it could start from
        line, life = self.writers[writer]
        life.points = points
        self.saves += 1
        step = line.head.step if line.head else 0
        steps = min(steps, STEPS_PER_EPOCH - step % STEPS_PER_EPOCH)
        with self.mortal(writer, life):
            try:
                # Not the time: the machine has to do the same when it is asked to do it again.
                saved = save_next(line, steps, created_at=f"at save {self.saves}")
                if commits:
                    line.commit(saved, "chunk")
            except Superseded:
                assert life is not self.model.owner
                self.writers.pop(writer)
            if not commits:
                self.writers.pop(writer, None)  # it saved itself after its attempt had died

    @precondition(lambda self: self.model.live())
    @rule(policy=policies, points=points)
    def prune(self, policy: Retention, points: int | None) -> None:
        """Retention runs, by whomever."""
        life = Life(points)
        live, kept = set(self.model.live()), self.model.kept(policy)
        life.allowed = live - kept
        nothing_verifies = bool(live) and all(self.model.is_damaged(number) for number in live)
        with contextlib.suppress(Killed):
            try:
                journal = Journal(Mortal(self.store, self.model, life), "run")
                prune_by_policy(journal, policy, STEPS_PER_EPOCH, debris_after_s=0)
            except NoVerifiedCheckpoint:
                assert nothing_verifies
                return
            assert set(self.model.live()) == live & kept
        assert set(self.model.live()) >= live & kept

    @precondition(lambda self: self.model.folders)
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "remove"]))
    def rot(self, data: Any, how: str) -> None:
        """A file of a checkpoint is not what it was."""
        path = data.draw(st.sampled_from(sorted(self.model.folders)))
        files = sorted(self.model.folders[path])
        if not files:
            return
        name = data.draw(st.sampled_from(files))
        content = self.run.read(f"{path}/{name}")
        if how == "remove" or not content:
            self.run.delete(f"{path}/{name}")
            del self.model.folders[path][name]
            return
        changed = content[:-2] if how == "cut" else bytes([content[0] ^ 1]) + content[1:]
        self.run.replace(f"{path}/{name}", changed)
        self.model.folders[path][name] = hashlib.sha256(changed).hexdigest()

    @precondition(lambda self: self.model.live())
    @rule(data=st.data())
    def rot_record(self, data: Any) -> None:
        """A commit record can't be read any more."""
        number = data.draw(st.sampled_from(self.model.live()))
        self.run.replace(f"commits/{number:08d}.json", b"{")
        self.model.records_lost.add(number)

    @rule(name=st.sampled_from(["latest.json", "config.snapshot.json"]), how=st.sampled_from(["remove", "spoil"]))
    def rot_hint(self, name: str, how: str) -> None:
        """What may be missing or wrong, and changes nothing."""
        self.run.delete(name)
        if how == "spoil" and self.model.commits:  # without a commit it is a sign that there was one
            self.run.replace(name, b'{"commit": 1')

    @precondition(lambda self: self.model.live())
    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        number = data.draw(st.sampled_from(self.model.live()))
        if number in self.model.pins:
            self.fresh().unpin(number)
            self.model.pins.discard(number)
        else:
            self.fresh().pin(number)
            self.model.pins.add(number)

    @invariant()
    def the_newest_is_found(self) -> None:
        newest = self.fresh().newest()
        live = self.model.live()
        assert (newest.number if newest else None) == (live[0] if live else None)

    def teardown(self) -> None:
        try:
            self.check_all()
        finally:
            self.store.delete_folder("run")

    def check_all(self) -> None:
        """Everything that must be there can be loaded; all damage is found, and nothing else is called damage."""
        if not self.model.attempts:
            return
        report = verify_run(self.fresh(), deep=False)
        live = self.model.live()
        found = {entry.commit for entry in report.checkpoints if entry.damaged}
        assert found == {number for number in live if self.model.is_damaged(number)}
        for number in live:
            if number not in found:
                assert load(self.run, self.model.commits[number]) is None
        expected = len(self.model.records_lost - self.model.quarantined)
        others = [problem for problem in report.problems if "was committed as" not in problem]
        hints = [problem for problem in others if problem.startswith(("latest.json", "config.snapshot.json"))]
        assert len(others) - len(hints) == expected, others


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def explore(open_: Callable[[], Store], examples: int) -> None:
    machine = type("Machine", (Lives,), {"open": staticmethod(open_)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=not IS_SOAK,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_on_a_local_disk() -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        explore(lambda: open_store(str(folder / secrets.token_hex(4))), EXAMPLES)
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_on_an_object_store(gcs_bucket: str) -> None:
    store = open_store(gcs_bucket)
    explore(lambda: store.inside(secrets.token_hex(4)), max(EXAMPLES // 10, 1))
