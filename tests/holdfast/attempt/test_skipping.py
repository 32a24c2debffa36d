"""Steps are skipped by a list on record: their batches are drawn and not trained, before and after a kill."""

from pathlib import Path
from typing import Any

import pytest

from holdfast import AttemptView, Commit, Observer, Progress
from holdfast.attempt import Line, live
from holdfast.attempt.attempt import Attempt
from holdfast.attempt.opening import Known
from holdfast.attempt.pipeline import Chunk
from holdfast.attempt.skipping import finish_going_back, skip_steps
from holdfast.checkpoint import Saved, read_commit_lines
from holdfast.cli.app import app
from holdfast.config import ChunkLength, Compute, Log, ProofSettings, Resume, Retention, RunConfig
from holdfast.config.steps import Steps
from holdfast.errors import ConfigDrift, NotTrusted, NoVerifiedCheckpoint, ParentQuarantined, RecordDamaged, WrongUse
from holdfast.journal import Journal
from holdfast.journal.signature import SigningKey
from holdfast.journal.skips import list_skips, read_skips, write_skips
from holdfast.keeping.verification import verify_run
from holdfast.proof.audit import audit_commit
from holdfast.proof.prove import prove
from holdfast.recipe.trust import Trust
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from tests.conftest import IN_SOAK
from tests.support.makers import STEPS_PER_EPOCH, assert_good, damage, make_key, resume, root, save_next, train
from tests.support.processes import kill_ranks
from tests.support.spiking import POISONED_STEP, SAMPLES, SEED


def list_candidates(line: Line) -> list[int]:
    return [each.number for each in line.journal.candidates()]


def skip(line: Line, text: str, key: SigningKey | None = None, *, is_off: bool = False) -> list[int]:
    return skip_steps(line.journal, Steps.parse(text), key, is_off=is_off).quarantined


class TestOnTheStore:
    """The line has a commit at the end of each of its first four epochs."""

    @pytest.fixture
    def line(self, line: Line) -> Line:
        train(line)
        train(line)
        return line

    @pytest.mark.parametrize(
        ("text", "gone"),
        [
            (str(STEPS_PER_EPOCH + 1), [2, 3, 4]),
            (str(2 * STEPS_PER_EPOCH), [2, 3, 4]),
            (f"{2 * STEPS_PER_EPOCH + 1}-{4 * STEPS_PER_EPOCH}", [3, 4]),
            (f"{4 * STEPS_PER_EPOCH}, {3 * STEPS_PER_EPOCH}", [3, 4]),
        ],
    )
    def test_the_run_goes_back_to_the_commit_before_the_steps(self, line: Line, text: str, gone: list[int]) -> None:
        done = skip_steps(line.journal, Steps.parse(text), reason="a poisoned file")
        assert done.quarantined == gone
        assert done.start is not None
        assert done.start.number == gone[0] - 1
        assert list_candidates(line) == [number for number in (4, 3, 2, 1) if number not in gone]
        assert line.journal.numbers("pins") == []
        assert "a poisoned file" in line.journal.quarantine_reasons()[0]
        assert str(Steps.parse(text)) in str(read_skips(line.journal))

    def test_a_list_grows_and_shrinks(self, line: Line, store: LocalStore) -> None:
        last = 4 * STEPS_PER_EPOCH
        skip(line, f"{last}")
        with pytest.raises(ParentQuarantined):
            train(line)  # a live attempt
        resume_with_list(line)
        train(line)
        assert skip(line, f"{last - 1}-{last}") == [6], "an overlapping list adds the steps that are new"
        assert [(each.skip, each.changed) for each in list_skips(line.journal)] == [
            (f"{last}", f"{last}"),
            (f"{last - 1}-{last}", f"{last - 1}"),
        ]
        resume_with_list(line)
        train(line)
        assert skip(line, f"{last}", is_off=True) == [7]
        newest = read_skips(line.journal)
        assert newest is not None
        assert (newest.skip, newest.is_off) == (f"{last - 1}", True)
        assert_good(store)

    def test_a_kill_after_the_record_is_made_up_for(self, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
        text = str(4 * STEPS_PER_EPOCH)
        with monkeypatch.context() as killed:
            killed.setattr("holdfast.attempt.skipping.take_back", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                skip(line, text)
        assert list_candidates(line) == [4, 3, 2, 1]
        record = read_skips(line.journal)
        assert record is not None
        assert finish_going_back(line.journal, record) == [4]
        resume_with_list(line)
        train(line)
        assert finish_going_back(line.journal, record) == [], "a commit that was trained with the list counts"
        assert skip(line, text) == []

    def test_another_skip_finishes_one_that_was_killed(self, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without that, no attempt could follow the list: a commit that counts has trained a step of it."""
        last = 4 * STEPS_PER_EPOCH
        with monkeypatch.context() as killed:
            killed.setattr("holdfast.attempt.skipping.take_back", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                skip(line, str(2 * STEPS_PER_EPOCH))
        with pytest.raises(
            WrongUse, match=rf"has not trained step {last} yet: its newest commit has step {STEPS_PER_EPOCH}"
        ):
            skip(line, str(last))
        assert list_candidates(line) == [1]
        assert [each.skip for each in list_skips(line.journal)] == [str(2 * STEPS_PER_EPOCH)]

    def test_the_next_attempt_removes_the_pin_of_a_skip_that_was_killed(
        self, line: Line, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line.journal.pin(1)  # a person's
        with monkeypatch.context() as killed:
            killed.setattr("holdfast.attempt.skipping.unpin_before", lambda *arguments: None)
            assert skip(line, str(4 * STEPS_PER_EPOCH)) == [4]
        assert line.journal.numbers("pins") == [1, 3]
        resume(line)
        assert line.journal.numbers("pins") == [1]

    def test_bad_input_is_named(self, line: Line) -> None:
        last = 4 * STEPS_PER_EPOCH
        for text, expected in (
            (f"{last}-{last + 1}", f"has not trained steps {last}-{last + 1} yet: its newest commit has step {last}"),
            (
                f"{99 * STEPS_PER_EPOCH}",
                f"has not trained step {99 * STEPS_PER_EPOCH} yet: the run ends with step {9 * STEPS_PER_EPOCH}",
            ),
            ("1", f"can't go back before step 1: .* the oldest one is commit 1 at step {STEPS_PER_EPOCH}"),
        ):
            with pytest.raises(WrongUse, match=expected):
                skip(line, text)
        with pytest.raises(WrongUse, match=r"not on its skip list"):
            skip(line, f"{last}", is_off=True)
        for text in ("0", "", "3-1", "x"):
            with pytest.raises(WrongUse, match=r"expected steps such as 1200-1210"):
                app(["skip", line.journal.store.url, text], exit_on_error=False)
        assert read_skips(line.journal) is None
        skip(line, f"{last - 1}")
        resume_with_list(line)
        train(line)
        skip(line, f"{last}")
        resume_with_list(line)
        train(line)
        with pytest.raises(WrongUse, match=rf"steps {last - 1}-{last} of .*: skipped already"):
            skip(line, f"{last - 1}-{last}")

    def test_a_skip_is_taken_back_once_the_run_has_passed_its_steps(self, line: Line) -> None:
        text = str(4 * STEPS_PER_EPOCH)
        skip(line, text)
        with pytest.raises(WrongUse, match=r"has not passed step 40 yet: its newest commit has step 30") as raised:
            skip(line, text, is_off=True)
        assert raised.value.hint == "train the run past the skipped steps first"
        with pytest.raises(WrongUse, match=r"step 41 .*: not on its skip list"):
            skip(line, "41", is_off=True)

    def test_the_run_keeps_a_checkpoint_that_verifies(self, line: Line) -> None:
        damage(line, line.journal.read_commit(1).path)
        with pytest.raises(WrongUse, match=r"can't go back before step .*: no checkpoint before it verifies"):
            skip(line, str(STEPS_PER_EPOCH + 1))
        skip(line, str(3 * STEPS_PER_EPOCH))
        assert list_candidates(line) == [2, 1]

    def test_an_interrupted_skip_takes_nothing_back_if_the_checkpoint_before_is_damaged_since(
        self, line: Line, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as killed:
            killed.setattr("holdfast.attempt.skipping.take_back", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                skip(line, str(STEPS_PER_EPOCH + 1))
        damage(line, line.journal.read_commit(1).path)
        record = read_skips(line.journal)
        assert record is not None
        with pytest.raises(NoVerifiedCheckpoint):
            finish_going_back(line.journal, record)
        assert list_candidates(line) == [4, 3, 2, 1]

    def test_only_a_list_of_a_trusted_key_is_read(self, line: Line, tmp_path: Path) -> None:
        (key, trusted), (other, _) = make_key(tmp_path / "key"), make_key(tmp_path / "other")
        text = str(4 * STEPS_PER_EPOCH)
        skip(line, text)
        with pytest.raises(NotTrusted, match=r"skip list 1 .* is not signed"):
            read_skips(line.journal, [trusted])
        problems = verify_run(line.journal, trusted_keys=[trusted]).problems
        assert "skip list 1 of run 'run' (step 40) is not signed" in problems
        skip(line, text, other)
        with pytest.raises(NotTrusted, match=r"was not made with a trusted key"):
            read_skips(line.journal, [trusted])
        skip(line, text, key)
        assert read_skips(line.journal, [trusted]) is not None
        assert not [each for each in verify_run(line.journal, trusted_keys=[trusted]).problems if "skip" in each]
        record = read_skips(line.journal)
        assert record is not None
        path = root(line) / "skips/00000001.json"
        path.write_bytes(record.model_copy(update={"skip": "1"}).to_bytes())
        with pytest.raises(NotTrusted, match=r"was made for different bytes"):
            read_skips(line.journal, [trusted])
        path.write_bytes(path.read_bytes().replace(b'"1"', b'"2"'))
        with pytest.raises(RecordDamaged, match=r"skips/00000001\.json can't be read"):
            read_skips(line.journal)

    def test_a_signature_vouches_for_no_step_of_a_list_that_its_key_has_not_signed(
        self, line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Anyone who can write to the store can put a list there."""
        (key, trusted), last = make_key(tmp_path / "key"), 4 * STEPS_PER_EPOCH
        write_skips(line.journal, 1, Steps.parse("1000-2000"), Steps.parse("1000-2000"), 99)
        with pytest.raises(NotTrusted, match=r"skip list 1 of run 'run' \(steps 1000-2000\) is not signed"):
            skip(line, str(last), key)
        assert list_candidates(line) == [4, 3, 2, 1]
        write_skips(line.journal, 2, Steps(), Steps.parse("1000-2000"), 99, is_off=True)
        skip(line, str(last), key)
        found = read_skips(line.journal, [trusted])
        assert found is not None
        assert found.skip == str(last)
        with pytest.raises(SystemExit):
            app(["skip", line.journal.store.url, str(last - STEPS_PER_EPOCH), "--key", str(tmp_path / "key")])
        assert "\nall skipped steps: 30,40\n" in capsys.readouterr().out

    def test_show_names_a_damaged_list_and_not_the_one_before(
        self, line: Line, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_skips(line.journal, 1, Steps.parse("31"), Steps.parse("31"), 99)
        write_skips(line.journal, 2, Steps.parse("31,33"), Steps.parse("33"), 99)
        path = root(line) / "skips/00000002.json"
        path.write_bytes(path.read_bytes().replace(b'"33"', b'"34"'))
        with pytest.raises(SystemExit):
            app(["show", line.journal.store.url])
        (row,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("skipped steps")]
        assert "skips/00000002.json can't be read" in row

    def test_a_lost_list_is_noticed(self, line: Line, store: LocalStore) -> None:
        skip(line, str(4 * STEPS_PER_EPOCH))
        (root(line) / "skips/00000001.json").unlink()
        assert "skips/00000001.json is missing" in verify_run(Journal(store, "run"), everything=True).problems

    def test_a_run_with_signed_commits_asks_for_a_key(self, line: Line, tmp_path: Path) -> None:
        key, _ = make_key(tmp_path / "key")
        line._signing_key = key
        saved = save_next(line)
        line.commit(saved, "chunk")
        with pytest.raises(WrongUse, match=r"the commits of run 'run' are signed"):
            skip(line, str(5 * STEPS_PER_EPOCH))


def raise_interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def resume_with_list(line: Line) -> None:
    """Go on from the newest commit, as an attempt does that has read the list."""
    record = read_skips(line.journal)
    assert record is not None
    line.skip_records = record.names[:1]
    line.head = line.journal.newest()
    line.next_number = line.journal.next_number()


# ---- with ranks

FORMS = [
    pytest.param({}, id="1 rank"),
    pytest.param({"ranks": 2}, id="2 ranks", marks=IN_SOAK),
    pytest.param({"ranks": 2, "virtual_ranks": 4}, id="4 virtual ranks on 2"),
]


class Kill(Observer):
    """Kills the ranks once, after a step."""

    def __init__(self, step: int) -> None:
        self._step, self.is_done = step, False

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        if progress.step >= self._step and not self.is_done:
            self.is_done = True
            kill_ranks(attempt)


class Skip(Observer):
    """Skips the poisoned step once a live attempt has committed it, as a person in another process does."""

    def __init__(self) -> None:
        self.quarantined: list[int] = []

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        if commit.spikes and not self.quarantined:
            self.quarantined = skip_steps(attempt.journal, Steps.parse(str(commit.spikes[0].step))).quarantined


def make_config(folder: Path, run: str, form: dict[str, Any], recipe: str = "spike", **fields: Any) -> RunConfig:
    settings = {"cause": "data", "samples": 5 * SAMPLES} if recipe == "spike" else {}
    return RunConfig(
        recipe=f"tests.support.spiking:{recipe}", run=run, store=str(folder / "runs"), chunk=ChunkLength(steps=10),
        settings=settings, compute=Compute(device="cpu", **form), log=Log(folder=str(folder / "logs"), every=1),
        seed=SEED, retention=Retention(keep_last=9), proof=ProofSettings(rehearse="off"), **fields,
    )  # fmt: skip


def open_run(config: RunConfig) -> Journal:
    return Journal(open_store(config.store), config.run)


def list_ends(config: RunConfig) -> dict[int, str]:
    return {commit.step: commit.checkpoint_sha256 for commit in open_run(config).candidates()}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
class TestWithRanks:
    @pytest.mark.parametrize("form", FORMS)
    def test_a_skipped_run_that_is_killed_ends_on_the_bytes_of_one_that_had_the_list_from_its_beginning(
        self, form: dict[str, Any], tmp_path: Path
    ) -> None:
        key, _ = make_key(tmp_path / "key")
        signed: dict[str, Any] = {
            "signing_key": str(tmp_path / "key"),
            "resume": Resume(trusted_keys=(f"{tmp_path}/key.pub",)),
        }
        config = make_config(tmp_path, "r", form, **signed)
        assert live(config).complete
        journal = open_run(config)
        assert {spike.step for commit in journal.candidates() for spike in commit.spikes} == {POISONED_STEP}
        skip_steps(journal, Steps.parse(str(POISONED_STEP)), key)
        kill = Kill(33)
        assert live(config, [kill]).complete
        assert kill.is_done

        reference = make_config(tmp_path, "reference", form, skip=str(POISONED_STEP))
        assert live(reference).complete
        assert list_ends(config) == list_ends(reference)
        assert open_run(config).newest().config_fingerprint == open_run(reference).newest().config_fingerprint  # type: ignore[union-attr]

        journal, trust = open_run(config), Trust(recipe=config.recipe)
        commits = [*journal.candidates()]
        assert not any(commit.spikes for commit in commits)
        lines = [line for commit in commits for line in read_commit_lines(journal.store, commit)]
        assert [line["step"] for line in lines if line.get("skipped")] == [POISONED_STEP]
        for commit in commits:
            audit = audit_commit(journal, commit, trust=trust)
            assert audit.is_identical, str(audit)
        newest = audit_commit(journal, commits[0], start=0, trust=trust)
        assert newest.is_identical, "the settings with the list train the steps before it, too"

    def test_a_live_attempt_goes_back_at_its_next_commit(self, tmp_path: Path) -> None:
        config, skipping = make_config(tmp_path, "r", {}), Skip()
        assert live(config, [skipping]).complete
        assert skipping.quarantined == [3]
        reference = make_config(tmp_path, "reference", {}, skip=str(POISONED_STEP))
        assert live(reference).complete
        assert list_ends(config) == list_ends(reference)
        assert len(open_run(config).numbers("attempts")) == 1

    def test_new_ranks_follow_a_list_that_came_before_the_old_ones_were_lost(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The attempt has no later commit of the old ranks at which it would notice that the run went back."""
        config, original, done = make_config(tmp_path, "r", {}), Attempt.train_chunk, list[int]()

        def lose_ranks(attempt: Attempt, chunk: Chunk) -> Saved | None:
            if chunk.number == 4 and not done:
                done.extend(skip_steps(attempt.journal, Steps.parse(str(POISONED_STEP))).quarantined)
                attempt.close()
            return original(attempt, chunk)

        monkeypatch.setattr(Attempt, "train_chunk", lose_ranks)
        assert live(config).complete
        assert done == [3]
        reference = make_config(tmp_path, "reference", {}, skip=str(POISONED_STEP))
        assert live(reference).complete
        assert list_ends(config)[40] == list_ends(reference)[40]
        later = [each for each in open_run(config).candidates() if each.step > POISONED_STEP]
        assert all("skips/00000001.json" in each.records for each in later)
        assert len({each.config_fingerprint for each in later}) == 1

    def test_a_list_that_comes_while_an_attempt_begins_is_followed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_config(tmp_path, "r", {})
        assert live(config).complete
        original, done = Attempt._claim, list[int]()

        def claim_late(attempt: Attempt, known: Known) -> bool:
            found = original(attempt, known)
            if not done:
                done.extend(skip_steps(attempt.journal, Steps.parse(str(POISONED_STEP))).quarantined)
            return found

        monkeypatch.setattr(Attempt, "_claim", claim_late)
        assert live(config.model_copy(update={"epochs": 2})).complete
        assert done == [3, 4]
        reference = make_config(tmp_path, "reference", {}, skip=str(POISONED_STEP), epochs=2)
        assert live(reference).complete
        assert list_ends(config) == list_ends(reference)

    def test_the_undo_ends_on_the_bytes_without_a_list(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, "r", {})
        assert live(config).complete
        before = list_ends(config)
        skip_steps(open_run(config), Steps.parse("24-26"))
        assert live(config).complete
        assert list_ends(config)[40] != before[40]
        skip_steps(open_run(config), Steps.parse("24-26"), is_off=True)
        assert live(config).complete
        assert list_ends(config) == before

    def test_a_list_in_the_configuration_changes_no_step_that_is_trained(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, "r", {})
        assert live(config).complete
        with pytest.raises(
            ConfigDrift, match=r"was trained with steps none skipped, and the configuration skips steps 24"
        ):
            live(config.with_skip("24"))
        assert live(config.with_skip("45").model_copy(update={"epochs": 2})).complete

    def test_a_loop_of_ones_own_skips_steps_at_the_ends_of_its_epochs(self, tmp_path: Path) -> None:
        """Its epochs have 8 steps, and code after the inner loop."""
        config = make_config(tmp_path, "straight", {}, "count_epochs", epochs=4, skip="1-2,7-9,17-24,32")
        assert live(config).complete
        for step in (8, 12, 16, 20, 24, 28):
            killed, kill = (
                config.model_copy(update={"run": f"killed-{step}", "chunk": ChunkLength(steps=4)}),
                Kill(step),
            )
            assert live(killed, [kill]).complete
            assert kill.is_done
            assert list_ends(killed)[32] == list_ends(config)[32], step

    def test_what_cannot_be_skipped_is_refused_by_name(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, "r", {}, "draw_batches", skip="3")
        with pytest.raises(Exception, match=r"step 3 can't be skipped: the loop makes its own batches"):
            live(config)

    def test_a_proof_trains_with_the_list(self, tmp_path: Path) -> None:
        found = prove(make_config(tmp_path, "r", {}, skip="3-4,7"), 12, 2, 5, [], 300.0)
        assert found.is_proved, str(found)
