"""The audit of all runs of a store: `audit`, on a schedule or from Python."""

import logging
import random
import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any

import tasks.untracked  # noqa: F401

from pydantic import Field, NonNegativeInt, PositiveInt

from holdfast.errors import ConfigError, Damage, RunStopped
from holdfast.journal import Commit, Journal
from holdfast.journal.answers import describe_unanswered
from holdfast.journal.audits import list_audits
from holdfast.journal.judgement import list_waiting, read_verdict
from holdfast.journal.runs import list_runs
from holdfast.journal.verdict import AuditVerdict, OnFault
from holdfast.proof.audit import Audit, check_on_fault, choose_commits, follow_verdict
from holdfast.proof.share import choose_by_share
from holdfast.store import open_store
from tasks.auditing import PUT_BACK_S, ask_another, ask_elsewhere, audit_one, find_config, is_for_another
from tasks.reporting import report_audits
from tasks.served import served_flow

log = logging.getLogger("holdfast.audit")

Share = Annotated[float, Field(ge=0, le=1)]

# After this many audits of a commit, no further host is asked for an audit.
MOST_AUDITS = 8


@served_flow(name="audit", flow_run_name="audit {store}", retries=0, persist_result=False)
def audit(
    store: str,
    commits: PositiveInt = 1,
    share: Share = 0.0,
    seed: int | None = None,
    runs: PositiveInt | None = None,
    run: str = "",
    commit: NonNegativeInt = 0,
    from_commit: NonNegativeInt | None = None,
    tries: NonNegativeInt = 30,
    is_asked: bool = False,
    on_fault: OnFault = "record",
    configs: tuple[str, ...] = (),
) -> dict[str, list[Audit]]:
    """Train chunks of each run again, and compare the bytes. Write only records of audits and quarantines.

    If bytes differ, and the audits of the commit don't show whether the program or a machine is the cause, this flow
    schedules a new flow run of its deployment. There another host trains the steps again (a replay). If the
    worker's host has already trained the steps, this flow run goes back into the queue for a minute, at most `tries`
    times. After that, this host trains the steps once more. A machine that is found to compute
    wrongly is quarantined on the store.

    Args:
        store: The folder, or URL of a bucket's folder, that holds the runs.
        commits: How many commits of each run to audit, chosen at random. A run with fewer commits is audited whole.
        share: If above 0, it decides instead of `commits`: all audits of a run together may take this fraction of the
            run's training time, such as 0.01. The newest commit that isn't certified comes first, then others at
            random. Unused time remains for later audits.
        seed: The seed of these random choices; by default a new one each time. The audits' records contain it.
        runs: How many runs of the store to audit, chosen at random; by default all.
        run: The only run to audit.
        commit: The only commit of that run to audit; 0 to choose at random.
        from_commit: The commit from which the audit of `commit` begins to train; by default the audit chooses.
        tries: How often a replay for another host may be put back into the queue.
        is_asked: Whether an earlier audit has asked for this audit. If there is a verdict on the commit meanwhile,
            nothing is trained.
        on_fault: What to do besides the record if a machine has computed wrongly. rollback: quarantine the machine's
            first commit that no audit certifies, and all later commits, so that the run continues from the commit
            before. stop: hold the run. Then a live attempt ends at its next commit, and no new attempt begins until
            holdfast release.
        configs: Files of your configurations of runs, TOML, on the worker. A run that one of them names is trained with
            it. Of any other run the records are used, if the recipe is yours or Holdfast's, and if no setting names a
            file or an address.

    Raises:
        Damage: bytes differ that are promised to be equal, or a checkpoint is damaged. All runs were audited.
        RunStopped: a commit could not be audited for another reason. All other commits were audited.
    """
    if (commit or from_commit is not None or is_asked) and not (run and commit):
        raise ConfigError(
            "the flow audit has a commit, from_commit or is_asked, but not both run and commit",
            hint="set its parameters run and commit",
        )
    check_on_fault(on_fault)
    consequences = {"on_fault": on_fault, "configs": configs}
    if is_asked and not _is_ours(store, run, commit, from_commit, tries, consequences):
        return {}
    seed = secrets.randbelow(2**31) if seed is None else seed
    by_chance = {} if commit else {"seed": seed, "share": share or None}
    audits: dict[str, list[Audit]] = {}
    said: dict[str, list[str]] = {}
    damaged: list[str] = []
    failed: list[str] = []
    for journal, number in _choose(store, share or commits, seed, runs, run, commit):
        name = f"commit {number} of run {journal.run}"
        config = find_config(configs, store, journal.run)
        state = audit_one(store, journal.run, number, from_commit, **by_chance, config=config, return_state=True)
        found = state.result(raise_on_failure=False)
        if not isinstance(found, Audit):
            log.warning("%s was not audited: %s", name, found)
            said.setdefault(journal.run, []).append(f"commit {number} was not audited: {found}")
            (damaged if isinstance(found, Damage) else failed).append(name)
            continue
        audits.setdefault(journal.run, []).append(found)
        log.log(logging.WARNING if found.is_failed else logging.INFO, "run %s: %s", journal.run, found)
        if found.is_failed:
            damaged.append(name)
        _follow(store, journal, number, tries, consequences)
        verdict = _read_verdict(journal, number)
        said.setdefault(journal.run, []).append(
            f"{found}\n  {verdict.spell(journal.store.url)}" if verdict else str(found)
        )
    report_audits(store, said)
    _warn_of_verdicts(store, audits)
    if damaged:
        raise Damage(
            f"damaged, or trained again to different bytes: {', '.join(damaged)}",
            hint=f"to audit one commit again: holdfast audit {store}/<run> --commit <number>",
        )
    if failed:
        raise RunStopped(f"these commits were not audited: {', '.join(failed)}")
    return audits


def _warn_of_verdicts(store: str, runs: Iterable[str]) -> None:
    """Log the verdicts on these runs that nobody has answered, also those of earlier audits."""
    for run in runs:
        for line in describe_unanswered(Journal(open_store(store), run)):
            log.warning("run %s has a verdict without an answer: %s", run, line)


def choose_some(journals: list[Journal], most: int | None, seed: int | None) -> list[Journal]:
    """Return this many runs, chosen at random, in the order of their names; all runs for None."""
    if most is None or len(journals) <= most:
        return journals
    chosen = random.Random(seed).sample(journals, most)
    log.info("%d of %d runs are audited, chosen at random", most, len(journals))
    return sorted(chosen, key=lambda journal: journal.run)


def _choose(
    store: str, most: int | float, seed: int, runs: int | None, run: str, commit: int
) -> Iterator[tuple[Journal, int]]:
    """Yield the commits to audit, with their runs.

    Args:
        most: the limit for each run: an int limits the number of commits, a float the fraction of the training time.
    """
    found = open_store(store)
    for journal in [Journal(found, run)] if run else choose_some(list_runs(found), runs, seed):
        chosen = [commit] if commit else [each.number for each in _choose_of(journal, most, seed)]
        yield from ((journal, number) for number in chosen)


def _choose_of(journal: Journal, most: int | float, seed: int) -> list[Commit]:
    if isinstance(most, float):
        choice = choose_by_share(journal, most, seed)
        log.info("run %s: %s", journal.run, choice)
        return choice.commits
    chosen = choose_commits(journal, most, seed)
    if not chosen:
        log.info("run %s has no commit that can be replayed", journal.run)
    return chosen


def _is_ours(store: str, run: str, commit: int, start: int | None, tries: int, parameters: dict[str, Any]) -> bool:
    """Return whether this host should train the steps of an earlier audit again. If not, put the flow run back.

    Args:
        start: the commit from which the replay was to begin; None if the audit may choose.
        parameters: further parameters of the flow.
    """
    journal = Journal(open_store(store), run)
    verdict = _read_verdict(journal, commit)
    if verdict and (verdict.ask is None or verdict.ask.commit != commit):
        log.info("run %s: %s", run, verdict.describe())
        return False
    asked = replace(ask_elsewhere(journal, commit), from_commit=start)
    ask = verdict.ask if verdict and verdict.ask else asked
    if not is_for_another(ask, tries):
        return True
    if not tries or not ask_another(store, run, ask, tries - 1, parameters, PUT_BACK_S):
        said = verdict.describe() if verdict else f"commit {commit}: only {', '.join(ask.answered)} has trained it"
        log.warning("run %s: no further host has trained the commit again: %s", run, said)
    return False


def _follow(store: str, journal: Journal, commit: int, tries: int, parameters: dict[str, Any]) -> None:
    """Act on the verdict on a commit (`follow_verdict`), and queue the audits that are needed next.

    If the commit is certified, queue the audits that waited for this. Log the verdict if the audits and the run have
    computed different bytes, or if the parent must be audited first. Then queue an audit on another host if the verdict
    needs one, or if a rollback needs one to find a right commit. Without such a verdict do nothing.

    Args:
        parameters: further parameters of the flow.
    """
    on_fault: OnFault = parameters["on_fault"]
    verdict = _read_verdict(journal, commit)
    if verdict and verdict.kind == "certified":
        for line in follow_verdict(journal, verdict, on_fault).lines:
            log.warning("%s", line)
        for waiting in list_waiting(journal, commit):
            ask_another(store, journal.run, waiting, tries, parameters)
    if verdict is None or not (verdict.deviating or (verdict.ask and verdict.ask.commit != commit)):
        return
    log.warning("run %s, commit %d:\n%s", journal.run, commit, verdict)
    done = follow_verdict(journal, verdict, on_fault)
    for line in done.lines:
        log.warning("%s", line)
    ask = verdict.ask if len(list_audits(journal)[commit]) < MOST_AUDITS else None
    if done.ask:
        ask = replace(ask_elsewhere(journal, done.ask.commit), from_commit=done.ask.from_commit)
    if ask:
        ask_another(store, journal.run, ask, tries, parameters)


def _read_verdict(journal: Journal, commit: int) -> AuditVerdict | None:
    found = journal.find_commit(commit)
    return read_verdict(journal, found) if found else None


if __name__ == "__main__":  # earlier versions had this command, so say what replaces it
    sys.exit(
        "error: python -m flows.audit is gone\n"
        "hint: holdfast audit STORE/RUN audits a run; the flow audit, called from Python, audits every run of a store"
    )
