"""The verdict on a commit whose steps were trained several times: which machine, or the program, gave wrong bytes.

The functions here depend only on records, which `holdfast.journal.judgement` reads. Bytes that at least two hosts have
produced are right.

=====================================================================  ================================================
trainings of the commit's steps, the run's own training included       verdict
=====================================================================  ================================================
all end on the commit's bytes, on two hosts                            certified
all end on the commit's bytes, on one host                             undecided: another host has to train them; or, if
                                                                       the gate refused the parent, the parent is judged
some end on different bytes, where equal bytes aren't promised             judged without these; drift if none is left
two hosts end on the same bytes, and one host on different bytes           machine: that host
two hosts end on the same bytes, and two hosts on different bytes          program
two pairs of hosts end on the same bytes each                          program
two hosts, which end on different bytes                                undecided: a third host trains, or both do again
two hosts, of which neither repeats its own bytes                      program
three hosts, of which no two end on the same bytes                     program
one host, which ends on different bytes three times                    program
=====================================================================  ================================================

A replay that begins before the commit's parent trains the parent's steps again, too, without the run's resumes. So a
difference may be the fault of a resume. The replay proves a machine's fault only if another replay began with the same
commit, or if the run wasn't resumed between these steps.

If a parent is certified but the gate (the checks before a resume) refuses it, the parent's bytes are right and its
probe (the results that the gate compares) is wrong. Either a machine has computed the probe wrongly, or a rank that
saves nothing held different values.
`holdfast.journal.judgement` then asks for a replay from before the parent.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.journal.records import AttemptRecord, AuditRecord, Commit
from holdfast.journal.trainers import OTHER_NODE, list_machines

Kind = Literal["certified", "undecided", "machine", "program", "drift"]
# What a user asks for if audits find that a machine has computed wrongly.
OnFault = Literal["record", "rollback", "stop"]

# The number of trainings on a single host that must all differ before the verdict is ``program``. Fewer aren't enough,
# because the host may be faulty itself.
DISTINCT = 3
# The largest number of hosts that a message names.
MOST_NAMED = 4
_RANK = re.compile(r" of rank (\d+)")


@dataclass(frozen=True)
class Ask:
    """The replay that would decide an undecided verdict.

    Attributes:
        commit: the number of the commit to replay.
        from_commit: the commit from which to begin; None if the audit may choose.
        answered: the hosts that have already trained the steps. The replay should run on a different host.
        repeat: the hosts on which to run the replay again if there is no further host.
    """

    commit: int
    from_commit: int | None = None
    answered: tuple[str, ...] = ()
    repeat: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.spell("RUN")

    def spell(self, run: str) -> str:
        """Return the command that replays the commit, and on which host to run it.

        Args:
            run: <store>/<run>.
        """
        begin = "" if self.from_commit is None else f" --from {self.from_commit}"
        there = f"on a host other than {_name(self.answered, 'or')}" if self.answered else "on another host"
        again = f"; if there is none, once more on {' and on '.join(self.repeat)}" if self.repeat else ""
        return f"holdfast audit {run} --commit {self.commit}{begin} {there}{again}"


@dataclass(frozen=True)
class AuditVerdict:
    """The verdict on a commit; see the table above.

    Attributes:
        reason: a sentence with the hosts and the results of their trainings.
        ask: the replay that would decide; None unless the kind is ``undecided``.
        host: the faulty machine; empty unless the kind is ``machine``.
        is_own: whether the commit's own bytes are wrong.
        gpus: the UUIDs of the GPUs that may be at fault; empty if they aren't known.
        repeats: whether the host gave different bytes each time that it trained; None if it trained once.
        rank, step, component: the first difference that an audit has found. The rank is a rank of the run; a replay may
        have different ranks.
        at: the time of the record of the machine's last wrong training; empty unless the kind is ``machine``.
        agreeing: the number of trainings that ended with the right bytes (for an undecided commit, with the commit's
            own bytes), earlier audits of the run included.
        deviating: the number of trainings that ended with different bytes.
    """

    kind: Kind
    commit: int
    reason: str
    ask: Ask | None = None
    host: str = ""
    is_own: bool = False
    gpus: tuple[str, ...] = ()
    repeats: bool | None = None
    rank: int | None = None
    step: int | None = None
    component: str = ""
    at: str = ""
    agreeing: int = 0
    deviating: int = 0

    @property
    def title(self) -> str:
        """The kind, as it is shown to the user.

        If all bytes are equal and only a second host is missing, the title says this, because *undecided* sounds like a
        fault.
        """
        is_about_itself = self.ask is not None and self.ask.commit == self.commit
        is_equal = is_about_itself and self.agreeing > 1 and not self.deviating
        return "equal bytes, not certified yet" if is_equal else self.kind

    @property
    def is_doubt(self) -> bool:
        """Return whether the bytes of the commit, or of the commit from which it was trained, may be wrong."""
        if self.kind == "undecided":
            return self.deviating > 0 or (self.ask is not None and self.ask.commit != self.commit)
        return self.kind == "program" or (self.kind == "machine" and self.is_own)

    @property
    def chance(self) -> float | None:
        """The largest probability with which a program that deviates at random makes a sound machine look faulty.

        A program that deviates in each training with the probability q gives ``agreeing`` right and ``deviating`` wrong
        results with the probability (1 - q)^agreeing q^deviating. This bound is largest for q = deviating / (agreeing +
        deviating). The property is None unless the kind is ``machine``.
        """
        if self.kind != "machine":
            return None
        total = self.agreeing + self.deviating
        return (self.agreeing / total) ** self.agreeing * (self.deviating / total) ** self.deviating

    def count_earlier(self, audits: int) -> "AuditVerdict":
        """Return the verdict with the run's agreeing audits of other commits added to ``agreeing``."""
        return replace(self, agreeing=self.agreeing + audits)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        ask = vars(self.ask) if self.ask else None
        return vars(self) | {"ask": ask, "gpus": list(self.gpus), "chance": self.chance}

    def describe(self) -> str:
        """Return the verdict as one line of text, with the commit's number."""
        return f"commit {self.commit}: {self.title}: {self.reason}"

    def __str__(self) -> str:
        return self.spell("RUN")

    def spell(self, run: str) -> str:
        """Return the verdict as lines for the user.

        Args:
            run: <store>/<run>, for the command of the replay that would decide.
        """
        return "\n    ".join([f"  {self.title}: {self.reason}", *self._list_facts(run)])

    def _list_facts(self, run: str) -> list[str]:
        facts = []
        if self.kind == "machine":
            times = {
                None: "it has trained the steps once",
                True: "its bytes differed each time",
                False: "its bytes differed sometimes",
            }
            gpus = f"; GPU {', '.join(self.gpus)}" if self.gpus else ""
            facts.append(times[self.repeats] + gpus)
        if self.step is not None:
            rank = "" if self.rank is None else f", rank {self.rank}"
            facts.append(f"first in step {self.step}{rank}{f', {self.component}' if self.component else ''}")
        if self.chance is not None:
            facts.append(
                f"a program that deviates at random looks like this with a probability of at most {self.chance:.2g} "
                f"({self.agreeing} agreeing, {self.deviating} deviating)"
            )
        return [*facts, f"next: {self.ask.spell(run)}"] if self.ask else facts


@dataclass(frozen=True)
class _Training:
    """One training of a commit's steps.

    Attributes:
        hosts: the machines that may have computed wrongly in this training: several if they trained together, or if the
            records don't show which of them trained.
        began: the commit from which the training began.
        gpus: the UUIDs of the training's GPUs, in the order of the ranks.
        audit: the record of the audit that made the training; None for the commit's own training.
    """

    hosts: frozenset[str]
    sha256: str
    began: int
    gpus: tuple[str, ...]
    audit: AuditRecord | None = None


@dataclass(frozen=True)
class Consequences:
    """The actions that an extension has taken because of a verdict.

    Attributes:
        lines: lines that tell the user of the actions.
        ask: the replay by another machine that it needs, with its commit and the commit to begin with; None if none.
    """

    lines: list[str]
    ask: Ask | None = None


def judge_commit(commit: Commit, attempts: Sequence[AttemptRecord], audits: Sequence[AuditRecord]) -> AuditVerdict:
    """Return the verdict on a commit.

    Args:
        attempts: the attempts of which one has trained the commit.
        audits: the audits of the commit. An audit that the gate refused has trained nothing, but casts doubt on the
            commit from which it was to begin.
    """
    hosts = list_machines(commit, attempts)
    own = _Training(
        hosts, commit.checkpoint_sha256, commit.parent, _list_gpus(attempts[0].environment) if len(hosts) == 1 else ()
    )
    answers = [each for each in audits if each.checkpoint_sha256]
    drifted = [each for each in answers if each.notes and each.checkpoint_sha256 != own.sha256]
    replays = [
        _Training(frozenset({each.host}), each.checkpoint_sha256, each.from_commit, _list_gpus(each.environment), each)
        for each in answers
        if each not in drifted
    ]
    refused = frozenset(each.host for each in audits if not each.checkpoint_sha256) - own.hosts
    return _Case(commit, own, [own, *replays], drifted, refused).judge()


class _Case:
    """The trainings of one commit, grouped by their final bytes."""

    def __init__(
        self,
        commit: Commit,
        own: _Training,
        trainings: list[_Training],
        drifted: Sequence[AuditRecord],
        refused: frozenset[str],
    ) -> None:
        self.commit, self.own, self.trainings, self.drifted, self.refused = commit, own, trainings, drifted, refused
        self.groups: dict[str, list[_Training]] = {}
        for each in trainings:
            self.groups.setdefault(each.sha256, []).append(each)
        self.right = [group for group in self.groups.values() if _count_hosts(group) > 1]

    def judge(self) -> AuditVerdict:
        if len(self.groups) == 1:
            return self._judge_equal()
        if len(self.right) > 1:
            return self._judge_two_rights()
        if self.right:
            return self._judge_deviating(self.right[0])
        return self._judge_scattered()

    def _judge_equal(self) -> AuditVerdict:
        if self.right and OTHER_NODE in self.own.hosts:
            return self._ask(f"no record names all machines that trained it: {_name(self.own.hosts)}")
        if self.right:
            others = sorted({host for each in self.trainings for host in each.hosts} - self.own.hosts)
            return self._say("certified", f"{', '.join(others)} trained it to the bytes of {_name(self.own.hosts)}")
        if self.drifted:
            note = self.drifted[0].notes[0]
            return self._say(
                "drift", f"the bytes differ on {self.drifted[0].host}, where equal bytes aren't promised: {note}"
            )
        if self.refused and self.commit.parent:
            text = f"the gate refuses to begin with commit {self.commit.parent} on {_name(self.refused)}"
            return self._ask(text, commit=self.commit.parent)
        has = "has" if len(self.own.hosts) == 1 else "have"
        return self._ask(f"only {_name(self.own.hosts)} {has} trained it; an audit on another host would certify it")

    def _judge_two_rights(self) -> AuditVerdict:
        own, other = sorted(self.right, key=lambda group: self.own not in group)[:2]
        starts = [{each.began for each in group} for group in (own, other)]
        if self.own in own and not starts[0] & starts[1]:
            return self._blame_start(other)
        hosts = [_name(frozenset.union(*(each.hosts for each in group))) for group in (own, other)]
        return self._say("program", f"not deterministic: {hosts[0]} end on one state, {hosts[1]} on another", other)

    def _blame_start(self, others: list[_Training]) -> AuditVerdict:
        """Judge replays that agree with each other and that all began before the commit's parent."""
        parent = self.commit.parent
        audit = next(each.audit for each in others if each.audit)
        resumed = audit.resumes[-1] if audit.resumes else None
        if resumed is not None and audit.first_step is not None and audit.first_step > resumed:
            return self._say("program", f"the resume at step {resumed} doesn't continue exactly", others)
        return self._ask(f"the difference lies before commit {parent}, or in the resume from it", commit=parent)

    def _judge_deviating(self, right: list[_Training]) -> AuditVerdict:
        deviating = [each for each in self.trainings if each not in right]
        began = {each.began for each in right}
        straight = any(each.audit and not each.audit.resumes for each in right)
        if lone := [each for each in deviating if each.began not in began and not (straight and each is self.own)]:
            text = f"only replays that began with commit {_number(began)} agree; {_name(lone[0].hosts)} began elsewhere"
            return self._ask(text, from_commit=lone[0].began)
        guilty = self._narrow(frozenset.intersection(*(each.hosts for each in deviating)))
        if not guilty:
            names = _name(frozenset.union(*(each.hosts for each in deviating)))
            return self._say(
                "program", f"not deterministic: {names} differ from the hosts that agree", deviating, right
            )
        if len(guilty) > 1:
            return self._ask(f"{_name(guilty, 'or')} gave different bytes, and no record says which")
        (host,) = guilty
        agree = _name(frozenset.union(*(each.hosts for each in right)) - guilty)
        verdict = self._say("machine", f"{host} ended on different bytes than {agree}", deviating, right)
        times = [each in right for each in self.trainings if each.hosts == guilty or each in deviating]
        repeats = None if len(times) < 2 else not any(times)
        # The rank is a rank of the run. A replay with a different number of ranks has trained that rank's part on
        # different GPUs.
        is_alike = deviating[0] is self.own or len(deviating[0].gpus) == len(self.own.gpus)
        gpus = _blame_gpus(guilty, right, deviating, verdict.rank if is_alike else None)
        at = max(each.audit.created_at if each.audit else self.commit.created_at for each in deviating)
        return replace(verdict, host=host, is_own=self.own in deviating, repeats=repeats, gpus=gpus, at=at)

    def _narrow(self, guilty: frozenset[str]) -> frozenset[str]:
        """Return the host of the first rank that differs, if these hosts trained together; otherwise all hosts."""
        rank = self._find_first(self.trainings).get("rank")
        hosts = self.commit.hosts
        if len(guilty) < 2 or rank is None or rank >= len(hosts):
            return guilty
        return guilty & {hosts[rank]}

    def _judge_scattered(self) -> AuditVerdict:
        """Judge trainings that differ, if no two hosts ended with the same bytes."""
        hosts = _count_hosts(self.trainings)
        of_each = {host: self._list_bytes(host) for each in self.trainings for host in each.hosts}
        astray = sorted(host for host, found in of_each.items() if len(set(found)) > 1)
        if hosts > 2:
            return self._say("program", "not deterministic: no two hosts end on the same bytes", self.trainings[1:])
        if len(astray) > 1:
            return self._say(
                "program", f"not deterministic: {' and '.join(astray)} don't repeat their bytes", self.trainings[1:]
            )
        if hosts == 1 and len(self.groups) == len(self.trainings) >= DISTINCT:
            text = f"not deterministic: {_name(self.own.hosts)} ended on different bytes each time"
            return self._say("program", text, self.trainings[1:])
        repeat = tuple(sorted(host for host, found in of_each.items() if len(found) == 1))
        said = f"{astray[0]} differs from itself" if astray else "the hosts ended on different bytes"
        starts = {each.began for each in self.trainings[1:]}
        start = starts.pop() if len(starts) == 1 and self.commit.parent not in starts else None
        ask = self._ask(said, from_commit=start, repeat=repeat or tuple(astray))
        return replace(ask, **self._find_first(self.trainings[1:]))

    def _list_bytes(self, host: str) -> list[str]:
        return [each.sha256 for each in self.trainings if each.hosts == {host}]

    def _say(
        self, kind: Kind, reason: str, deviating: Sequence[_Training] = (), right: Sequence[_Training] = ()
    ) -> AuditVerdict:
        first = self._find_first([*deviating, *right])
        return AuditVerdict(kind, self.commit.number, reason, **first, agreeing=len(right), deviating=len(deviating))

    def _ask(
        self, reason: str, *, commit: int = 0, from_commit: int | None = None, repeat: tuple[str, ...] = ()
    ) -> AuditVerdict:
        answered = tuple(sorted({host for each in self.trainings for host in each.hosts}))
        ask = Ask(commit or self.commit.number, from_commit, answered if not commit else (), repeat)
        agreeing = len(self.groups[self.own.sha256])
        others = len(self.trainings) - agreeing
        return AuditVerdict("undecided", self.commit.number, reason, ask, agreeing=agreeing, deviating=others)

    def _find_first(self, trainings: Sequence[_Training]) -> dict[str, Any]:
        """Return the first difference that an audit has recorded, as fields of an `AuditVerdict`."""
        audits = [each.audit for each in trainings if each.audit and each.sha256 != self.own.sha256]
        audit = next((each for each in audits if each.first_step is not None), None)
        if audit is None:
            return {}
        names = [*audit.first_differs_in, *audit.first_tensors]
        rank = next((int(found[1]) for found in map(_RANK.search, names) if found), None)
        component = _RANK.sub("", names[0]) if names else ""
        return {"step": audit.first_step, "rank": rank, "component": component}


def _count_hosts(trainings: Sequence[_Training]) -> int:
    """Return the minimum number of hosts on which these trainings can have run."""
    known = {host for each in trainings if len(each.hosts) == 1 for host in each.hosts}
    return len(known) + any(not each.hosts & known for each in trainings)


def _blame_gpus(
    guilty: frozenset[str], right: Sequence[_Training], deviating: Sequence[_Training], rank: int | None
) -> tuple[str, ...]:
    """Return a host's GPUs that may be faulty: used in all its deviating trainings.

    GPUs that were also used in a right training are left out. If the rank is known, only the rank's GPU is returned.
    """
    good = {gpu for each in right if each.hosts == guilty for gpu in each.gpus}
    gpus = deviating[0].gpus
    if rank is not None and rank < len(gpus):
        gpus = gpus[rank : rank + 1]
    found = tuple(gpu for gpu in gpus if all(gpu in each.gpus for each in deviating))
    return tuple(gpu for gpu in found if gpu not in good) or found


def _list_gpus(environment: dict[str, Any]) -> tuple[str, ...]:
    found = environment.get("gpu_uuids")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _name(hosts: Collection[str], word: str = "and") -> str:
    """Return the names of hosts for a message: at most `MOST_NAMED` names, and the number of the remaining hosts."""
    names = sorted(hosts)
    left = len(names) - MOST_NAMED
    *some, last = names if left < 1 else [*names[:MOST_NAMED], f"{left} others"]
    return f"{', '.join(some)} {word} {last}" if some else last


def _number(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
