"""`holdfast prove`: train the same steps twice, once straight, once with kills and resumes, and compare the results."""

import itertools
import logging
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast import checkpoint
from holdfast.attempt import Line
from holdfast.attempt.lineage import Present, describe_present
from holdfast.attempt.refusing import explain_refusal
from holdfast.checkpoint import Saved
from holdfast.checkpoint.found import Found, find_suspects, leave_out_repeated
from holdfast.config import Log, NearTier, RunConfig
from holdfast.errors import ConfigError, GateTripped, HoldfastError, WrongUse
from holdfast.journal import Commit, Journal
from holdfast.machine.gpus.checks import check_gpus, gather_nodes, settle_ranks
from holdfast.proof.differing import find_difference
from holdfast.proof.kills import Speed, choose_kills
from holdfast.proof.replay import read_run_trail
from holdfast.proof.result import Proof, describe_found, list_not_reached, list_unchanged
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Examined, Problem, Progress, Ready, Tripped
from holdfast.recipe.probe import Gate
from holdfast.store import open_store

log = logging.getLogger(__name__)


# A proof first trains this number of steps, to measure the speed and to choose the number of steps of the proof. The
# measurement may take at most this fraction of the proof's time.
MEASURED_STEPS = 12
MEASURED_SHARE = 0.15


def prove(
    config: RunConfig,
    steps: int | None,
    kills: int,
    seed: int | None = None,
    ranks: Sequence[int] = (),
    within_s: float = 120.0,
    *,
    is_whole: bool = False,
) -> Proof:
    """Train some steps twice, each time in a temporary folder: straight, and in chunks with SIGKILLs of the ranks.

    In both runs an epoch is shortened to at most half of the steps, so that the runs cross an epoch's end, and the
    number of epochs is raised, so that they suffice for all steps. A proof of the whole run changes neither.

    Args:
        steps: the number of steps; None for as many as fit into ``within_s``: at least 20, and at most 1000 or the
            number of steps of the run.
        kills: the number of SIGKILLs; fewer if there are too few steps.
        seed: the seed that chooses chunks and kills; None for a random seed.
        ranks: the number of ranks at each start of the killed run; after the last number the list begins again. The
            straight run has the first number. If empty, both runs have the configuration's number.
        within_s: the approximate time for the whole proof in seconds, which decides the number of steps.
        is_whole: train all steps of the run, with its own epochs, however long that takes.

    Raises:
        WrongUse: both ``steps`` and ``is_whole`` are given, equal bytes aren't promised on these numbers of ranks, or
            there are too few kills to use all of them.
        HoldfastError: the recipe can't be built, or fails.
    """
    if steps is not None and steps < 2:
        raise ConfigError(f"--steps {steps}: a proof needs at least 2 steps")
    if kills < 1:
        raise ConfigError(f"--kills {kills}: expected at least 1 kill")
    if steps is not None and is_whole:
        raise WrongUse(f"--steps {steps} and --whole exclude each other")
    config = gather_nodes(settle_ranks(config))
    ranks = ranks or [config.compute.rank_count]
    check_proof_ranks(config, ranks, kills)
    check_gpus(config.with_ranks(max(ranks)).compute)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        if steps is None:
            measured = _Run(config, folder, "measured", [MEASURED_STEPS])
            speed = measured.measure(ranks[0], within_s * MEASURED_SHARE)
            steps = max(speed.own_steps, 2) if is_whole else speed.choose_steps(within_s, kills)
            log.info("the steps' speed has been measured: the proof trains %d steps, twice", steps)
        straight = _Run(config, folder, "straight", [steps], is_whole=is_whole)
        straight.live(ranks[0], 0)
        kill_steps, chunks = choose_kills(steps, kills, min(straight.steps_per_epoch, steps // 2), random.Random(seed))
        resumed = _Run(config, folder, "resumed", chunks, is_whole=is_whole)
        compared: dict[str, Any] = {}
        try:
            for number, kill_at in zip(itertools.cycle(ranks), [*kill_steps, 0], strict=False):
                resumed.live(number, kill_at)
            compared["resumed"] = resumed.content_id
            if straight.content_id != resumed.content_id:
                payloads = straight.read_payload(), resumed.read_payload()
                compared |= find_difference((resumed.read_trail(), straight.read_trail()), payloads)
        except GateTripped as error:
            compared |= {"gate": error.message, "different": error.data.get("different", [])}
            compared |= find_difference((resumed.read_trail(), straight.read_trail()))
        return Proof(
            recipe=config.recipe, seed=seed, steps=steps, kills=kill_steps, chunks=chunks, ranks=list(ranks),
            resumed_from=resumed.resumed_from, is_whole=is_whole,
            straight=straight.content_id, **straight.describe(max(ranks)),
            **search(straight, resumed, is_equal=straight.content_id == compared.get("resumed")), **compared,
        )  # fmt: skip


def search(straight: "_Run", resumed: "_Run", *, is_equal: bool) -> dict[str, list[str]]:
    """Return the fields ``products``, ``lost`` and ``unchanged`` of a `Proof`.

    Args:
        is_equal: whether the runs end on the same bytes. If the bytes differ and a resume has lost a value, the
            values at the end aren't compared: other values may differ there because of the lost value.
    """
    lost = dict(resumed.lost)
    if is_equal or not lost:
        ends = find_suspects(straight.found, resumed.found if resumed.is_complete else [])
        lost |= {found.key: found for found in ends if found.key not in lost}
    unchanged = list_unchanged(straight.built, straight.found, [*lost.values()])
    found = {
        "products": [each for each in lost.values() if each.is_module],
        "lost": list(lost.values()),
        "unchanged": unchanged,
    }
    in_order = {name: leave_out_repeated(sorted(each, key=lambda one: one.order)) for name, each in found.items()}
    return {name: [*map(describe_found, each)] for name, each in in_order.items()}


def check_proof_ranks(config: RunConfig, ranks: Sequence[int], kills: int) -> None:
    """Check that equal bytes are promised on these numbers of ranks, and that the proof uses all of them.

    Raises:
        WrongUse: equal bytes aren't promised, or there are too few kills.
    """
    option = f"--ranks {','.join(map(str, ranks))}"
    if min(ranks) < 1:
        raise WrongUse(f"{option}: expected numbers from 1 on")
    if len({*ranks}) > 1 and not config.compute.is_rank_invariant:
        raise WrongUse(
            f"{option}: without virtual ranks, a different number of ranks may compute different bytes",
            hint="--set compute.virtual_ranks=8 gives the same bytes on 1 to 8 ranks; or give --ranks a single number, "
            "such as --ranks 2",
        )
    if len(ranks) > kills + 1:
        raise WrongUse(
            f"{option}: a run that is killed {kills} times is started {kills + 1} times, too few for {len(ranks)} "
            "different numbers of ranks",
            hint=f"raise --kills to {len(ranks) - 1}",
        )


class _Run:
    """One of the two runs of a proof (the straight or the killed one), with its journal."""

    def __init__(self, config: RunConfig, folder: str, name: str, chunks: list[int], *, is_whole: bool = False) -> None:
        log = Log(every=1, folder=f"{folder}/logs")
        # An epoch has at least one step, so this number of epochs suffices for all steps.
        epochs = config.epochs if is_whole else max(config.epochs, chunks[-1])
        self._longest_epoch = 0 if is_whole else chunks[-1] // 2
        self._own_epochs = config.epochs
        changed = {"store": folder, "run": name, "log": log, "epochs": epochs, "signing_key": None, "near": NearTier()}
        self._config = config.model_copy(update=changed)
        self._log = Path(folder) / "logs" / f"{name}.log"
        self._chunks = chunks
        self._journal = Journal(open_store(folder), name)
        self._present: Present | None = None
        self.steps_per_epoch = 0
        self.resumed_from: list[int] = []
        self.is_complete = False
        self.lost: dict[tuple[str, str], Found] = {}  # values that the resumes have lost, by key
        self._examined: list[Examined] = []
        self._at_commit: list[Found] = []  # the values outside the checkpoint that were found at the newest commit

    @property
    def content_id(self) -> str:
        return self._newest().checkpoint_sha256

    @property
    def built(self) -> list[Found]:
        """Return the values outside the checkpoint that were found before the first step."""
        return self._find(0)

    @property
    def found(self) -> list[Found]:
        """Return the values outside the checkpoint that were found after the last step."""
        return self._find(-1)

    def _find(self, index: int) -> list[Found]:
        return self._examined[index].unregistered if self._examined else []

    def describe(self, ranks: int) -> dict[str, Any]:
        """Return the fields of a `Proof` that describe the run.

        Args:
            ranks: the largest number of ranks in the proof.
        """
        assert self._present is not None
        examined, compute, environment = self._examined[0], self._config.compute, self._present.environment
        epoch, own_epoch = self.steps_per_epoch, examined.own_steps_per_epoch
        return {
            "looked_at": examined.looked_at,
            "config_fingerprint": self._present.fingerprint, "environment": environment,
            "steps_per_epoch": epoch, "own_steps_per_epoch": own_epoch,
            "epochs": self._config.epochs, "own_epochs": self._own_epochs,
            "not_reached": list_not_reached(
                self._chunks[-1], (epoch, own_epoch), (self._config.epochs, self._own_epochs), examined.events,
                ranks, compute.loader_workers, environment["device"],
            ),
        }  # fmt: skip

    def _newest(self) -> Commit:
        newest = self._journal.newest()
        assert newest is not None
        return newest

    def live(self, ranks: int, kill_at: int) -> None:
        """Start ranks, resume, and train and commit chunks up to the last step or the kill.

        Args:
            ranks: the number of ranks.
            kill_at: the step in which to kill the ranks; 0 for none.

        Raises:
            GateTripped: the resumed state isn't the saved one.
        """
        self._config = self._config.with_ranks(ranks)
        with Ranks(self._config, self._log, longest_epoch=self._longest_epoch) as started:
            line = self._resume(started)
            if not self._examined:
                self._examined.append(started.examine())
            for stop in self._chunks:
                if stop > (line.head.step if line.head else 0):
                    saved = self._train(started, line, stop, kill_at)
                    if saved is None:
                        return
                    line.commit(saved, "chunk")
                    if stop < self._chunks[-1]:
                        self._at_commit = started.examine().unregistered
                    log.info("%s: trained to step %d of %d", self._journal.run, stop, self._chunks[-1])
            self._examined.append(started.examine())
            self.is_complete = True

    def measure(self, ranks: int, within_s: float) -> Speed:
        """Start ranks, train until the last step or for at most ``within_s`` seconds, and return the measured speed."""
        began = time.monotonic()
        self._config = self._config.with_ranks(ranks)
        with Ranks(self._config, self._log, longest_epoch=self._longest_epoch) as started:
            self._resume(started)
            own_epoch = started.examine().own_steps_per_epoch
            assert self._present is not None
            started.train(self._chunks[-1], self._present.fingerprint, is_detailed=True)
            at = [(0, time.monotonic())]
            while at[-1][0] < self._chunks[-1] and (at[-1][0] < 2 or time.monotonic() - at[0][1] < within_s):
                if isinstance(event := started.next_event(), Progress):
                    at.append((event.step, time.monotonic()))
                elif isinstance(event, Saved):
                    break
        start_s, ended = at[0][1] - began, time.monotonic()
        known = at[1:] if len(at) > 2 else at  # omit the first step, which compiles and allocates
        took = [(now - then) / (step - last) for (last, then), (step, now) in itertools.pairwise(known) if step > last]
        step_s = statistics.median(took or [0.0])
        ends = max(known[-1][0] // self.steps_per_epoch, 1)
        epoch_s = max(known[-1][1] - known[0][1] - step_s * (known[-1][0] - known[0][0]), 0) / ends
        return Speed(ended - began, start_s, step_s, epoch_s, own_epoch, own_epoch * self._own_epochs)

    def _resume(self, ranks: Ranks) -> Line:
        built = ranks.expect(Ready)
        self._present = present = describe_present(self._config, built, None)
        self.steps_per_epoch = built.steps_per_epoch
        self._journal.begin(self._config.recipe)
        number = self._journal.next_attempt()
        self._journal.claim_attempt(number, "prove", "", os.getpid(), present.environment)
        self._journal.record_config(present.fingerprint, present.identity, self._config.model_dump(mode="json"))
        line = Line(self._journal, number, present.fingerprint, built.steps_per_epoch)
        line.resume(lambda commit: self._restore(ranks, commit))
        return line

    def _restore(self, ranks: Ranks, commit: Commit) -> HoldfastError | None:
        self.resumed_from.append(commit.step)
        event = ranks.restore(commit, Gate("exact"))
        if not isinstance(event, Problem) or isinstance(event, Tripped):
            suspects = find_suspects(self._at_commit, ranks.examine().unregistered)
            self.lost |= {found.key: found for found in suspects}
        if isinstance(event, Tripped):
            raise explain_refusal(event, commit)  # a real run would fall back to an older commit; a proof fails
        if isinstance(event, Problem):
            return event.error
        log.info("%s: continues from step %d", self._journal.run, commit.step)
        return None

    def _train(self, ranks: Ranks, line: Line, stop: int, kill_at: int) -> Saved | None:
        """Train a chunk and return its checkpoint; None if the ranks were killed in it."""
        assert self._present is not None
        if 0 < kill_at <= stop:
            # The kill may come late, after the end of this chunk. So let the ranks train up to the straight run's last
            # step, where the user's loop may end. They save into another folder, because the next ranks would adopt a
            # checkpoint in the run's own folder.
            elsewhere, step = f"{self._config.store}/{self._journal.run}-killed", 0
            ranks.train(self._chunks[-1], self._present.fingerprint, elsewhere, is_detailed=True)
            while step < kill_at:
                if isinstance(event := ranks.next_event(), Progress | Saved):
                    step = event.step
            ranks.signal(signal.SIGKILL)
            log.info("%s: SIGKILL in step %d", self._journal.run, step)
            return None
        ranks.train(stop, self._present.fingerprint, is_detailed=True)
        while not isinstance(event := ranks.next_event(), Saved):
            pass
        return event

    def read_trail(self) -> list[dict[str, Any]]:
        """Return the trail of all committed steps."""
        return read_run_trail(self._journal)

    def read_payload(self) -> checkpoint.Payload:
        """Return the newest commit's state."""
        return checkpoint.read_payload(self._journal.store, self._newest())
