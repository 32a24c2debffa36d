"""The training loop of the cards recipe."""

import math
from typing import Any

import torch
from torch import nn

from examples.cards.evaluation import find_tree, play
from examples.cards.games import Games, count_inputs, find_noops, load_game
from examples.cards.league import League
from examples.cards.policy import Policy, Sampler
from examples.cards.ppo import Learner, ReturnScale, estimate
from examples.cards.rollouts import Rollouts
from examples.cards.settings import Annealed, Settings, TrainSettings
from holdfast import Anneal, Run


def cards(run: Run, settings: Settings) -> None:
    """Train a recurrent policy by PPO against itself and its league.

    A step is a rollout of all games, and PPO's updates on it. Each rank plays games of its own.

    Raises:
        RecipeError: the game is unknown, or the recipe can't play it.
        ConfigError: an annealed value is out of range.
    """
    game, own = load_game(settings.game), settings.train
    noops = find_noops(game, settings.noop_actions)
    policy = Policy(count_inputs(game), game.num_distinct_actions(), settings.policy.hidden).to(run.device)
    optimizer = torch.optim.Adam(policy.parameters(), own.lr, eps=1e-5)
    scheduler = make_scheduler(optimizer, own, settings.schedule_epochs)
    model, optimizer = run.accelerator.prepare(policy, optimizer)
    sampler, ent_coef = make_anneals(run, settings)
    draw = run.generator("draw")
    league = League(settings.league, policy, run.accelerator)
    games = Games(game, own.rows, f"{run.config.seed}/{run.rank}")
    rollouts = Rollouts(games, own.rows, policy, league, sampler, draw)
    learner = Learner(model, optimizer, run.accelerator, sampler, ent_coef, own, draw)
    scale = ReturnScale()
    # The numbers of the last rollout; NaN before the first.
    behaviour = {"rollout_entropy": math.nan, "rollout_noop_rate": math.nan}
    run.keep(policy=policy, opponents=league.players, optimizer=optimizer, scheduler=scheduler)
    run.keep(league=league, rollouts=rollouts, scale=scale, behaviour=behaviour)
    tree = find_tree(game, settings.evaluation.nash_conv_histories)

    def evaluate(_: nn.Module) -> dict[str, float]:
        count, seed = settings.evaluation.games, settings.evaluation.seed
        played = play(game, policy, sampler, noops, count, seed, is_alone=False)
        return played.describe() | ({"nash_conv": tree.nash_conv(policy, sampler)} if tree else {})

    def probe(_: nn.Module) -> dict[str, Any]:
        count, seed = settings.health.probe_games, settings.evaluation.seed
        choices = play(game, policy, sampler, noops, count, seed, is_alone=True).choices
        return {"entropy": choices.mean_entropy, "noop_rate": choices.noop_rate, **behaviour}

    run.observe(evaluate=evaluate, probe=probe, health=settings.health.limits())
    for step in run.steps(per_epoch=own.steps_per_epoch):
        league.begin_step(step.number)
        rollout = rollouts.collect(own.ticks, noops)
        scale.add(rollout.won[rollout.ended])
        numbers = learner.improve(rollout, estimate(rollout, scale.value, own.gamma, own.gae_lambda))
        scheduler.step()
        behaviour.update(rollout_entropy=rollout.entropy, rollout_noop_rate=rollout.noop_rate)
        if (step.number + 1) % settings.league.snapshot_every_steps == 0:
            rollouts.leave(league.add_snapshot(step.number + 1, policy))
        step.log(**numbers, **behaviour, **league.describe())


def make_scheduler(
    optimizer: torch.optim.Optimizer, settings: TrainSettings, epochs: float
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler that lowers the rate linearly over these epochs, and then keeps it."""
    steps = max(1, round(epochs * settings.steps_per_epoch))
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, settings.final_lr_scale, steps)


def make_anneals(run: Run, settings: Settings) -> tuple[Sampler, Anneal]:
    """Register the annealed values. Return the sampler, and the coefficient of the entropy."""

    def anneal(name: str, table: Annealed, key: str, smallest: float, largest: float) -> Anneal:
        return run.anneal(name, table.anneal(key, settings.schedule_epochs, smallest, largest))

    sampler = Sampler(
        anneal("sampler/subaction_temperature", settings.policy, "subaction_temperature", 1e-3, 1e3),
        anneal("sampler/smoothing_eps", settings.policy, "smoothing_eps", 0.0, 1.0),
    )
    return sampler, anneal("ent_coef", settings.train, "ent_coef", 0.0, 1e3)
