"""Commands that train or restore to test: prove a recipe, audit a run's steps, evaluate a checkpoint."""

import secrets
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.attempt.progress import log_plain_lines
from holdfast.cli.trusting import open_trusted
from holdfast.config import load_config
from holdfast.errors import WrongUse
from holdfast.extending import find_view
from holdfast.journal import Commit, Journal
from holdfast.journal.finding import find_commit
from holdfast.journal.judgement import read_verdict
from holdfast.journal.verdict import OnFault
from holdfast.proof.audit import audit_commit, check_on_fault, choose_commits, follow_verdict, keep_audit
from holdfast.proof.evaluation import evaluate_commit
from holdfast.proof.prove import prove
from holdfast.proof.share import choose_by_share
from holdfast.terminal.options import Flag, Json, Set, TrustRecords, print_json


def prove_command(
    config: Path,
    /,
    *,
    steps: int | None = None,
    whole: Flag = False,
    within: timedelta = timedelta(minutes=2),
    kills: int = 3,
    seed: int | None = None,
    ranks: str = "",
    set_: Set = None,
    json: Json = False,
) -> int:
    """Train a run's first steps twice, straight and killed, and compare the bytes. Keep neither run.

    A proof shortens the run's epochs, so that its few steps cross an epoch's end, and lists what it didn't reach. With
    --whole it trains the whole run twice, with the run's own epochs.

    The exit code is 0 if the bytes are equal, and 2 if they differ.

    Args:
        config: The run's configuration, a TOML file.
        steps: The number of steps to train; by default as many as fit into the time, at least 20, and at most all
            steps of the run.
        whole: Train all steps of the run, with its own epochs, however long that takes.
        within: The approximate time for the whole proof: 90s, 2m, 1h.
        kills: How often SIGKILL ends the ranks.
        seed: The seed of the random chunks and kills; by default a new one each time.
        ranks: The numbers of ranks that train the run in turn, such as 1,2,4; by default the configuration's number.
            More than one number needs virtual ranks.
        set_: key=value: change a setting.
        json: Print JSON.
    """
    log_plain_lines()
    numbers, within_s = _read_numbers(ranks), within.total_seconds()
    proof = prove(load_config(config, set_ or []), steps, kills, seed, numbers, within_s, is_whole=whole)
    if json:
        print_json(proof.model_dump() | {"is_proved": proof.is_proved})
    else:
        print(proof)
    return 0 if proof.is_proved else 2


def _read_numbers(ranks: str) -> list[int]:
    """Return the numbers in a text such as ``1,2,4``; no numbers for an empty text.

    Raises:
        WrongUse: the text isn't such a list.
    """
    numbers = ranks.split(",") if ranks else []
    if not all(each.strip().isdecimal() for each in numbers):
        raise WrongUse(f"--ranks {ranks}: expected numbers of ranks, such as --ranks 1,2,4")
    return [int(each) for each in numbers]


def audit_command(
    run: str,
    /,
    *,
    commit: str = "",
    from_: Annotated[str, Parameter(name="--from")] = "",
    random: int | None = None,
    share: float | None = None,
    seed: int | None = None,
    ranks: int | None = None,
    on_fault: OnFault = "record",
    receipt: Path | None = None,
    key: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False)] = None,
    set_: Set = None,
    recipe: str = "",
    trust_records: TrustRecords = False,
    json: Json = False,
) -> int:
    """Train chunks of a run again, and compare the bytes.

    An audit begins with the checkpoint before its chunk. If the run was resumed from that checkpoint, the audit begins
    one checkpoint earlier, to check the resume too. Then all audits of the commit, on this host and others, decide
    whether the program or a machine gave different bytes. The store quarantines such a machine.

    The exit code is 2 if bytes differ that are promised to be equal on this machine, and 0 otherwise.

    Args:
        run: <store>/<run>; or the TOML file of your configuration of the run. Recipe, data, store and settings then
            come from this file, and the run's records are compared with it.
        commit: The commit's number, the name of its folder, or best; by default the newest.
        from_: An earlier commit to begin with; 0 for the beginning of the run.
        random: Audit this many commits instead, chosen at random.
        share: Spend at most this fraction of the run's training time on audits, such as 0.01; earlier audits count,
            too. The first audit is that of the newest commit that no different host has certified; the others are
            random. Unused time remains for later audits.
        seed: The seed of the random choice; by default a new one each time. The audits' records contain it.
        ranks: The number of ranks (training processes) of the audit; by default that of the run. A different number
            needs virtual ranks.
        on_fault: What to do if the audits name a machine that computes wrongly. record: only record the verdict.
            rollback: also quarantine the machine's first commit that no audit certifies, and all later commits, so that
            the run continues from the commit before. stop: hold the run: a live attempt ends at its next commit, and no
            new attempt begins until holdfast release.
        receipt: A file that holdfast receipt has written: check that the run has the commits that the receipt lists,
            and train 3 of their chunks again, or as many as --random says. Each must end with the same bytes.
        key: A trusted public key for the receipt: a PEM file, or env:NAME.
        set_: key=value: change a setting of your configuration.
        recipe: The recipe to use instead of the recorded one, as in a configuration. By default the recorded recipe is
            trained, but only if its code is in this folder or comes with Holdfast.
        trust_records: Train with the recorded recipe and settings, even if the code is elsewhere or a setting names
            a file or an address. Code in a file of a store is never run.
        json: Print JSON.
    """
    check_on_fault(on_fault)
    journal, trust = open_trusted(run, recipe, trust_records, set_ or [])
    journal.read_run()
    if receipt is not None:
        chosen = {"--commit": commit, "--from": from_, "--ranks": ranks, "--share": share}
        for name, value in (chosen | {"--on-fault": on_fault != "record"}).items():
            _refuse_both({"--receipt": receipt, name: value})
        if (audit_receipt := find_view("receipt")) is None:
            raise WrongUse("no installed extension can read receipts")
        return int(audit_receipt(journal, receipt, key or [], random, seed, trust, json=json))
    _refuse_both({"--from": from_, "--random": random, "--share": share})
    _refuse_both({"--commit": commit, "--random": random, "--share": share})
    if ranks is not None and ranks < 1:
        raise WrongUse(f"--ranks {ranks}: expected at least 1")
    start = int(from_) if from_.isdecimal() else find_commit(journal, from_).number if from_ else None
    is_random = random is not None or share is not None
    seed = (secrets.randbelow(2**31) if seed is None else seed) if is_random else None
    commits, said = _choose(journal, commit, random, share, seed or 0)
    if said and not json:
        print(said)
    audits, judged = [], []
    for each in commits:
        found = audit_commit(journal, each, start, ranks, trust)
        keep_audit(journal, found, seed, share)
        verdict = read_verdict(journal, each)
        audits.append(found)
        judged.append(
            found.model_dump() | {"is_identical": found.is_identical, "judged": verdict and verdict.to_json()}
        )
        is_followed = verdict is not None and verdict.kind == "machine"
        kept = follow_verdict(journal, verdict, on_fault).lines if verdict and is_followed else []
        if not json:
            shown = [verdict.spell(run)] if verdict else []
            print(found, *shown, *(f"  {line}" for line in kept), sep="\n")
    if json:
        print_json(judged)
    return 2 if any(found.is_failed for found in audits) else 0


def _refuse_both(options: Mapping[str, object]) -> None:
    """Raise WrongUse if more than one of these options is given."""
    given = [name for name, value in options.items() if value is not None and value is not False and value != ""]
    if len(given) > 1:
        raise WrongUse(f"{given[0]} and {given[1]} exclude each other")


def _choose(
    journal: Journal, commit: str, random: int | None, share: float | None, seed: int
) -> tuple[list[Commit], str]:
    """Return the commits to audit, and a line for a person about the choice; empty if the user named the commit."""
    if share is not None:
        if not 0 < share <= 1:
            raise WrongUse(f"--share {share:g}: expected a share of the training time, up to 1, such as --share 0.01")
        choice = choose_by_share(journal, share, seed)
        return choice.commits, str(choice)
    if random is None:
        return [find_commit(journal, commit)], ""
    if random < 1:
        raise WrongUse(f"--random {random}: expected at least 1")
    commits = choose_commits(journal, random, seed)
    if not commits:
        raise WrongUse(
            f"run {journal.run!r} has no commit that can be replayed",
            hint="raise retention.keep_last, then train a chunk: a replay begins at the checkpoint before the commit",
        )
    return commits, ""


def evaluate_command(
    run: str,
    commit: str = "",
    /,
    *,
    set_: Set = None,
    recipe: str = "",
    trust_records: TrustRecords = False,
    json: Json = False,
) -> None:
    """Restore a checkpoint with the checks that training makes, and evaluate it.

    Args:
        run: <store>/<run>; or the TOML file of your configuration of the run. Recipe, data, store and settings then
            come from this file, and the run's records are compared with it.
        commit: The commit's number, the name of its folder, or best; by default the newest.
        set_: key=value: change a setting of your configuration.
        recipe: The recipe to use instead of the recorded one, as in a configuration. By default the recorded recipe is
            built, but only if its code is in this folder or comes with Holdfast.
        trust_records: Build the recorded recipe with the recorded settings, even if the code is elsewhere or a
            setting names a file or an address. Code in a file of a store is never run.
        json: Print JSON.
    """
    journal, trust = open_trusted(run, recipe, trust_records, set_ or [])
    journal.read_run()
    found = evaluate_commit(journal, find_commit(journal, commit), trust)
    if json:
        print_json(found.model_dump())
    else:
        print(found)
