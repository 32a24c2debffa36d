"""Bits that flip on planted machines, and ordinary programs: audits name the machine, and never a healthy one."""

import itertools

import pytest
import torch

from tests.conftest import IS_SOAK
from tests.support.campaign import FINE, RANKS, Campaign, Case, Found, Ordinary, draw, list_ordinary
from tests.support.lives import Lives
from tests.support.struck import PLACES, Flip

CASES = draw(seed=1, number=200)
# Each place is among those that every run of the suite plants; make soak plants all.
PLANTED = CASES if IS_SOAK else CASES[::25]
# make soak audits all; bf16, two ranks, and torch.compile with virtual ranks are always among them.
PROGRAMS = list_ordinary()
AUDITED = PROGRAMS if IS_SOAK else PROGRAMS[:7:3]


@pytest.fixture(scope="module")
def campaign(nursery: Lives, tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(nursery, tmp_path_factory.mktemp("campaign"))


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANTED, ids=str)
def test_a_flip_that_changes_bytes_is_found_and_its_machine_named(campaign: Campaign, case: Case) -> None:
    found = campaign.find(case)
    assert found.judge(case) in FINE, found


@pytest.mark.slow
@pytest.mark.parametrize("is_sticky", [False, True])
def test_ranks_that_part_are_replaced_and_not_saved(campaign: Campaign, is_sticky: bool) -> None:
    """The reduction gives one of four ranks a different gradient, once or in each step from step 5 on."""
    flip = Flip("reduction", "node-1", step=5, rank=2, bit=20, element=7, is_sticky=is_sticky)
    case = Case(flip, ranks=4, virtual=4)
    found = campaign.find(case)
    assert found.flipped
    assert not found.changed
    if is_sticky:
        assert "after step 6 the model of rank 2 differs from the values of the other ranks" in found.stopped
        assert len(found.commits) == 1
    else:
        assert found.judge(case) == "trained again", found


@pytest.mark.slow
def test_a_rank_that_saves_nothing_is_found_by_a_replay_from_before(campaign: Campaign) -> None:
    """Its weight changes after the last step of a chunk: the chunk's bytes are right, and its probe isn't."""
    flip = Flip("weight", "node-1", step=6, rank=1, bit=20, element=7, is_sticky=False)
    case = Case(flip, ranks=2, virtual=0)
    found = campaign.find(case)
    assert found.changed == [3]
    assert found.judge(case) == "named"


@pytest.mark.slow
@pytest.mark.parametrize("program", AUDITED, ids=str)
def test_each_chunk_of_an_ordinary_program_is_certified(nursery: Lives, program: Ordinary) -> None:
    kinds = program.judge(nursery, 99 if IS_SOAK else 3)
    assert kinds
    assert {*kinds} == {"certified"}


def test_a_draw_has_each_place_on_each_number_of_ranks() -> None:
    assert draw(seed=1, number=200) == CASES != draw(seed=2, number=200)
    found = {(case.flip.place, case.ranks, case.virtual) for case in CASES}
    assert found == {
        (place, *ranks) for place, ranks in itertools.product(PLACES, RANKS) if place != "reduction" or ranks[0] > 1
    }
    assert {case.flip.place for case in CASES[::25]} == {*PLACES}
    assert all(case.flip.rank < case.ranks for case in CASES)


FLIP = Flip("weight", "a", step=1, rank=0, bit=31, element=9, is_sticky=False)
CASE = Case(FLIP, 1, 0)


def test_a_flip_changes_one_bit() -> None:
    values = torch.arange(1.0, 5.0, requires_grad=True)
    struck = FLIP.strike_copy(values)
    assert struck.tolist() == [1, -2, 3, 4]  # the sign of element 9 of 4, which is element 1
    struck.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 1, 1]
    before = torch.get_rng_state()
    FLIP.strike_generator()
    changed = (before != torch.get_rng_state()).nonzero()
    torch.set_rng_state(before)
    assert len(changed) == 1


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({}, "named"),
        ({"host": "b"}, "wrong host"),
        ({"flipped": False}, "not planted"),
        ({"stopped": "the loss is not finite; nothing was saved"}, "stopped"),
        ({"stopped": "a rank died"}, "failed"),
        ({"kind": "certified", "host": "", "changed": [2]}, "missed"),
        ({"kind": "certified", "host": "", "changed": [], "replays": []}, "no byte"),
        ({"kind": "certified", "changed": [], "replays": [], "is_repeated": True}, "trained again"),
        ({"kind": "undecided", "host": ""}, "undecided"),
        ({"kind": "program", "host": ""}, "wrong verdict"),
    ],
)
def test_an_outcome_has_one_column(changes: dict[str, object], column: str) -> None:
    found = {"flipped": True, "stopped": "", "changed": [2], "replays": [2], "kind": "machine", "host": "a"}
    found |= {"is_repeated": False, "commits": []}
    assert Found(**found | changes).judge(CASE) == column  # type: ignore[arg-type]
