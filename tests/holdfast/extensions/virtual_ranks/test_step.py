"""Virtual ranks in one process: what a share is, and what they can't train."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.config import Compute, Determinism, RunConfig
from holdfast.errors import ConfigError, RecipeError
from holdfast.extensions.virtual_ranks.blocks import ShardSums
from holdfast.extensions.virtual_ranks.buckets import make_buckets
from holdfast.extensions.virtual_ranks.step import check_ranks
from holdfast.extensions.virtual_ranks.whole import WholeSums
from holdfast.training import Training, go_back
from holdfast.training.loop import steps, train_step
from holdfast.training.recording import read_lines
from tests.support.shares import Counted
from tests.support.trainings import live_in_chunks, train_to

SHARES = 8
SETTINGS: dict[str, Any] = {"run": "r", "epochs": 1, "determinism": Determinism(mode="fast")}


def make_config(folder: Path, shares: int = SHARES, recipe: str = "shares:averaged", **changes: Any) -> RunConfig:
    values = {"recipe": f"tests.support.{recipe}", "store": str(folder), **SETTINGS}
    return RunConfig(**values, compute=Compute(device="cpu", virtual_ranks=shares, **changes))


def test_cut_at_every_step_a_run_ends_on_the_same_bytes(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert live_in_chunks(config, 6, 1) == live_in_chunks(config, 6, 6)


def test_the_gradient_is_the_mean_over_the_whole_batch(tmp_path: Path) -> None:
    """Without dropout, statistics of a share and noise, shares sum to the usual gradient but for rounding."""
    found = []
    for shares in (0, 4):
        training = Training(make_config(tmp_path, shares, "shares:plain"))
        losses = [train_step(training).numbers["loss"] for _ in range(3)]
        found.append((torch.stack(losses), nn.utils.parameters_to_vector(training.model.parameters())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_each_share_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    virtual: Any = training.ranks
    drawn = []
    for step in (1, 1, 2):
        with virtual.step(training.model, step):
            for turn in virtual.turns:
                with virtual.share(turn):
                    drawn.append(torch.rand(()).item())
        drawn.append(torch.rand(()).item())
    once, again, next_step = (drawn[start : start + SHARES + 1] for start in range(0, len(drawn), SHARES + 1))
    assert once == again
    assert len({*once, *next_step}) == 2 * (SHARES + 1)


def fail_in_a_step(training: Training) -> None:
    """Train the first share of the next step, and fail, as a rank does that loses another one."""
    virtual: Any = training.ranks
    loss = training.recipe.loss
    assert loss is not None
    begun = steps(training, training.progress.step + 1, lambda: False)
    next(begun)
    with contextlib.suppress(ConnectionError), virtual.step(training.model.train(), training.progress.step + 1):
        turn = virtual.turns[0]
        with virtual.share(turn):
            virtual.micro_batch(turn, is_last=True)
            loss(training.model, training.next_batch()[1]).backward()  # type: ignore[no-untyped-call]
        raise ConnectionError
    begun.close()


def test_a_step_is_undone_until_the_optimizer_steps(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    train_to(training, 2)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    drawn = training.generators.digest()
    fail_in_a_step(training)
    assert training.model.state_dict()["counted.calls"] != before["counted.calls"]
    assert go_back(training)
    assert training.progress.step == 2
    assert training.generators.digest() == drawn
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_step_whose_loss_has_changed_a_parameter_is_not_undone(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    fail_in_a_step(training)
    with torch.no_grad():
        training.model.get_parameter("unused").clamp_(0, 1)  # the same values: who knows
    assert not go_back(training)


def test_a_step_of_a_model_with_further_state_is_not_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "get_extra_state", lambda self: {"calls": 1})
    monkeypatch.setattr(Counted, "set_extra_state", lambda self, state: None)
    training = Training(make_config(tmp_path))
    fail_in_a_step(training)
    assert not go_back(training)


def test_a_step_that_fails_after_the_optimizers_is_not_undone(tmp_path: Path) -> None:
    """Some optimizers change weights through their ``data``, which torch doesn't count as a change."""
    training = Training(make_config(tmp_path))

    def fail() -> None:
        training.model.get_parameter("unused").data.add_(1)
        raise ConnectionError

    training.optimizer.step = fail
    with pytest.raises(ConnectionError):
        train_to(training, 1)
    assert not go_back(training)


def test_a_step_in_detail_has_the_facts_of_each_share(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    training.record.is_detailed = True
    train_to(training, 1)
    (line,) = read_lines(training)
    *shares, rank = line["parts"]
    assert [each["share"] for each in shares] == list(range(SHARES))
    for fact in ("samples", "generators", "loss", "gradient"):
        assert len({each[fact] for each in shares}) == SHARES, fact
    assert len({each["buffers"] for each in shares}) == 1
    assert rank.keys() == {"rank", "partial_sum"}


def test_the_first_step_after_a_checkpoint_has_the_facts_of_each_share(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    train_to(training, 3)
    assert ["parts" in line for line in read_lines(training)] == [True, False, False]
    gradient = read_lines(training)[0]["parts"][0]["gradient"]
    training.record.lines = []  # as a save does
    train_to(training, 5)
    first, second = read_lines(training)
    assert first["parts"][0]["gradient"] != gradient
    assert "parts" not in second


def test_a_rehearsal_leaves_the_facts_of_the_first_step(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    training.record.is_detailed = True
    train_to(training, 2)
    assert ["parts" in line for line in read_lines(training)] == [True, True]
    training.record.drop_detail()
    assert ["parts" in line for line in training.record.lines] == [True, False]


def test_a_parameter_that_no_share_uses_has_no_gradient(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    train_step(training)
    assert torch.equal(training.model.get_parameter("unused"), torch.ones(3)), "weight decay would have changed it"


@pytest.mark.parametrize(
    ("recipe", "shares", "changes", "said"),
    [
        ("shares:averaged", 5, {}, "16 samples in equal shares"),
        ("shares:averaged", 4, {"ranks": 1, "mixed_precision": "fp16"}, "fp16"),
        ("composed:adversarial", 8, {}, "with Recipe"),
        ("varied:streamed", 2, {}, "this data, which can't be divided into shares"),
        ("shares:synced", 8, {}, "blocks.0.1, a SyncBatchNorm"),
    ],
)
def test_what_they_cannot_train_is_refused(
    tmp_path: Path, recipe: str, shares: int, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        Training(make_config(tmp_path, shares, recipe, **changes))
    assert found.value.hint


def test_more_ranks_than_shares_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"compute.ranks = 9: there are only 8 virtual ranks"):
        check_ranks(8, 9, 9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sums", [WholeSums, ShardSums])
def test_every_share_counts_once_and_all_ranks_have_equally_many_turns_with_shards(sums: Any, ranks: int) -> None:
    turns = [sums(SHARES, rank, ranks).turns for rank in range(ranks)]
    counted = [turn.share for each in turns for turn in each if turn.counts]
    assert sorted(counted) == list(range(SHARES))
    if sums is ShardSums:
        assert {len(each) for each in turns} == {-(-SHARES // ranks)}, "all take part in every collective"


def test_a_sparse_gradient_is_refused(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path, recipe="shares:sparse"))
    with pytest.raises(RecipeError, match="sparse gradient"):
        train_step(training)


def test_buckets_hold_parameters_of_one_kind_and_bounded_size() -> None:
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(5)]
    parameters.insert(2, nn.Parameter(torch.ones(100, dtype=torch.float64)))
    sizes = [[each.nbytes for each in bucket.parameters] for bucket in make_buckets([*parameters, parameters[0]], 800)]
    assert sizes == [[400, 400], [400, 400], [400], [800]]


def test_the_fingerprint_has_the_shares_in_place_of_the_ranks(tmp_path: Path) -> None:
    identities = [make_config(tmp_path, ranks=ranks).identity for ranks in (1, 4)]
    assert identities[0] == identities[1] != make_config(tmp_path, 4).identity
    assert make_config(tmp_path, 0).identity["compute"] == {"ranks": 1, "mixed_precision": "no"}


def test_an_extra_that_a_share_changes_is_refused(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path).model_copy(update={"settings": {"how": "counts"}}))
    with pytest.raises(RecipeError, match="the extras were changed by code that trains only a share of a batch"):
        train_step(training)
