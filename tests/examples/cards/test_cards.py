"""The cards recipe as runs in this process: anneals, health, the league, and the same bytes wherever a run is cut."""

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pyspiel")

import examples.cards
from examples.cards.league import SELF, League
from examples.cards.policy import Policy
from examples.cards.rollouts import Rollouts
from examples.cards.settings import HealthSettings
from holdfast.config import Determinism, InitFrom, RunConfig
from holdfast.errors import ConfigError, GateTripped, RecipeError, Unhealthy
from holdfast.looking.sinks import read_values
from holdfast.provenance.imports import find_code
from holdfast.recipe.probe import Gate, Probe, check_health
from holdfast.training import Training, evaluate_recipe, examine_recipe, resume, run_program, steps
from holdfast.training.init_from import begin_from
from holdfast.training.recording import read_lines
from holdfast.training.resuming import summarize_rates
from tests.support.collapsing import LOGITS
from tests.support.trainings import Saved, content_id, live, save_state

pytestmark = [pytest.mark.usefixtures("same_process"), pytest.mark.extras]

PER_EPOCH = 4
# A small run with everything in it: the league is active from the second step on, and its members change.
SMALL: dict[str, dict[str, Any]] = {
    "policy": {"hidden": 4, "subaction_temperature_final": 1.0, "smoothing_eps_final": 0.0},
    "train": {"rows": 6, "ticks": 4, "steps_per_epoch": PER_EPOCH, "ent_coef_initial": 0.01, "ent_coef_final": 0.0},
    "league": {
        "share": 0.7, "activate_after_steps": 1, "snapshot_every_steps": 1, "recent": 2, "middle": 1, "old": 1,
        "promote_above": 0.0,
    },
    "evaluation": {"games": 8},
    "health": {"probe_games": 4},
}  # fmt: skip
STOP = 7


def make_config(folder: Path, run: str = "r", epochs: int = 3, **changes: Any) -> RunConfig:
    """Return the small run's configuration. A change of a table changes only the settings that it names."""
    settings: dict[str, Any] = {"schedule_epochs": 2, **SMALL}
    for name, value in changes.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return RunConfig(
        recipe="examples.cards:cards", run=run, store=str(folder), epochs=epochs, settings=settings,
        determinism=Determinism(mode="fast", threads=1),
    )  # fmt: skip


def train(config: RunConfig, stop: int, saved: Saved | None = None) -> list[dict[str, Any]]:
    """Train to a step, from a checkpoint if there is one. Return the trail's lines of these steps."""
    found: list[dict[str, Any]] = []

    def serve(training: Training) -> Generator[None, None, None]:
        if saved is not None:
            resume(training, *saved, Gate("exact"), lambda *skipped: None)
        yield from steps(training, stop, lambda: False)
        found.extend(read_lines(training))

    run_program(config, serve)
    return found


def read_anneals(line: dict[str, Any]) -> tuple[float, ...]:
    """Return the annealed values of a step, under the names that metric sinks show."""
    values = read_values(line)
    return tuple(values[name] for name in ("sampler/subaction_temperature", "sampler/smoothing_eps", "anneal/ent_coef"))


@pytest.mark.parametrize(("cut", "snapshot_every"), [(1, 1), (PER_EPOCH, 1), (6, 1), (6, 4)])
def test_cut_anywhere_it_ends_on_the_same_bytes(tmp_path: Path, cut: int, snapshot_every: int) -> None:
    """Between two snapshots the league has counted games against the champion."""
    config = make_config(tmp_path, league={"snapshot_every_steps": snapshot_every})
    straight, _ = live(config, STOP)
    assert content_id(live(config, STOP, live(config, cut)[0])[0]) == content_id(straight)


def test_all_state_is_registered(tmp_path: Path) -> None:
    _, training = live(make_config(tmp_path), 3)
    assert all(each.is_plain for each in examine_recipe(training.recipe).found)


# ---- annealed values


def test_annealed_values_are_used_and_logged_at_each_step(tmp_path: Path) -> None:
    lines = train(make_config(tmp_path), 2 * PER_EPOCH + 1)
    first, midpoint, after = lines[0], lines[PER_EPOCH], lines[2 * PER_EPOCH]
    assert read_anneals(first) == (1.2, 0.05, 0.01)
    assert read_anneals(midpoint) == pytest.approx((1.1, 0.025, 0.005))
    assert read_anneals(after) == (1.0, 0.0, 0.0)


def test_a_run_resumed_at_the_midpoint_has_the_values_in_its_first_step(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    saved, _ = live(config, PER_EPOCH)
    (line,) = train(config, PER_EPOCH + 1, saved)
    assert read_anneals(line) == pytest.approx((1.1, 0.025, 0.005))


def test_a_value_without_a_last_one_stays(tmp_path: Path) -> None:
    unset = {f"{name}_final": None for name in ("subaction_temperature", "smoothing_eps")}
    config = make_config(tmp_path, policy=unset, train={"ent_coef_final": None})
    assert read_anneals(train(config, 3)[2]) == (1.2, 0.05, 0.01)


def test_weights_of_step_128_continue_the_anneals_there(tmp_path: Path) -> None:
    config = make_config(tmp_path, schedule_epochs=64)
    payload, metadata = live(config, 1)[0]
    metadata = metadata.model_copy(update={"optimizer_steps_total": 128})
    found: list[Any] = []

    def serve(training: Training) -> Generator[None, None, None]:
        begin_from(training, payload, metadata, InitFrom(run="other"))
        yield from steps(training, 1, lambda: False)
        found.extend([training.progress.anneal_offset, summarize_rates(training), read_lines(training)[0]])

    run_program(config, serve)
    assert found[0] == 128
    assert found[1].endswith("anneal offset 128")
    assert read_anneals(found[2]) == pytest.approx((1.1, 0.025, 0.005))


def test_an_evaluation_uses_the_values_of_the_checkpoints_own_step(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (_, metadata), training = live(config, PER_EPOCH)
    assert metadata.anneals["sampler/subaction_temperature"] == pytest.approx(1.1)
    assert evaluate_recipe(training)[0]["nash_conv"] == metadata.metrics["nash_conv"]
    training.progress.step = 2 * PER_EPOCH
    training.set_anneals()
    assert evaluate_recipe(training)[0]["nash_conv"] != metadata.metrics["nash_conv"]


@pytest.mark.parametrize(
    ("table", "settings", "message"),
    [
        ("policy", {"subaction_temperature_initial": 0.0}, r"settings\.policy\.subaction_temperature_initial = 0\.0"),
        ("policy", {"smoothing_eps_final": 1.5}, r"settings\.policy\.smoothing_eps_final = 1\.5: expected 0 to 1"),
        ("train", {"ent_coef_anneal_end_frac": 2.0}, r"settings\.train\.ent_coef_anneal_end_frac = 2\.0"),
        ("train", {"ent_coef_anneal_start_frac": 0.5, "ent_coef_anneal_end_frac": 0.1}, "would end before it begins"),
    ],
)
def test_an_anneal_that_is_out_of_range_is_named_with_its_table(
    tmp_path: Path, table: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        live(make_config(tmp_path, **{table: settings}), 1)


# ---- health


def set_logits(training: Training, logits: tuple[float, float]) -> None:
    """Let the policy choose Pass and Bet with these logits everywhere."""
    policy = training.recipe.model.policy
    assert isinstance(policy, Policy)
    with torch.no_grad():
        policy.act.weight.zero_()
        policy.act.bias.copy_(torch.tensor(logits))


def save_with(config: RunConfig, logits: tuple[float, float]) -> Saved:
    """Train a step, set the policy's logits, train another step that hardly changes them, and save."""
    found: list[Saved] = []

    def serve(training: Training) -> Generator[None, None, None]:
        yield from steps(training, 1, lambda: False)
        set_logits(training, logits)
        yield from steps(training, 2, lambda: False)
        found.append(save_state(training, Path(config.store)))

    run_program(config, serve)
    return found[0]


def test_a_collapsed_policy_is_not_saved(tmp_path: Path) -> None:
    """Smoothing, which here takes every second action at random, doesn't hide it."""
    config = make_config(tmp_path, policy={"smoothing_eps_initial": 0.5})
    with pytest.raises(Unhealthy, match=r"entropy is .*e-0.*rollout_entropy is .*e-0") as caught:
        save_with(config, LOGITS)
    assert "; noop_rate is 1, above 0.95" in str(caught.value)
    assert "rollout_noop_rate" not in str(caught.value), "half of the rollout's actions are taken at random"


def test_a_collapsed_policy_trips_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, policy={"smoothing_eps_initial": 0.0})
    with monkeypatch.context() as patch:
        patch.setattr(HealthSettings, "limits", lambda self: {})
        saved = save_with(config, LOGITS)
    values = saved[1].probe.values
    assert all((values[name] or 0.0) < 1e-4 for name in ("entropy", "rollout_entropy"))
    assert all((values[name] or 0.0) > 0.99 for name in ("noop_rate", "rollout_noop_rate"))
    with pytest.raises(GateTripped, match=r"entropy is .*, below 0\.02"):
        live(config, 3, saved)


def test_a_healthy_policy_passes_the_gate(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    saved = save_with(config, (0.5, 0.0))
    values = saved[1].probe.values
    assert values["entropy"] == pytest.approx(0.67, abs=0.02)
    assert values["noop_rate"] == pytest.approx(0.6, abs=0.3)
    live(config, 3, saved)


def test_the_limits_tell_a_healthy_policy_from_a_collapsed_one() -> None:
    def check(entropy: float, noop_rate: float) -> int:
        values = {"entropy": entropy, "noop_rate": noop_rate}
        both = values | {f"rollout_{name}": value for name, value in values.items()}
        return len(check_health(Probe(values=both), HealthSettings().limits()))

    assert check(0.99, 0.62) == 0
    assert check(1e-5, 0.99) == 4


# ---- the recipe's code, and its numbers


def test_every_module_of_the_recipe_is_its_source() -> None:
    found = find_code(["examples.cards"], {*sys.modules})
    folder = Path(examples.cards.__file__).parent
    expected = {f"examples.cards.{path.stem}" for path in folder.glob("[a-z]*.py")}
    assert {*found} == expected | {"examples", "examples.cards"}


def test_a_league_of_the_far_future_runs_the_same_code_and_stays_inactive(tmp_path: Path) -> None:
    _, training = live(make_config(tmp_path, league={"activate_after_steps": 10**9}), STOP)
    league, rollouts = (training.recipe.extras[name] for name in ("league", "rollouts"))
    assert isinstance(league, League)
    assert isinstance(rollouts, Rollouts)
    assert league.members
    assert not league.is_active
    assert (rollouts.opponent == SELF).all()


@pytest.mark.parametrize("game", ["leduc_poker", "crazy_eights(players=2)", "tic_tac_toe"])
def test_other_games_are_trained_by_name(tmp_path: Path, game: str) -> None:
    config = make_config(tmp_path, game=game, evaluation={"games": 2, "nash_conv_histories": 100})
    saved, training = live(config, 2)
    live(config, 3, saved)
    assert "nash_conv" not in evaluate_recipe(training)[0], "the game is too large"


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"game": "kuhnpoker"}, "OpenSpiel has no game 'kuhnpoker'", "the nearest: kuhn_poker"),
        ({"game": "kuhn_poker(players=3)"}, "it has 3 players, expected 2", "players=2"),
        ({"game": "hearts"}, "it has 4 players, expected 2", ""),
        ({"game": "goofspiel"}, "its players act at the same time", "turn_based_simultaneous_game(game=goofspiel())"),
        ({"game": "kuhn_poker(plyers=2)"}, "Unknown parameter 'plyers'", ""),
        ({"noop_actions": ["Fold"]}, "the game has no action 'Fold'", "Pass"),
    ],
)
def test_a_game_that_cannot_be_played_is_one_line(
    tmp_path: Path, settings: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        live(make_config(tmp_path, **settings), 1)
    assert message in str(refused.value)
    assert hint in refused.value.hint
    assert "\n" not in str(refused.value)
