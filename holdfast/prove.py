"""Does a recipe survive? The same steps once straight and once killed and resumed, before a long run is begun."""

import logging
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from holdfast import checkpoint
from holdfast.attempt import Line
from holdfast.attempt.lineage import describe_present
from holdfast.audit import describe_difference
from holdfast.checkpoint import Saved
from holdfast.config import Log, RunConfig
from holdfast.errors import ConfigError, GateTripped, HoldfastError
from holdfast.journal import Commit, Journal
from holdfast.launch import Ranks, problem_in
from holdfast.replay import find_difference, read_run_trail
from holdfast.store import open_store

EXACT = {"how": "exact"}

log = logging.getLogger(__name__)


class Proof(BaseModel):
    """What `prove` found.

    Attributes:
        kills: the steps in which SIGKILL ended the ranks.
        chunks: the steps at which a chunk of the killed run ended.
        resumed_from: the steps whose checkpoints the killed run went on from, or should have.
        straight, resumed: the content ids; empty where the gate refused to resume.
        gate: why it refused.
        first_step, first_differs_in: where the runs part, and in what; where the gate refused, as far as it came.
        different: names of what differs at the end, or of what the gate found.
        environment: what all ran on.
    """

    model_config = ConfigDict(frozen=True)

    recipe: str
    config_fingerprint: str
    seed: int
    steps: int
    kills: list[int]
    chunks: list[int]
    resumed_from: list[int]
    straight: str
    resumed: str = ""
    gate: str = ""
    first_step: int | None = None
    first_differs_in: list[str] = []
    different: list[str] = []
    environment: dict[str, Any]

    @property
    def is_proved(self) -> bool:
        return self.straight == self.resumed

    @property
    def _differs_from_itself(self) -> bool:
        return self.first_step is not None and self.first_step <= min(self.resumed_from)

    def __str__(self) -> str:
        what = f"{self.steps} steps of {self.recipe}"
        killed = f"SIGKILL in step{'' if len(self.kills) == 1 else 's'} {', '.join(map(str, self.kills))}"
        if self.is_proved:
            lines = [f"proved: {what} end on the same bytes, straight and with {killed}, in {len(self.chunks)} chunks"]
        elif self.gate:
            lines = [f"not proved: {what}, with {killed}: the gate refuses to resume", f"  {self.gate}"]
            lines += describe_difference(self.first_step, self.first_differs_in, [])
        else:
            lines = [f"not proved: {what} end on other bytes with {killed}"]
            lines += describe_difference(self.first_step, self.first_differs_in, self.different)
        if self._differs_from_itself:
            lines.append("  that is before anything was resumed: the recipe differs from itself")
        facts = {"content id": self.straight, "settings": self.config_fingerprint, "ran on": self._machine()}
        facts["again with"] = f"--seed {self.seed} --steps {self.steps} --kills {len(self.kills)}"
        return "\n".join([*lines, *(f"  {name:12}{value}" for name, value in facts.items())])

    def _machine(self) -> str:
        known = self.environment
        gpus = ", ".join(gpu["name"] for gpu in known.get("gpus", [])) if known.get("device") == "cuda" else ""
        return f"torch {known['torch']}, {gpus or known['cpu']}, {known['system']}, threads: {known['threads']}"


def prove(config: RunConfig, steps: int, kills: int, seed: int | None = None) -> Proof:
    """Train ``steps`` steps twice in folders of their own: straight, and in random chunks with SIGKILL of the ranks.

    Args:
        kills: how many times; fewer if there are not so many steps.
        seed: what chooses chunks and kills; a random one if None.

    Raises:
        HoldfastError: the recipe can't be built, or fails.
    """
    if steps < 2 or kills < 1:
        raise ConfigError(f"--steps {steps} --kills {kills}: expected at least 2 steps and 1 kill")
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    choice = random.Random(seed)
    kill_steps = sorted(choice.sample(range(2, steps + 1), min(kills, steps - 1)))
    # Before each kill a chunk ends somewhere, so that there is something to resume from.
    chunks = sorted({steps, *(choice.randint(1, step - 1) for step in kill_steps)})
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        straight = _Run(config, folder, "straight", [steps])
        straight.live(0)
        resumed = _Run(config, folder, "resumed", chunks)
        found: dict[str, Any] = {
            "recipe": config.recipe, "config_fingerprint": straight.fingerprint, "seed": seed, "steps": steps,
            "kills": kill_steps, "chunks": chunks, "straight": straight.content_id,
            "environment": straight.environment,
        }  # fmt: skip
        try:
            for kill_at in [*kill_steps, 0]:
                resumed.live(kill_at)
        except GateTripped as error:
            found |= {"gate": error.message, "different": error.data.get("different", [])}
            trails = straight.read_trail(), resumed.read_trail()
            return Proof(**found, resumed_from=resumed.resumed_from, **find_difference(trails))
        found |= {"resumed": resumed.content_id, "resumed_from": resumed.resumed_from}
        if straight.content_id != resumed.content_id:
            trails = straight.read_trail(), resumed.read_trail()
            found |= find_difference(trails, (straight.read_payload(), resumed.read_payload()))
        return Proof(**found)


class _Run:
    """One of the two runs: a line of commits, and ranks that come and go."""

    def __init__(self, config: RunConfig, folder: str, name: str, chunks: list[int]) -> None:
        log = Log(every=1, folder=f"{folder}/logs")
        # So many epochs that the data doesn't end before the steps do.
        epochs = max(config.epochs, chunks[-1])
        changed = {"store": folder, "run": name, "log": log, "epochs": epochs, "signing_key": None}
        self._config = config.model_copy(update=changed)
        self._log = Path(folder) / "logs" / f"{name}.log"
        self._chunks = chunks
        self._journal = Journal(open_store(folder), name)
        self.fingerprint = ""
        self.environment: dict[str, Any] = {}
        self.resumed_from: list[int] = []

    @property
    def content_id(self) -> str:
        return self._newest().checkpoint_sha256

    def _newest(self) -> Commit:
        newest = self._journal.newest()
        assert newest is not None
        return newest

    def live(self, kill_at: int) -> None:
        """One life: resume, train chunks and commit them until the end, or until the kill; 0 for none.

        Raises:
            GateTripped: what was resumed isn't what was saved.
        """
        ranks = Ranks(self._config, self._log)
        try:
            line = self._resume(ranks)
            for stop in self._chunks:
                if stop > (line.head.step if line.head else 0):
                    saved = self._train(ranks, line, stop, kill_at)
                    if saved is None:
                        return
                    line.commit(saved, "chunk")
                    log.info("%s: trained to step %d of %d", self._journal.run, stop, self._chunks[-1])
        finally:
            ranks.end()

    def _resume(self, ranks: Ranks) -> Line:
        built = ranks.expect("ready")
        present = describe_present(self._config, built, {})
        self.fingerprint, self.environment = present.fingerprint, present.environment
        self._journal.begin(self._config.recipe)
        number = self._journal.attempts() + 1
        self._journal.claim_attempt(number, "prove", "", os.getpid(), present.environment)
        self._journal.record_config(self.fingerprint, present.identity, self._config.model_dump(mode="json"))
        line = Line(self._journal, number, self.fingerprint, built["steps_per_epoch"])
        line.resume(lambda commit: self._restore(ranks, commit))
        return line

    def _restore(self, ranks: Ranks, commit: Commit) -> HoldfastError | None:
        self.resumed_from.append(commit.step)
        problem = problem_in(ranks.restore(commit, EXACT))
        # A run would fall back to the checkpoint before; here the first refusal is the answer.
        if isinstance(problem, GateTripped):
            raise problem
        if problem is None:
            log.info("%s: goes on from step %d", self._journal.run, commit.step)
        return problem

    def _train(self, ranks: Ranks, line: Line, stop: int, kill_at: int) -> Saved | None:
        """The chunk's checkpoint; None if the ranks were killed in it."""
        is_fatal = 0 < kill_at <= stop
        # However late the kill comes, they have not saved the chunk: what was saved would be adopted.
        ranks.train(sys.maxsize if is_fatal else stop, self.fingerprint)
        while (event := ranks.next_event())["event"] != "saved":
            if is_fatal and event.get("step", 0) >= kill_at:
                ranks.signal(signal.SIGKILL)
                log.info("%s: SIGKILL in step %d", self._journal.run, event["step"])
                return None
        return Saved.model_validate(event)

    def read_trail(self) -> list[dict[str, Any]]:
        """The trail of all steps that count."""
        return read_run_trail(self._journal)

    def read_payload(self) -> checkpoint.Payload:
        """The newest state."""
        return checkpoint.read_payload(self._journal.store, self._newest())
