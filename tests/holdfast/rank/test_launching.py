"""The reports of ranks reach the caller as events and errors, whatever starts the ranks."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO

import pytest

from holdfast.config import RunConfig
from holdfast.errors import CheckpointDamaged, RankDied, RecipeFailed, RunStopped
from holdfast.machine.processes import LONGEST_EPOCH_VARIABLE, RANK_MODULE
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import (
    Damaged,
    End,
    Evaluate,
    Event,
    Failed,
    Progress,
    Ready,
    Restore,
    Restored,
    Save,
    Skipped,
    Stop,
    Train,
    decode_order,
    encode_message,
)  # fmt: skip
from holdfast.recipe.probe import Gate
from tests.support.makers import make_commit
from tests.support.waiting import WITHIN_S

SAID = Progress(step=1, loss=0.5, steps_per_s=2.0)
Make = Callable[..., "tuple[Ranks, Said]"]


class Said:
    """A process that prints given lines and then ends with an exit code."""

    pid = 2**30  # nobody's

    def __init__(self, text: str, returncode: int = 0) -> None:
        said, self._said_in = os.pipe()
        self._text = text
        self.stdout: IO[str] = os.fdopen(said)
        heard, heard_in = os.pipe()
        self.heard = os.fdopen(heard)
        self.stdin: IO[str] = os.fdopen(heard_in, "w", buffering=1)
        self.returncode = returncode
        self.command: Sequence[str] = ()
        self.environment: dict[str, str] = {}

    def __call__(self, command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> "Said":
        self.command, self.environment = command, environment
        log.write(b"the last line\n/lib/some.py:7: UserWarning: 'x' is deprecated\n  x(1)\n")
        return self

    def say(self) -> None:
        with os.fdopen(self._said_in, "w") as pipe:
            pipe.write(self._text)

    def poll(self) -> int:
        return self.returncode

    def wait(self) -> int:
        return self.returncode


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make ranks that have sent some events."""
    made = list[Said]()

    def make(*events: Event, text: str = "", returncode: int = 0, is_held: bool = False) -> tuple[Ranks, Said]:
        said = Said("".join(map(encode_message, events)) + text, returncode)
        made.append(said)
        if not is_held:
            said.say()
        ranks = Ranks(RunConfig(recipe="m:f", run="r"), tmp_path / "ranks.log", longest_epoch=7, spawn=said)
        return ranks, said

    yield make
    for said in made:
        said.stdin.close()
        said.heard.close()


def test_ranks_are_started_by_the_given_spawn(make: Make) -> None:
    _, said = make()
    assert said.command == [sys.executable, "-P", "-m", RANK_MODULE]
    assert said.environment[LONGEST_EPOCH_VARIABLE] == "7"
    assert "PYTHONHASHSEED" in said.environment


def test_each_verb_sends_its_order(make: Make) -> None:
    ranks, said = make(Restored(step=4))
    commit, gate = make_commit(1), Gate("tolerance", 1e-3)
    assert ranks.restore(commit, gate) == Restored(step=4)
    ranks.train(8, "f" * 64, into="/tmp", is_detailed=True)
    ranks.save()
    ranks.stop(within_s=2.5)
    with pytest.raises(RankDied):
        ranks.evaluate()
    ranks.end()
    assert [decode_order(line) for line in said.heard] == [
        Restore(commit=commit, gate=gate), Train(stop=8, fingerprint="f" * 64, into="/tmp", is_detailed=True), Save(),
        Stop(within_s=2.5), Evaluate(), End(),
    ]  # fmt: skip


def test_skipped_and_woken_events_are_not_taken_for_the_answer(make: Make) -> None:
    ranks, said = make(Skipped(done=1, total=2), Restored(step=4), is_held=True)
    ranks.wake()
    said.say()
    assert ranks.restore(make_commit(1), Gate()) == Restored(step=4)


def test_damage_is_returned_and_not_raised(make: Make) -> None:
    ranks, _ = make(Damaged.of(CheckpointDamaged("a bit flipped")), SAID)
    answer = ranks.restore(make_commit(1), Gate())
    assert isinstance(answer, Damaged)
    assert isinstance(answer.error, CheckpointDamaged)
    assert ranks.next_event() == SAID


def test_another_event_than_the_expected_one_is_named(make: Make) -> None:
    ranks, _ = make(SAID)
    with pytest.raises(RunStopped, match="reported Progress where Restored was expected"):
        ranks.restore(make_commit(1), Gate())


def test_the_error_of_a_rank_is_raised(make: Make) -> None:
    ranks, _ = make(Failed.of(RecipeFailed("training failed", step=3)))
    with pytest.raises(RecipeFailed, match="training failed") as caught:
        ranks.next_event()
    assert caught.value.data == {"step": 3}


def test_the_cause_is_raised_rather_than_its_effect_on_another_rank(make: Make) -> None:
    ranks, _ = make(Failed.of(RankDied("lost", is_effect=True)), Failed.of(RecipeFailed("the cause")))
    with pytest.raises(RecipeFailed, match="the cause"):
        ranks.next_event()


@pytest.mark.parametrize(("returncode", "ending"), [(-9, r"signal 9 \(SIGKILL\)"), (3, "exit code 3")])
def test_ranks_that_end_without_a_report_are_described_by_their_log(make: Make, returncode: int, ending: str) -> None:
    ranks, _ = make(SAID, returncode=returncode)
    assert ranks.next_event() == SAID
    for _ in range(2):  # a second call raises the same error
        with pytest.raises(RankDied, match=rf"the ranks ended: {ending} \(last lines of .*: the last line\)"):
            ranks.next_event()


def test_a_line_that_is_no_event_is_an_error(make: Make) -> None:
    ranks, _ = make(SAID, text='["Later", {}]\n')
    assert ranks.next_event() == SAID
    with pytest.raises(RunStopped, match="don't understand each other's messages"):
        ranks.next_event()


@pytest.mark.slow
def test_a_rank_ends_if_it_gets_a_line_that_is_no_order(tmp_path: Path) -> None:
    """Otherwise it would wait for orders for ever, and the attempt for its answer."""
    config = RunConfig.model_validate({"recipe": "tests.support.toy:toy", "run": "r", "store": str(tmp_path)})
    with Ranks(config, tmp_path / "ranks.log") as ranks:
        ranks.expect(Ready)
        ranks._process.stdin.write('["Later", {}]\n')
        with pytest.raises(
            RunStopped, match=r"the attempt and its ranks don't understand each other's messages: .*Later"
        ):
            ranks.next_event(within_s=WITHIN_S)
