"""An attempt's ranks: start the ranks, restore a commit into them, replace them if they die."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.attempt.ahead import RanksAhead, find_ahead, name_log, start_ranks
from holdfast.attempt.lineage import (
    Ancestor,
    Past,
    Present,
    ReadMetadata,
    begin_from_ancestor,
    check_same_build,
    choose_gate,
    describe_present,
    explain_unfit,
    find_ancestor,
    judge_environment,
)
from holdfast.attempt.refusing import CHANCE, explain_refusal, is_unexplained
from holdfast.checkpoint import shorten
from holdfast.config import RunConfig
from holdfast.errors import IN_LOG, ConfigError, HoldfastError, RecipeError, StateError
from holdfast.journal import Commit, Journal, format_time
from holdfast.machine.gpus.checks import check_gpus
from holdfast.machine.heartbeats import Beat
from holdfast.machine.host import name_host
from holdfast.machine.processes import find_free_memory, measure_memory
from holdfast.provenance.imports import find_file
from holdfast.provenance.sources import hash_sources
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Problem, Ready, Restored
from holdfast.rank.process import find_node
from holdfast.rank.spawn import describe_rank_wait
from holdfast.recipe.function import split_recipe
from holdfast.recipe.probe import Gate
from holdfast.terminal import counted

log = logging.getLogger(__name__)

# After each hang, the time limits of the next ranks grow by this factor. So a step that is slow only once in each
# process, for example because it compiles, isn't killed again and again.
PATIENCE = 4.0
# The memory that new ranks may need, as a multiple of the running ranks' memory: their restore reads a checkpoint.
ROOM = 1.5
SHOWN_MODULES = 3
# The beginning of a line about ranks that start beside the running ranks.
REHEARSAL = "a rehearsal starts new ranks on all nodes: "


class Uncommitted(NamedTuple):
    """A checkpoint that no commit names, in the form in which ranks restore it.

    Attributes:
        commit: the checkpoint in the form of a commit.
        folder: the folder of the checkpoint in the run's folder.
        read_metadata: returns the checkpoint's metadata for the commit.
    """

    commit: Commit
    folder: str
    read_metadata: ReadMetadata


# Replaces the ended ranks by new ranks, and restores a checkpoint into them: the newest commit; or, given a commit, the
# state before this commit's steps; or a checkpoint that no commit names.
Renew = Callable[[Commit | Uncommitted | None], None]


class AttemptRanks:
    """The ranks of one attempt: `build` starts them, `build_again` replaces them, `end` ends them.

    Attributes:
        given: the configuration as the attempt got it, without the run's skip list.
        config: the run's configuration; its number of ranks is settled when the ranks are started.
        ahead: a holder for ranks that are started before they are needed.
        running: the running ranks; None before `build`, after `end`, and after they died.
        built: the ranks' description of the training that they have built.
        present: the settings, code and machine that the ranks train with.
        ancestor: the checkpoint of another run that this run begins with; None if it begins with its own weights.
        restart_s: the seconds from the start of the running ranks until they began to train; 0 before that.
        verified: the number of the last commit whose bytes on the store were verified in this attempt; 0 for none.
        hangs: how many times in a row ranks hung, without a save in between.
        is_quiet: whether builds and restores are left out of the log: True during a rehearsal.
        tolerance: the relative difference that is allowed between the ranks' numbers and those of other ranks that
            continue from the same commit; None if settings or code were changed, so that nothing can be compared.
    """

    present: Present
    built: Ready

    def __init__(self, config: RunConfig, journal: Journal, number: int) -> None:
        self.config = self.given = config
        self._journal = journal
        self._number = number
        self.restart_s = 0.0
        self.running: Ranks | None = None
        # The newest commit's fingerprint. The attempt judges before its claim whether bit-exactness is promised from
        # this commit on. `restore` judges any other commit.
        self._judged = ""
        self.ancestor: Ancestor | None = None
        self.verified = 0
        self.hangs = 0
        self._aside: Ranks | None = None
        self._aside_restart_s = self._beside_within_s = 0.0
        self._beside_gives_up: Callable[[], bool] = lambda: False
        self.is_quiet = False
        self.ahead = RanksAhead()
        self.tolerance: float | None = None
        self._warned: set[str] = set()

    @property
    def own(self) -> Ranks:
        """Return the running ranks."""
        assert self.running is not None
        return self.running

    def build(self, newest: Commit | None) -> None:
        """Start the attempt's first ranks, and wait until they have built the recipe.

        Args:
            newest: the commit that will probably be restored; the ranks begin to read its checkpoint early.
        """
        self.ahead = find_ahead(self.config) or self.ahead
        self._start(newest)
        self._judged = newest.config_fingerprint if newest else ""
        self.ancestor = find_ancestor(self._journal, self.config.store, self.config.init_from, newest)
        self.present = describe_present(self.config, self.built, self.ancestor)

    def build_again(self, head: Commit | None) -> None:
        """Replace the ended ranks by new ranks.

        Raises:
            ConfigDrift: the new ranks build a different training than the first ranks, for example because the code was
                edited, and the change is not accepted.
        """
        self._start(head)
        present = describe_present(self.config, self.built, self.ancestor)
        check_same_build(self.present, present, self.config.resume.accept_drift)
        self.present = present

    def _start(self, newest: Commit | None) -> None:
        self.restart_s = 0.0
        compute = self.config.compute
        if node := find_node(compute):
            raise ConfigError(
                f"node {node} can't run an attempt: only node 0 can", hint=f"start node {node} with holdfast train"
            )
        if compute.has_rendezvous or compute.has_cluster:
            log.info("%s%s", REHEARSAL if self._aside is not None else "", describe_rank_wait(compute))
        self.running = self.ahead.take(self.config, self._number, newest)
        if self.running is None:
            self.running = start_ranks(self.config, self._number, newest, patience=PATIENCE**self.hangs)
        if self._aside is not None:
            self.running.answer_within(self._beside_within_s)
            self.running.gives_up = self._beside_gives_up
            self.running.wake()  # `gives_up` may have become true before these ranks could be woken
        try:
            gpus = self._check_gpus(self.running)  # checked while the ranks import torch, which takes seconds
            self.built = self.running.expect(Ready)
        except BaseException as error:
            if isinstance(error, RecipeError) and error.hint == IN_LOG:
                error.hint = f"the traceback is in {name_log(self.config, self._number)}"
            self.end_running()
            raise
        if gpus and self.built.device.startswith("cpu"):
            log.warning("nvidia-smi lists %s, but torch sees none: training runs on the CPU", counted(gpus, "GPU"))
        for warning in self.built.warnings if not self.is_quiet else ():
            log.warning("%s", warning)
        for note in (*self.built.notes, *self.built.hints) if self._number == 1 else ():
            log.info("%s", note)

    @property
    def host(self) -> str:
        """The name of this machine, as an attempt's record has it."""
        return name_host()

    def warn(self, warnings: Sequence[str]) -> None:
        """Log the warnings of a save, or of a rehearsal, that this attempt hasn't logged before."""
        for warning in warnings:
            if warning not in self._warned:
                log.warning("%s", warning)
        self._warned |= {*warnings}

    def _check_gpus(self, ranks: Ranks) -> int:
        """Check the GPUs that these ranks take, and return their number. On an error, end the ranks at once."""
        if self.config.compute.has_cluster:
            return 0  # with several nodes, each node checks its own GPUs
        try:
            return check_gpus(self.config.compute)
        except HoldfastError:
            ranks.end(within_s=0.0)
            raise

    def restore(self, commit: Commit, read_metadata: ReadMetadata, aside: str = "") -> HoldfastError | None:
        """Restore a commit's state; return an error if the checkpoint is damaged or the gate refuses it.

        If the gate refuses a commit whose bytes verify, and health isn't the reason, restore the commit again in new
        ranks: an error of the program occurs again, and an error of the machine probably doesn't. The same ranks can't
        repeat the restore, because the first restore has called the model, which may have changed a global variable.

        Args:
            aside: the folder of a checkpoint for a rehearsal, which the commit describes; see `Aside`.

        Raises:
            DeterminismError: bit-exactness isn't promised from this commit on, and the configuration refuses that.
            StateError: the state doesn't fit the training that the ranks have built.
            ConfigDrift: the state doesn't fit because of a change that was accepted.
        """
        past = Past.read(self._journal, commit, read_metadata)
        if commit.config_fingerprint != self._judged:  # this commit, maybe an adopted one, is not the one judged before
            judge_environment(past, self.present, self.config.resume)
        event = self._look(commit, past, aside)
        if is_unexplained(event):
            if self.config.compute.is_attached:  # ranks of another launcher can't be replaced
                return explain_refusal(event, commit)
            log.warning("the gate refuses checkpoint %s: %s; new ranks check it again", commit.path, event.message)
            self.end_running()
            self.build_again(commit)
            event = self._look(commit, past, aside)
            if is_unexplained(event):
                return explain_refusal(event, commit)
            log.warning(CHANCE, commit.path)
        if isinstance(event, Problem):
            return event.error
        if not self.is_quiet:
            log.info("restored%s: %s", " from near copies" if event.near else "", event.summary)
            for name in event.taken_over:
                log.info("the changed %s applies from step %d on", name, event.step)
        if event.near_problem:
            log.warning("%s; the checkpoint was read from the store instead", event.near_problem)
        # A restore from a near copy (a copy on the node's disk, see `checkpoint.near`) doesn't verify the store's
        # bytes. So the upkeep after the next commit reads the store's bytes back.
        if not aside:
            self.verified = 0 if event.near else commit.number
        if event.note:
            asked = "proof.rehearse" if self.tolerance is not None else "settings or code were changed"
            log.warning("%s; this is recorded, not refused, because of: %s", event.note, asked)
        return None

    def _look(self, commit: Commit, past: Past, aside: str) -> Restored | Problem:
        """Restore a commit into the running ranks, and check it with the gate."""
        gate = choose_gate(past, self.present, self.config.resume)
        self.tolerance = None if gate.how == "record" else gate.tolerance
        if self.config.proof.rehearse == "record":
            gate = Gate("record")
        try:
            return self.own.restore(commit, gate, aside)
        except StateError as error:
            raise explain_unfit(error, past, self.present, self.config.resume) from error

    def begin_from_ancestor(self) -> None:
        """Load the weights of the ancestor, if the run has one.

        Raises:
            CheckpointDamaged: the ancestor's bytes aren't the bytes that were committed.
        """
        found = self.ancestor
        if found is not None:
            offset, content_id = begin_from_ancestor(self.own, found), found.checkpoint_sha256[:12]
            origin = f"run {found.run}, commit {found.commit} ({content_id})"
            origin = origin if found.commit else f"{found.run} ({content_id})"
            log.info(
                "the run begins with the weights of %s; its anneals begin at step %d of their schedules", origin, offset
            )

    @property
    def began_at(self) -> str:
        """Return the time at which the running ranks were started, in the format of records."""
        return format_time(time.time() - (time.monotonic() - self.own.began))

    def read_beats(self) -> Mapping[int, Beat]:
        """Return the heartbeat of each running rank of this machine, by rank. May be called from any thread."""
        ranks = self.running
        return ranks.heartbeats.read() if ranks is not None else {}

    def note_training(self) -> None:
        """Record that these ranks are about to train. The first call sets `restart_s`."""
        self.restart_s = self.restart_s or time.monotonic() - self.own.began

    def end(self) -> None:
        """End all ranks of the attempt: the running ranks, the ranks set aside, and the ranks started ahead."""
        self.ahead.end()
        self.end_aside()
        self.end_running()

    def end_running(self) -> None:
        """End the ranks that train. If they are new and there is no time to wait, kill them at once."""
        if self.running is not None:
            if self._aside is not None and self._beside_gives_up():
                self.running.end(within_s=0.0)
            else:
                self.running.end()
            self.running = None

    # ---- a second set, for a rehearsal

    def start_ahead(self) -> None:
        """Start the next ranks. They import torch, but use no device until they replace the running ranks."""
        compute = self.config.compute
        if not (compute.has_nodes or compute.has_cluster or compute.is_attached):
            self.ahead.start(self.config, self._number, None, is_held=True)

    def has_room(self) -> bool:
        """Return whether this machine's memory has room for a second set of ranks; always False on a GPU."""
        compute = self.config.compute
        if not self.built.device.startswith("cpu") or compute.has_nodes or compute.has_cluster:
            return False
        return ROOM * measure_memory(self.own.list_pids()) < find_free_memory()

    def set_aside(self, within_s: float, gives_up: Callable[[], bool]) -> None:
        """Keep the running ranks waiting, so that new ranks can be started beside them.

        Args:
            within_s: the seconds in which the new ranks have to start and to restore a checkpoint. They may wait
                forever for a resource that the running ranks hold, such as a lock.
            gives_up: called repeatedly while the new ranks start; returns whether to stop waiting for them.
        """
        self._beside_gives_up = gives_up
        self._aside, self.running = self.running, None
        self._beside_within_s = within_s
        self._aside_restart_s = self.restart_s

    def put_back(self) -> None:
        """If ranks were set aside, end the running ranks and continue with the ranks that were set aside."""
        if self._aside is not None:
            self.end_running()
            self.running, self._aside = self._aside, None
            self.restart_s = self._aside_restart_s

    def end_aside(self) -> None:
        """End the ranks that were set aside, if there are any."""
        if self._aside is not None:
            self._aside.end()
            self._aside = None

    def find_changed_code(self) -> str:
        """Return the names of the modules and files that have changed since the ranks recorded them; empty if none."""
        saved = self.present.environment.get("sources", {})
        folder = Path(find_file(split_recipe(self.config.recipe)[0])).resolve().parent
        current = hash_sources(saved, folder)
        return shorten([name for name in sorted(current) if current[name] != saved[name]], SHOWN_MODULES)
