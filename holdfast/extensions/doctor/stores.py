"""The trial of a store: try each operation that a run needs, and name the missing rights."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict

from holdfast.errors import StoreDenied, StoreError
from holdfast.extending import find_view
from holdfast.extensions.doctor.trials import Trial, Trials
from holdfast.journal import Record
from holdfast.store import open_store
from holdfast.terminal import counted
from holdfast.terminal.options import print_json

# The tolerated difference of a storage's clock, in seconds. It is above 0, because a request takes time and S3 gives
# times in whole seconds.
CLOCK_S = 2.0


def try_store(store: str, *, json: bool) -> int:
    """Try each operation that a run needs on a store, print the results, and return the exit code.

    The trials write files in a new folder, which is deleted at the end.

    Args:
        json: print JSON.
    """
    trials, done = Trials(open_store(store)), []
    interrupted = True
    try:
        for trial in trials.run():
            done.append(trial)
            if not json:
                print(_describe(trial), flush=True)
        interrupted = False
    finally:
        if left := trials.clean(interrupted=interrupted):
            print(f"not deleted: {left}; delete it yourself", file=sys.stderr)
    is_good = all(trial.is_good for trial in done) and not left
    machines = _list_machines(trials)
    if json:
        print_json({"ok": is_good, "store": trials.store.url, "clock_s": trials.clock_s,
                    "trials": [asdict(trial) for trial in done],
                    "machines": [machine.model_dump() for machine in machines]})  # fmt: skip
    else:
        print("\n".join([*_conclude(trials, done), *(f"quarantined: {machine}" for machine in machines)]))
    return 0 if is_good else StoreDenied.exit_code


def _list_machines(trials: Trials) -> list[Record]:
    """Return the machines in the store's quarantine; none if the store can't be read, which the trials report."""
    list_quarantined = find_view("machines")
    with contextlib.suppress(StoreError):
        return list_quarantined(trials.store) if list_quarantined else []
    return []


def _describe(trial: Trial) -> str:
    told = f"{1000 * trial.seconds:.0f} ms" if trial.outcome == "ok" else trial.message
    if trial.rights:
        told = f"{' or '.join(trial.rights)} is missing: {told}"
    line = f"{trial.verb:15}  {trial.outcome:11}  {told}"
    return f"{line}\n{'':28}  hint: {trial.hint}" if trial.hint else line


def _conclude(trials: Trials, done: list[Trial]) -> Iterator[str]:
    yield ""
    clock_s = trials.clock_s
    if clock_s is not None and abs(clock_s) > CLOCK_S:
        yield f"the storage's clock is {abs(clock_s):.0f} s {'ahead' if clock_s > 0 else 'behind'}"
    missing = sorted({right for trial in done for right in trial.rights if len(trial.rights) == 1})
    if missing:
        yield f"missing: {', '.join(missing)}"
    bad = [trial.verb for trial in done if trial.outcome in ("denied", "failed")]
    untried = [trial.verb for trial in done if trial.outcome == "not tried"]
    if bad:
        also = f", and {counted(len(untried), 'operation')} could not be tried" if untried else ""
        yield f"a run can't use {trials.store.url}: {counted(len(bad), 'operation')} failed{also}"
    else:
        yield f"a run can use {trials.store.url}"
