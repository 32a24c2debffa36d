"""Requeueing of a Slurm job: a command that ends before its run is complete queues its own job again.

Slurm itself queues a preempted job again only if the job still runs when its grace time ends. A run that saves in time
and exits would never continue.

=========================================  =========================================================================
what is known                              the job
=========================================  =========================================================================
the run is complete                        ends
a person pressed Ctrl-C                    ends
wrong use, damage, another job has the run ends: see `holdfast.journal.endings`
a budget is spent                          ends: see `holdfast.attempt.supervision`
the job still runs                         is queued again: neither its grace time nor its time limit has ended
Slurm ends it at its time limit            is queued again
Slurm ends it for another reason           ends: otherwise a job that `scancel` has cancelled would run again
=========================================  =========================================================================
"""

import contextlib
import contextvars
import logging
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

from holdfast.attempt.lineage import JOB
from holdfast.attempt.supervision import choose_wait_s
from holdfast.config import RunConfig
from holdfast.config.slurm import SlurmJob
from holdfast.errors import HoldfastError, RunStopped, StoreDenied, StoreError
from holdfast.extensions.slurm.table import Slurm
from holdfast.journal import Journal
from holdfast.journal.endings import ending_of
from holdfast.store import open_store
from holdfast.terminal import interrupt

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 10.0  # the timeout of one request to Slurm's controller
TRIES, TRY_AGAIN_S = 3, 1.0
# The states, with their reasons, in which a job may be queued again. `scancel` gives COMPLETING with the reason None.
RETURNING = (("RUNNING", None), ("COMPLETING", "TimeLimit"))
TRACKED = re.compile(r"^ProctrackType\s*=\s*proctrack/cgroup\s*$", re.M)
REQUEUE_HINT = "; #SBATCH --requeue in the batch file allows it"


@contextlib.contextmanager
def queued_again(config: RunConfig, settings: Slurm, job: SlurmJob) -> Iterator[None]:
    """Queue this process's Slurm job again if the block ends before the run is complete, and another attempt may help.

    With ``requeue = "off"`` it only logs that the job isn't queued again.
    """
    _begin_warning(config)
    journal = Journal(open_store(config.store), config.run)
    before, error = 0, None
    with contextlib.suppress(StoreError):
        before = journal.attempts()
    with interrupt.raised_once(config.resume.stop_within_s + TRIES * ANSWER_WITHIN_S):
        try:
            yield
        except BaseException as caught:
            error = caught
            raise
        finally:
            refusal = find_refusal(config, settings, journal, before, job, error)
            if refusal is None:
                _requeue(job)
            elif refusal:
                log.info("job %s is not queued again: %s", job.name, refusal)


def _begin_warning(config: RunConfig) -> None:
    """Ask Slurm, in a thread, whether a kill of this command would kill the ranks, too. If so, log what that costs."""
    run = contextvars.copy_context().run  # so that Prefect shows the log line with the attempt's flow run
    threading.Thread(target=run, args=(_warn_of_cgroups, config), name="slurm", daemon=True).start()


def _warn_of_cgroups(config: RunConfig) -> None:
    if not tracks_by_cgroups():
        return
    log.info(
        "this Slurm tracks processes by cgroups: a kill of this command also kills the ranks before they can save, so "
        "the steps since the last chunk's end would be lost; chunk.steps sets a chunk's length"
    )


def tracks_by_cgroups() -> bool:
    """Return whether Slurm kills all processes of a step when the step's command ends; False if Slurm doesn't answer.

    /proc/self/cgroup doesn't show that, because other plugins of Slurm create cgroups for a step, too.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ("scontrol", "show", "config"), capture_output=True, encoding="utf-8", errors="replace",
            timeout=ANSWER_WITHIN_S,
        )  # fmt: skip
        return TRACKED.search(done.stdout) is not None
    return False


def find_refusal(
    config: RunConfig, settings: Slurm, journal: Journal, before: int, job: SlurmJob, error: BaseException | None
) -> str | None:
    """Return, for the log, the reason why no further attempt may follow; None if a further attempt may follow.

    The reason is empty if the run is complete.

    Args:
        before: the number of the run's last attempt before this one.
        error: the error that ended the attempt; None if it ended without an error, for example after a notice that this
            machine will be taken away.
    """
    try:
        newest = journal.attempts()
        ended = journal.read_ending(newest) if newest > before else None
        if (ended is None and error is None) or (ended is not None and ended.reason == "completed"):
            return ""
        if settings.requeue == "off":
            return 'extensions.slurm.requeue = "off"'
        if isinstance(error, KeyboardInterrupt):
            return "Ctrl-C stopped the run"
        ending = ended.ending if ended else ending_of(error)
        if ending.row.raises or (isinstance(error, HoldfastError) and error.exit_code != RunStopped.exit_code):
            return f"a further attempt would end in the same way: {ending.row.meaning}"
        if ended is not None:
            choose_wait_s(journal.endings(), config.supervision)
            return None
        # Count the requeues here, because an attempt that never began records no ending for supervision to count.
        lives, most = job.restarts - _find_last_life(journal, newest, job), config.supervision.max_failures
        return (
            f"{lives} times in a row the job began no attempt: supervision.max_failures = {most}"
            if lives >= most
            else None
        )
    except StoreDenied as refused:
        return refused.message
    except StoreError:
        return None  # the store can't be reached now, but may be reachable after a requeue
    except HoldfastError as refused:
        return refused.message


def _find_last_life(journal: Journal, newest: int, job: SlurmJob) -> int:
    """Return the number of requeues of the job before it last began an attempt; -1 if it never began an attempt."""
    attempt = journal.find_attempt(newest) if newest else None
    began = attempt.lineage.get(JOB) if attempt else None
    return int(began["restarts"]) if isinstance(began, dict) and began.get("name") == job.name else -1


def _requeue(job: SlurmJob) -> None:
    """Ask Slurm for the job's state, and queue the job again if that state allows it."""
    before = signal.getsignal(signal.SIGTERM)
    # When Slurm queues a job again, it sends SIGTERM to all processes of the job, even to the scontrol command that
    # asked for the requeue. So ignore SIGTERM here; child processes inherit the setting.
    with contextlib.suppress(ValueError):  # signal.signal fails outside the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    found = _ask("squeue", "-h", "-j", job.name, "-O", "State:|,Reason:|")
    state, reason = [*(found or "").split("|"), "", ""][:2]
    if found is not None and not any(state == each and because in (None, reason) for each, because in RETURNING):
        seen = f"its state is {state} ({reason}), so a person has cancelled the job or queued it again"
        seen = seen if state else "squeue doesn't know it"
        log.info("job %s is not queued again by this command: %s", job.name, seen)
    elif found is not None and _ask("scontrol", "requeue", job.name, hint=REQUEUE_HINT) is not None:
        log.info("job %s is queued again; when it starts, it continues the run", job.name)
        return
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, before)


def _ask(*command: str, hint: str = "") -> str | None:
    """Return the output of one of Slurm's commands; None, after a warning, if it fails or doesn't answer in time."""
    problem = ""
    for number in range(TRIES):
        time.sleep(TRY_AGAIN_S if number else 0.0)
        try:
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", timeout=ANSWER_WITHIN_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
            continue
        if done.returncode == 0:
            return done.stdout.strip()
        problem = done.stderr.strip().replace("\n", "; ")
    log.warning("this job is not queued again: %s failed: %s%s", command[0], problem, hint)
    return None
