"""The result of `holdfast compare`, and its text for a person."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from holdfast.checkpoint import shorten
from holdfast.extensions.compare.suspects import Suspect, Tier, describe_change
from holdfast.proof.differing import SHOWN_NAMES, Differing

SHOWN_SUSPECTS = 12
# The fields of a trail's line whose values aren't shown, because digests and tables mean nothing to a person.
HASHED = {"samples", "rng", "logged", "metrics"}
TITLES: dict[Tier, str] = {"likely": "most likely", "possible": "possible", "unlikely": "no explanation"}
NOTHING_RECORDED = (
    "no difference on record explains the different bytes; the cause may be a resume that lost state (holdfast audit "
    "trains across resumes), "
    "a file that changed while training read it, or an error of a machine"
)


class Side(BaseModel):
    """One of the two trainings.

    Attributes:
        label: the training's name in messages: the run's name. If both runs have the same name, the text that the user
            typed.
        commit: the number of the commit up to which the training is compared.
        first: the number of the training's first commit whose content id differs; 0 if none differs.
        content_id: the content id of this first commit, or of the last common commit if no content id differs.
        certified_by: the host that has trained the commit of ``content_id`` again to the same bytes; empty if no host
            has done so.
    """

    model_config = ConfigDict(frozen=True)

    label: str
    commit: int
    step: int
    first: int = 0
    content_id: str = ""
    certified_by: str = ""

    def describe_trust(self) -> str:
        """Return ``certified by HOST``, or ``a candidate`` if no other host has certified the commit."""
        return f"certified by {self.certified_by}" if self.certified_by else "a candidate"


class Replay(BaseModel):
    """The replay of the steps in which a training differs first.

    Attributes:
        commit: the number of the commit up to whose step the replay trained.
        start: the step that the replay began with.
        expected, found: the committed content id, and the content id of the replay.
    """

    model_config = ConfigDict(frozen=True)

    commit: int
    start: int
    stop: int
    expected: str
    found: str

    @property
    def is_identical(self) -> bool:
        return self.expected == self.found


class Comparison(Differing, BaseModel):
    """The comparison of two trainings, by their trails or by detailed replays.

    ``different`` names the values that differ at ``different_at``; it is empty if a checkpoint was pruned.

    Attributes:
        is_equal: whether all checkpoints and steps that both trainings have are equal.
        equal_until: the last step at which both trainings have a checkpoint with the same content id; 0 if there is
            none.
        common: the number of steps at which both trainings have a checkpoint.
        compared_until: the last step that was compared, by content ids or trails.
        different_at: the first step at which both trainings have a checkpoint and the content ids differ; None if there
            is none.
        first_values: the two values of the first field that differs; empty if the trails have none.
        replays: the replays of both trainings, if they were requested and possible.
        suspects: the recorded differences between the trainings, the best explanations of the first difference first.
        notes: what could not be compared, and why.
    """

    one: Side
    other: Side
    is_equal: bool
    equal_until: int
    common: int
    compared_until: int
    different_at: int | None = None
    first_values: list[Any] = []
    replays: list[Replay] = []
    suspects: list[Suspect] = []
    notes: list[str] = []

    def __str__(self) -> str:
        lines = self._describe_equal() if self.is_equal else self._describe_difference()
        return "\n".join([*lines, *self._list_suspects(), *(f"  note: {note}" for note in self.notes)])

    @property
    def _names(self) -> str:
        return f"{self.one.label} and {self.other.label}"

    def _describe_equal(self) -> list[str]:
        if not self.common:
            return [f"equal: the trails of {self._names}, up to step {self.compared_until}; no common checkpoint"]
        lines = [f"equal: {self._names} have one content id at step {self.equal_until}: {self.one.content_id}"]
        shorter, longer = sorted((self.one, self.other), key=lambda side: side.step)
        if shorter.step != longer.step:
            ends = f"{shorter.label} ends at step {shorter.step}"
            lines.append(f"  {longer.label} continues to step {longer.step}, {ends}")
        if self.compared_until > self.equal_until:
            lines.append(f"  the lines of steps {self.equal_until + 1}-{self.compared_until} are equal")
        return lines

    def _describe_difference(self) -> list[str]:
        since = f"equal until step {self.equal_until}" if self.equal_until else "from the beginning"
        lines = [f"different: {self._names}, {since}"]
        if self.different_at is not None:
            both = (self.one, self.other)
            sides = (f"commit {side.first} of {side.label} {side.content_id[:12]}" for side in both)
            lines.append(f"  first different content id at step {self.different_at}: {', '.join(sides)}")
            if any(side.certified_by for side in both):
                trust = (f"commit {side.first} of {side.label} is {side.describe_trust()}" for side in both)
                lines.append(f"  by audits, {', '.join(trust)}")
        lines += self.describe_first()
        if self.first_values and self.first_differs_in[0] not in HASHED:
            left, right = map(_show, self.first_values)
            lines.append(f"  {self.first_differs_in[0]} is {left} in {self.one.label}, {right} in {self.other.label}")
        if self.first_step is None and self.different:
            lines.append("  every step has the same samples, rates, loss, gradient and random numbers")
            lines.append(f"  in the state at step {self.different_at}: {shorten(self.different, SHOWN_NAMES)}")
        return [*lines, *self._describe_replays()]

    def _describe_replays(self) -> list[str]:
        lines = []
        for side, replay in zip((self.one, self.other), self.replays, strict=False):
            what = f"  steps {replay.start}-{replay.stop} of {side.label}, trained again here, give"
            lines.append(f"{what} {'the committed' if replay.is_identical else 'other'} bytes")
        return lines

    def _list_suspects(self) -> list[str]:
        shown, hidden = self.suspects[:SHOWN_SUSPECTS], self.suspects[SHOWN_SUSPECTS:]
        is_explained = self.is_equal or any(each.tier != "unlikely" for each in shown)
        lines = [] if is_explained else [f"  {NOTHING_RECORDED}"]
        title = ""
        for each in shown:
            heading = "differs, but changed no byte before the first difference" if self.is_equal else TITLES[each.tier]
            lines += [f"  {heading}:"] if heading != title else []
            title = heading
            lines.append(f"    {each.cls:11}  {describe_change(each.change, self.one.label, self.other.label)}")
        return lines + ([f"    and {len(hidden)} more"] if hidden else [])


def _show(value: Any) -> str:
    """Format a value of a trail with at most nine digits, enough to distinguish any two 32-bit floats."""
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, list):
        return ", ".join(map(_show, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(each)}" for name, each in value.items())
    return str(value)
