"""The command ``doctor``: test whether this machine repeats bits, show the conditions of equal bits, or try a store."""

import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.attempt.lineage import read_environments
from holdfast.config import Compute, Determinism
from holdfast.errors import WrongUse
from holdfast.extending import find_view
from holdfast.extensions.doctor.examination import (
    Examination,
    Finding,
    examine,
    judge_gpus,
    judge_libraries,
    judge_records,
)
from holdfast.extensions.doctor.stores import try_store
from holdfast.journal import AttemptRecord, Journal
from holdfast.journal.configs import read_config
from holdfast.journal.finding import open_journal
from holdfast.machine.contract import LIMITS, TERMS, Verdict, judge, part_of, terms_on
from holdfast.machine.gpus.report import read_report
from holdfast.machine.libraries import find_installed
from holdfast.provenance.packages import find_versions
from holdfast.store import open_store
from holdfast.terminal import counted
from holdfast.terminal.options import Json, print_json

MARKS = {True: "good", False: "wrong", None: "seen"}
SHOWN_WORDS = 3
VALUE_CHARS = 33
LINE_CHARS = 100


def doctor(
    run: Annotated[str, Parameter(show_default=False)] = "",
    /,
    *,
    store: str | None = None,
    release: str = "",
    json: Json = False,
) -> int:
    """Show the properties of this machine on which a run's bits depend, and the GPUs' health; measure whether
    equal steps compute equal bits.

    With --store, try a store instead. The exit code is 3 if a run can't use the store.

    Args:
        run: <store>/<run>, to check whether it would continue here with the same bits.
        store: A folder or URL that will hold runs: try each operation that a run needs, in a new folder that is deleted
            again, and name missing rights. Then list the machines in the store's quarantine.
        release: With --store, release this machine from the store's quarantine instead, once it is repaired.
        json: Print JSON.
    """
    if release:
        return _release(store, release, json=json)
    if store is not None:
        return try_store(store, json=json)
    journal = open_journal(run) if run else None
    attempt = _newest_attempt(journal) if journal else None
    determinism, compute = _read_settings(journal) if journal else (Determinism(), Compute())
    examination = examine(determinism, compute.device)
    gpus = judge_gpus(read_report(), compute, len(examination.environment["gpus"]))
    libraries = judge_libraries(find_installed())
    verdict = None
    if journal and attempt:
        present = _with_packages(attempt, examination)
        verdict = judge(attempt.environment, present)
        recorded = judge_records(read_environments(journal, attempt.number), present)
        examination = replace(examination, findings=(*examination.findings, recorded))
    is_good = examination.is_good and all(gpu.is_good is not False for gpu in gpus)
    if json:
        known = {
            "ok": is_good,
            "gpus": [asdict(gpu) for gpu in gpus],
            "libraries": [asdict(library) for library in libraries],
        }
        print_json(_to_json(examination, attempt, verdict) | known)
    else:
        if attempt and verdict:
            _print_verdict(run, attempt, verdict)
        else:
            _print_contract(examination.environment)
        _print_rest(examination, gpus, libraries)
    return 0 if is_good else 2


def check_earlier(store: str, /, *, json: Json = False) -> int:
    """Try a store; the present command is holdfast doctor --store STORE."""
    print("holdfast check is now holdfast doctor --store STORE", file=sys.stderr)
    return try_store(store, json=json)


def _release(store: str | None, host: str, *, json: bool) -> int:
    """Release a machine from a store's quarantine; return the exit code."""
    if store is None:
        raise WrongUse(f"--release {host} needs --store", hint=f"holdfast doctor --store STORE --release {host}")
    if (release_machine := find_view("release")) is None:
        raise WrongUse("no installed extension can quarantine or release machines")
    record = release_machine(open_store(store), host)
    if json:
        print_json(record.model_dump())
    else:
        print(f"{host} is released: runs of {store} train on it again")
    return 0


def _with_packages(attempt: AttemptRecord, examination: Examination) -> dict[str, Any]:
    """Return this machine's environment, with the versions here of the packages that the attempt's recipe imported."""
    return {**examination.environment, "packages": find_versions(attempt.environment.get("packages", {}))}


def _newest_attempt(journal: Journal) -> AttemptRecord:
    journal.read_run()
    number = journal.attempts()
    if not number:
        raise WrongUse(
            f"run {journal.run!r} has no attempt yet", hint="to examine this machine without a run: holdfast doctor"
        )
    return journal.read_attempt(number)


def _read_settings(journal: Journal) -> tuple[Determinism, Compute]:
    """Return the run's last settings of determinism, device and ranks; the defaults if the settings were lost."""
    if config := read_config(journal):
        return config.determinism, config.compute
    journal.warn("the run's settings can't be read, so this machine is examined with the default settings")
    return Determinism(), Compute()


def _to_json(examination: Examination, attempt: AttemptRecord | None, verdict: Verdict | None) -> dict[str, Any]:
    environment = examination.environment
    return {
        "environment": environment,
        "contract": [asdict(term) | {"here": _show(part_of(term, environment))} for term in TERMS],
        "limits": [asdict(limit) for limit in LIMITS],
        "measured": [asdict(finding) for finding in examination.findings],
        "attempt": attempt.model_dump() if attempt else None,
        "verdict": asdict(verdict) if verdict else None,
    }


def _print_contract(environment: dict[str, Any]) -> None:
    device = environment["device"]
    terms = terms_on(device)
    counting = {term.key for term in terms}
    others = dict.fromkeys(term.key for term in TERMS if term.key not in counting)
    print("a run continues elsewhere with the same bits if all of this is equal there:\n")
    _print_columns((term.key, _shorten(part_of(term, environment)), term.why) for term in terms)
    print("\nthe second machine may differ in:\n")
    _print_columns([(", ".join(["the host", *(term.free for term in terms if term.free), *others]),)])


def _print_verdict(run: str, attempt: AttemptRecord, verdict: Verdict) -> None:
    claim = f"run {run} continues here with the same bits as on {attempt.host}, where attempt {attempt.number} ran"
    if verdict.promise == "identical":
        print(f"identical: {claim}")
        return
    print(f"not promised: that {claim}\n")
    _print_columns((reason,) for reason in verdict.reasons)
    print("\nholdfast doctor, without a run, gives the reason for each line")


def _print_rest(examination: Examination, gpus: Iterable[Finding], libraries: Iterable[Finding]) -> None:
    device = examination.environment["device"]
    threads = counted(examination.environment["threads"], "thread")
    print("\nnot promised anywhere:\n")
    _print_columns((limit.text,) for limit in LIMITS if device in limit.on)
    print("\nGPUs:\n")
    _print_findings(gpus)
    print("\nlibraries:\n")
    _print_findings(libraries)
    print(f"\nmeasured here, on {device}, in fresh processes with {threads}:\n")
    _print_findings(examination.findings)
    if not examination.is_good:
        print("\nequal steps don't give equal bits here, so no run can be continued or repeated with equal bits")


def _print_findings(findings: Iterable[Finding]) -> None:
    _print_columns((MARKS[finding.is_good], finding.what, finding.seen) for finding in findings)


def _print_columns(rows: Iterable[tuple[str, ...]]) -> None:
    """Print indented rows, with columns as wide as their longest cell; wrap the last column at the terminal's edge.

    Break lines only between words, so that a reader can search for every name and copy it.
    """
    rows = list(rows)
    *widths, _ = (min(VALUE_CHARS, max(map(len, column))) for column in zip(*rows, strict=True))
    line_chars = min(shutil.get_terminal_size((LINE_CHARS, 0)).columns, 120)
    widths.append(max(line_chars - sum(width + 2 for width in widths) - 2, 20))
    for row in rows:
        texts = [cell if cell.isprintable() else repr(cell) for cell in row]
        cells = [
            textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
            for text, width in zip(texts, widths, strict=True)
        ]
        for line in zip_longest(*cells, fillvalue=""):
            print("  " + "  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip())


def _shorten(part: Any) -> str:
    if isinstance(part, frozenset) and len(part) > SHOWN_WORDS:
        return f"{' '.join(sorted(part)[:SHOWN_WORDS])} and {len(part) - SHOWN_WORDS} more"
    return _show(part)


def _show(part: Any) -> str:
    if isinstance(part, dict):
        return " ".join(f"{name}={value}" for name, value in part.items()) or "none is set"
    if isinstance(part, frozenset):
        return " ".join(sorted(part))
    return "not known" if part is None else str(part)
