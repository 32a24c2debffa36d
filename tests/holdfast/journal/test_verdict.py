"""The verdict on a commit, as a table: each row is a case of who trained its steps to which bytes."""

from typing import Any

import pytest

from holdfast.journal import AttemptRecord, AuditRecord, Commit, now
from holdfast.journal.verdict import Ask, AuditVerdict, judge_commit
from tests.support.makers import make_commit

PARENT, NUMBER = 6, 7
BYTES = {name: name.lower() * 64 for name in "ABCDE"}  # A is what the commit has


def attempt(host: str, gpus: tuple[str, ...] = ()) -> AttemptRecord:
    environment = {"gpu_uuids": list(gpus)} if gpus else {}
    return AttemptRecord(number=1, why="fresh", created_at=now(), host=host, pid=1, environment=environment)


def audit(host: str, found: str, *flags: str, **fields: Any) -> AuditRecord:
    """Return the record of a replay.

    ``noted``: no equal bytes are promised. ``resumed``: it begins a commit earlier, and the run was resumed at the
    parent; ``straight``: it wasn't.

    Args:
        found: the name of the bytes; empty if the gate refused the start.
    """
    is_earlier = "resumed" in flags or "straight" in flags
    known: dict[str, Any] = {
        "commit": NUMBER, "number": 1, "from_commit": PARENT - is_earlier, "environment": {},
        "checkpoint_sha256": BYTES[found] if found else "", "notes": ["other torch"] * ("noted" in flags),
        "host": host, "created_at": now(), "resumes": [60] if "resumed" in flags else [],
    }  # fmt: skip
    return AuditRecord(**known | fields)


def commit_of(sha256: str = BYTES["A"]) -> Commit:
    return make_commit(NUMBER, checkpoint_sha256=sha256)


Replays = list[tuple[str, ...]]
# The commit's bytes are A. A row: who may have trained the commit, the replays, the kind, the guilty host or who is to
# repeat, and whether the fault repeats.
TABLE: list[tuple[str, Replays, str, str, bool | None]] = [
    # all the same bytes
    ("a", [], "undecided", "", None),
    ("a", [("a", "A")], "undecided", "", None),
    ("a", [("b", "A")], "certified", "", None),
    ("a", [("b", "A"), ("c", "A"), ("a", "A")], "certified", "", None),
    ("a", [("b", "A", "noted")], "certified", "", None),
    ("a", [("b", "A", "resumed")], "certified", "", None),
    ("ab", [("b", "A")], "undecided", "", None),
    ("ab", [("c", "A")], "certified", "", None),
    # other software
    ("a", [("b", "B", "noted")], "drift", "", None),
    ("a", [("b", "B", "noted"), ("a", "B", "noted")], "drift", "", None),
    ("a", [("b", "B", "noted"), ("c", "A")], "certified", "", None),
    ("a", [("b", "B", "noted"), ("c", "C")], "undecided", "ac", None),
    # the gate refused: nothing was trained
    ("a", [("b", "")], "undecided", "", None),
    ("a", [("b", ""), ("c", "A")], "certified", "", None),
    # one host alone
    ("a", [("a", "B")], "undecided", "a", None),
    ("a", [("a", "B"), ("a", "B")], "undecided", "a", None),
    ("a", [("a", "B"), ("a", "A")], "undecided", "a", None),
    ("a", [("a", "B"), ("a", "C")], "program", "", None),
    # two hosts
    ("a", [("b", "B")], "undecided", "ab", None),
    ("a", [("b", "B"), ("a", "A")], "undecided", "b", None),
    ("a", [("b", "B"), ("b", "B")], "undecided", "a", None),
    ("a", [("b", "B"), ("a", "A"), ("b", "B")], "undecided", "", None),
    ("a", [("b", "B"), ("a", "B")], "machine", "a", False),
    ("a", [("b", "B"), ("b", "A")], "machine", "b", False),
    ("a", [("b", "B"), ("a", "A"), ("b", "A")], "machine", "b", False),
    ("a", [("b", "B"), ("a", "C")], "undecided", "b", None),
    ("a", [("b", "B"), ("a", "C"), ("b", "B")], "undecided", "a", None),
    ("a", [("b", "B"), ("a", "C"), ("b", "D")], "program", "", None),
    ("a", [("b", "B"), ("a", "B"), ("b", "C")], "program", "", None),
    # three hosts: the commit's own machine
    ("a", [("b", "B"), ("c", "B")], "machine", "a", None),
    ("a", [("b", "B"), ("c", "B"), ("a", "A")], "machine", "a", True),
    ("a", [("b", "B"), ("c", "B"), ("a", "B")], "machine", "a", False),
    ("a", [("b", "B"), ("c", "B"), ("a", "C")], "machine", "a", True),
    # three hosts: another machine
    ("a", [("b", "B"), ("c", "A")], "machine", "b", None),
    ("a", [("b", "B"), ("b", "B"), ("c", "A")], "machine", "b", True),
    ("a", [("b", "B"), ("b", "C"), ("c", "A")], "machine", "b", True),
    ("a", [("b", "B"), ("b", "A"), ("c", "A")], "machine", "b", False),
    # the program
    ("a", [("b", "B"), ("c", "C")], "program", "", None),
    ("a", [("b", "B"), ("c", "A"), ("d", "C")], "program", "", None),
    ("a", [("b", "B"), ("c", "A"), ("d", "B")], "program", "", None),
    ("a", [("b", "B"), ("c", "B"), ("a", "C"), ("d", "D")], "program", "", None),
    # an adopted checkpoint, of which one of two hosts has trained the steps
    ("ab", [("b", "B")], "undecided", "b", None),
    ("ab", [("c", "B"), ("d", "B")], "undecided", "", None),
    ("ab", [("c", "B"), ("d", "A")], "machine", "c", None),
    ("ab", [("c", "B"), ("d", "B"), ("a", "C")], "machine", "a", True),
    # replays across a resume
    ("a", [("b", "B", "resumed"), ("c", "B", "resumed")], "undecided", "", None),
    ("a", [("b", "B", "resumed"), ("c", "B", "resumed"), ("d", "B")], "machine", "a", None),
    ("a", [("b", "B", "resumed"), ("c", "A")], "undecided", "", None),
    ("a", [("b", "B", "resumed"), ("c", "A"), ("d", "A", "resumed")], "machine", "b", None),
    ("a", [("b", "B", "resumed"), ("c", "A"), ("d", "B", "resumed")], "undecided", "", None),
    # replays that begin a commit earlier, where the run wasn't resumed
    ("a", [("b", "B", "straight")], "undecided", "ab", None),
    ("a", [("b", ""), ("b", "B", "straight"), ("c", "B", "straight")], "machine", "a", None),
    ("a", [("b", "B", "straight"), ("c", "A"), ("d", "B", "straight")], "undecided", "", None),
]  # fmt: skip


def judge(trainers: str, replays: Replays, **fields: Any) -> AuditVerdict:
    return judge_commit(commit_of(), [attempt(host) for host in trainers], [audit(*each, **fields) for each in replays])


@pytest.mark.parametrize(("trainers", "replays", "kind", "who", "repeats"), TABLE)
def test_each_case_has_its_verdict(trainers: str, replays: Replays, kind: str, who: str, repeats: bool | None) -> None:
    found = judge(trainers, replays)
    asked = "".join(found.ask.repeat) if found.ask else ""
    assert (found.kind, found.host or asked, found.repeats) == (kind, who, repeats), str(found)
    assert (found.ask is not None) is (kind == "undecided")
    assert (found.chance is not None) is (kind == "machine")


@pytest.mark.parametrize(("trainers", "replays", "kind", "who", "repeats"), TABLE)
def test_the_order_of_the_replays_does_not_matter(
    trainers: str, replays: Replays, kind: str, who: str, repeats: bool | None
) -> None:
    found = judge(trainers, replays[::-1])
    asked = "".join(found.ask.repeat) if found.ask else ""
    assert (found.kind, found.host or asked, found.repeats) == (kind, who, repeats), str(found)


def test_an_undecided_verdict_asks_for_the_replay_that_decides() -> None:
    two = judge("a", [("b", "B")])
    assert two.ask == Ask(NUMBER, None, ("a", "b"), ("a", "b"))
    assert str(two).endswith(
        "next: holdfast audit RUN --commit 7 on a host other than a or b; if there is none, once more on a and on b"
    )
    straight = judge("a", [("b", ""), ("b", "B", "straight")])
    assert straight.ask == Ask(NUMBER, PARENT - 1, ("a", "b"), ("a", "b")), "the gate refuses to begin with the parent"
    across = judge("a", [("b", "B", "resumed"), ("c", "B", "resumed")])
    assert across.ask
    assert (across.ask.commit, across.ask.from_commit) == (NUMBER, PARENT)


@pytest.mark.parametrize(
    ("replays", "said"),
    [
        (
            [("a", "A")],
            "equal bytes, not certified yet: only a has trained it; an audit on another host would certify it",
        ),
        ([("a", "A"), ("b", "A")], "certified: b trained it to the bytes of a"),
        ([("a", "B")], "undecided: a differs from itself"),
        ([("a", "A"), ("b", "")], "undecided: the gate refuses to begin with commit 6 on b"),
    ],
)
def test_equal_bytes_on_the_only_host_do_not_read_like_a_fault(replays: Replays, said: str) -> None:
    found = judge("a", replays)
    assert found.describe() == f"commit 7: {said}"
    assert str(found).startswith(f"  {said}")


def test_a_gate_that_refuses_the_start_casts_doubt_on_the_parent() -> None:
    for replays, asked in (([("b", "")], PARENT), ([("a", "")], NUMBER), ([("b", ""), ("c", "B")], NUMBER)):
        found = judge("a", replays)  # type: ignore[arg-type]
        assert found.ask
        assert found.ask.commit == asked, str(found)


@pytest.mark.parametrize(("first_step", "kind", "asked"), [(65, "program", None), (60, "undecided", PARENT)])
def test_the_first_different_step_tells_a_resume_from_an_earlier_fault(
    first_step: int, kind: str, asked: int | None
) -> None:
    """Replays that repeat the resume agree with the run, and those that train straight on do not."""
    replays: Replays = [("b", "A"), ("c", "B", "resumed"), ("d", "B", "resumed")]
    found = judge("a", replays, first_step=first_step)
    assert (found.kind, found.ask and found.ask.commit) == (kind, asked), str(found)


def test_the_verdict_names_rank_step_component_and_gpu() -> None:
    fields: dict[str, Any] = {
        "first_step": 66, "first_differs_in": ["gradient of rank 1", "model of rank 1"], "first_tensors": ["model.w"]
    }  # fmt: skip
    right = [audit(host, "B", **fields) for host in "bc"]
    own = attempt("a", ("GPU-0", "GPU-1"))
    found = judge_commit(commit_of(), [own], right)
    assert (found.step, found.rank, found.component, found.gpus) == (66, 1, "gradient", ("GPU-1",))
    other_gpu = audit("a", "B", environment={"gpu_uuids": ["GPU-2", "GPU-0"]})
    unknown_rank = [each.model_copy(update={"first_differs_in": ["gradient"]}) for each in right]
    found = judge_commit(commit_of(), [own], [*unknown_rank, other_gpu])
    assert (found.rank, found.gpus) == (None, ("GPU-1",)), "GPU-0 has trained right, too"
    assert judge_commit(commit_of(), [own], [*unknown_rank, audit("a", "B")]).gpus == ("GPU-0", "GPU-1")


@pytest.mark.parametrize(
    ("replays", "differs_in", "kind", "who"),
    [
        ([("c", "A")], (), "certified", ""),
        ([("b", "A")], (), "undecided", ""),  # a node of its own may repeat its own fault
        ([("b", "A"), ("c", "A")], (), "certified", ""),
        ([("c", "B"), ("d", "A")], (), "machine", "c"),
        ([("c", "B"), ("d", "B")], ("loss of rank 1",), "machine", "b"),
        ([("c", "B"), ("d", "B")], ("loss of rank 0",), "machine", "a"),
        ([("c", "B"), ("d", "B")], ("gradient",), "undecided", ""),
        ([("c", "B"), ("d", "B")], ("loss of rank 7",), "undecided", ""),
        ([("c", "B"), ("b", "B")], ("loss of rank 1",), "machine", "b"),  # it was wrong once
        ([("c", "B"), ("d", "C")], ("loss of rank 1",), "program", ""),
    ],
)
def test_nodes_that_trained_together_are_told_apart_by_the_rank(
    replays: Replays, differs_in: tuple[str, ...], kind: str, who: str
) -> None:
    """The hosts a and b have trained the commit together, with a rank each."""
    commit = commit_of().model_copy(update={"hosts": ["a", "b"]})
    own = attempt("a").model_copy(update={"lineage": {"nodes": "2"}})
    fields = {"first_step": 66, "first_differs_in": list(differs_in)} if differs_in else {}
    found = judge_commit(commit, [own], [audit(*each, **fields) for each in replays])
    assert (found.kind, found.host) == (kind, who), str(found)


def test_a_verdict_names_few_of_many_hosts() -> None:
    commit = commit_of().model_copy(update={"hosts": [f"node-{number:03d}" for number in range(64)]})
    found = judge_commit(commit, [attempt("node-000")], [audit("judge", "B")])
    assert "on a host other than judge, node-000, node-001, node-002 or 61 others;" in str(found)
    assert found.ask
    assert len(found.ask.answered) == 65


def test_a_replay_on_fewer_ranks_has_no_gpu_of_the_named_rank() -> None:
    """Two ranks of four have trained again, and deviate: the run's rank 1 says nothing about their GPUs."""
    own = attempt("a", tuple(f"GPU-{number}" for number in range(4)))
    fields: dict[str, Any] = {"first_step": 66, "first_differs_in": ["gradient of rank 1 (shares 2, 3)"]}
    here = audit("b", "B", environment={"gpu_uuids": ["GPU-8", "GPU-9"]}, **fields)
    found = judge_commit(commit_of(), [own], [here, audit("c", "A")])
    assert (found.host, found.gpus) == ("b", ("GPU-8", "GPU-9"))


@pytest.mark.parametrize(("agreeing", "deviating"), [(2, 1), (3, 1), (3, 2), (102, 1)])
def test_the_chance_is_the_largest_over_all_rates_of_a_random_program(agreeing: int, deviating: int) -> None:
    replays = [("b", "B")] * deviating + [("c", "A")]
    found = judge("a", replays).count_earlier(agreeing - 2)
    assert (found.agreeing, found.deviating) == (agreeing, deviating)
    largest = max((1 - rate) ** agreeing * rate**deviating for rate in (each / 10_000 for each in range(10_001)))
    assert found.chance == pytest.approx(largest, rel=1e-3)
    assert f"at most {found.chance:.2g} ({agreeing} agreeing, {deviating} deviating)" in str(found)
