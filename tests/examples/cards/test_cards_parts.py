"""The parts of the cards recipe: games, memories, advantages, the league's members, and NashConv."""

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

pytest.importorskip("pyspiel")

from examples.cards.evaluation import find_tree, play
from examples.cards.games import Games, count_inputs, find_noops, load_game
from examples.cards.league import SELF, League, choose_buckets, wilson_lower
from examples.cards.policy import Policy, Sampler, entropy, reset_rows
from examples.cards.ppo import Learner, ReturnScale, Targets, estimate
from examples.cards.rollouts import Rollout, Rollouts
from examples.cards.settings import LeagueSettings, TrainSettings
from holdfast import Anneal

pytestmark = pytest.mark.extras

KUHN = "kuhn_poker"
ALWAYS = LeagueSettings(share=1.0, activate_after_steps=0, recent=2, middle=1, old=1)


def make_policy(game: Any, seed: int = 0, hidden: int = 8) -> Policy:
    """Return a policy whose logits differ between situations."""
    torch.manual_seed(seed)
    policy = Policy(count_inputs(game), game.num_distinct_actions(), hidden)
    torch.nn.init.normal_(policy.act.weight)
    return policy


def make_sampler(temperature: float = 1.0, smoothing: float = 0.0) -> Sampler:
    return Sampler(Anneal(temperature, temperature, 1), Anneal(smoothing, smoothing, 1))


def make_rollouts(policy: Policy, league: League, rows: int = 8) -> Rollouts:
    game = load_game(KUHN)
    rollouts = Rollouts(Games(game, rows, 3), rows, policy, league, make_sampler(), torch.Generator().manual_seed(1))
    league.begin_step(0)
    return rollouts


# ---- memories


def test_finished_rows_are_reset_by_id() -> None:
    """Ids may be repeated, out of range or absent."""
    state = torch.randn(1440, 4096)
    reset = reset_rows(state, torch.tensor([2, 5, 5, 4096, -1]))
    changed = (reset != state).any(1).nonzero().squeeze(1)
    assert changed.tolist() == [2, 5]
    assert not reset[[2, 5]].any()
    assert torch.equal(reset_rows(state, torch.tensor([], dtype=torch.int64)), state)


def test_an_action_changes_only_the_memory_of_the_player_who_acts() -> None:
    policy, memory = make_policy(load_game(KUHN)), torch.randn(2, 2, 2, 8)
    _, _, after = policy.step(torch.randn(2, 11), torch.tensor([0, 1]), memory)
    assert torch.equal(after[0, 1], memory[0, 1])
    assert torch.equal(after[1, 0], memory[1, 0])
    assert (after[0, 0] != memory[0, 0]).all()
    assert (after[1, 1] != memory[1, 1]).all()


def test_an_action_depends_on_the_memory_of_the_player_who_acts_alone() -> None:
    policy, memory, seen = make_policy(load_game(KUHN)), torch.randn(2, 2, 2, 8), torch.randn(2, 11)
    seat = torch.tensor([0, 1])
    other, own = memory.clone(), memory.clone()
    other[0, 1], other[1, 0] = 0.0, 0.0
    own[0, 0], own[1, 1] = 0.0, 0.0
    logits = policy.step(seen, seat, memory)[0]
    assert torch.equal(policy.step(seen, seat, other)[0], logits)
    assert (policy.step(seen, seat, own)[0] != logits).any(1).all()


@torch.no_grad()
def test_training_sees_the_memories_of_the_rollout() -> None:
    """The logits and values of PPO's first pass are those with which the actions were sampled."""
    policy = make_policy(load_game(KUHN))
    rollouts = make_rollouts(policy, League(LeagueSettings(), policy, Accelerator(cpu=True)))
    noops = find_noops(load_game(KUHN), None)
    for rollout in (rollouts.collect(5, noops), rollouts.collect(5, noops)):
        logits, value = policy(rollout.seen, rollout.seat, rollout.ended, rollout.memory)
        chances = make_sampler().chances(logits, rollout.legal)
        assert torch.allclose(chances.gather(2, rollout.action[..., None])[..., 0].log(), rollout.chance, atol=1e-5)
        assert torch.allclose(value, rollout.value, atol=1e-5)
        assert rollout.ended.any()


# ---- the sampler


def test_actions_are_sampled_with_temperature_and_smoothing() -> None:
    logits, legal = torch.tensor([[2.0, 0.0, 9.0]]), torch.tensor([[True, True, False]])
    sampler = make_sampler(temperature=2.0, smoothing=0.1)
    share = 0.9 / (1 + math.exp(-1.0)) + 0.05
    assert torch.allclose(sampler.chances(logits, legal), torch.tensor([[share, 1 - share, 0.0]]))
    assert torch.allclose(sampler.policy(logits, legal)[0, 0], torch.tensor(1 / (1 + math.exp(-1.0))))


# ---- games


@pytest.mark.parametrize("name", [KUHN, "crazy_eights(players=2)"])
def test_games_are_restored_from_their_histories(name: str) -> None:
    game = load_game(name)
    games, other = Games(game, 3, 1), Games(game, 3, 2)

    def advance(games: Games) -> list[Tensor]:
        view = games.view(range(3))
        ended = games.play(range(3), view.legal.int().argmax(1).tolist())
        games.begin(ended)
        return [view.seen, view.legal, view.seat]

    for _ in range(4):
        advance(games)
    other.load_state_dict(games.state_dict())
    for _ in range(4):
        assert all(map(torch.equal, advance(games), advance(other)))


# ---- advantages


def make_rollout(seat: list[int], ended: list[bool], value: list[float], won: list[list[float]]) -> Rollout:
    """Return a rollout of one row in which the policy plays both seats."""
    ticks = len(seat)
    unused = torch.zeros(ticks, 1)
    return Rollout(
        seen=unused, legal=unused, seat=torch.tensor(seat)[:, None], action=unused, chance=unused,
        value=torch.tensor(value)[:, None], is_own=torch.ones(ticks, 1, dtype=torch.bool),
        ended=torch.tensor(ended)[:, None], won=torch.tensor(won)[:, None], memory=unused,
        next_seat=torch.tensor([0]), next_value=torch.tensor([7.0]), entropy=0.0, noop_rate=0.0,
    )  # fmt: skip


def test_an_actions_reward_is_what_its_seat_wins_before_it_acts_again() -> None:
    none, end = [0.0, 0.0], [4.0, -4.0]
    rollout = make_rollout([0, 1, 0, 1, 0], [False, False, True, False, False], [1.0, 2.0, 3.0, 5.0, 6.0],
                           [none, none, end, none, none])  # fmt: skip
    targets = estimate(rollout, scale=2.0, gamma=1.0, gae_lambda=0.5)
    # In seat 0 the third action wins 2, against 3 expected; the first leads to it. In seat 1 the second loses 2.
    assert targets.advantage[:, 0].tolist()[:3] == [3 - 1 + 0.5 * -1, -2 - 2, 2 - 3]
    assert targets.returns[:3, 0].tolist() == [2.5, -2.0, 2.0]
    assert targets.weight[:, 0].tolist() == [1, 1, 1, 0, 0], "what follows the last two isn't known"


def test_returns_are_scaled_by_their_deviation() -> None:
    scale, returns = ReturnScale(), torch.tensor([3.0, 1.0, 2.0, -2.0, 5.0])
    assert scale.value == 1.0
    scale.add(returns[:2])
    scale.add(returns[2:4])
    scale.add(returns[4:])
    scale.add(returns[:0])
    assert scale.value == pytest.approx(returns.std(correction=0).item())


def improve(ent_coef: float, advantage: float) -> tuple[Tensor, Tensor]:
    """Improve a policy towards Bet, which has the advantage over Pass. Return the chances before and after."""
    policy = make_policy(load_game(KUHN))
    league = League(LeagueSettings(), policy, Accelerator(cpu=True))
    rollout = make_rollouts(policy, league, 32).collect(4, find_noops(load_game(KUHN), None))
    better = torch.where(rollout.action == 1, advantage, -advantage)
    targets = Targets(better, rollout.value, torch.ones_like(rollout.value))
    learner = Learner(
        policy, torch.optim.Adam(policy.parameters(), 0.01), Accelerator(cpu=True), make_sampler(),
        Anneal(ent_coef, ent_coef, 1), TrainSettings(passes=4), torch.Generator(),
    )  # fmt: skip
    with torch.no_grad():
        before = policy(rollout.seen, rollout.seat, rollout.ended, rollout.memory)[0].softmax(-1)
    learner.improve(rollout, targets)
    with torch.no_grad():
        return before, policy(rollout.seen, rollout.seat, rollout.ended, rollout.memory)[0].softmax(-1)


def test_better_actions_become_more_likely() -> None:
    before, after = improve(ent_coef=0.0, advantage=1.0)
    assert (after > before)[..., 1].all()


def test_the_entropy_coefficient_makes_the_policy_more_even() -> None:
    before, after = improve(ent_coef=10.0, advantage=0.0)
    assert entropy(after).mean() > entropy(before).mean()


# ---- the league


def test_buckets_hold_recent_middle_and_old_snapshots() -> None:
    kept: set[int] = set()
    for number in range(1, 101):
        buckets = choose_buckets([*kept, number], LeagueSettings())
        kept = set().union(*buckets.values())
    assert buckets == {"recent": [100, 99, 98, 97, 96, 95], "middle": [93, 90, 87, 84], "old": [81, 72, 63]}


def test_the_lower_wilson_bound() -> None:
    assert wilson_lower(0, 0) == 0.0
    assert wilson_lower(60, 100) == pytest.approx(0.5020, abs=1e-4)
    assert wilson_lower(600, 1000) == pytest.approx(0.5693, abs=1e-4)


def test_a_champion_stays_until_it_is_beaten() -> None:
    policy = make_policy(load_game(KUHN))
    league = League(ALWAYS, policy, Accelerator(cpu=True))
    for step in range(1, 13):
        league.add_snapshot(step, policy)
    assert league.champion == 1
    assert sorted(member.number for member in league.members) == [1, 9, 11, 12]
    slot = next(member.slot for member in league.members if member.number == 1)
    league.count(torch.full((100,), slot), torch.tensor([1.0] * 60 + [0.0] * 5 + [-1.0] * 35))
    league.add_snapshot(13, policy)
    assert league.champion == 1, "62.5 of 100: the lower bound is 0.527"
    league.count(torch.full((200,), slot), torch.tensor([1.0] * 130 + [-1.0] * 70))
    league.count(torch.full((200,), SELF), -torch.ones(200))
    league.add_snapshot(14, policy)
    assert league.champion == 14
    assert 1 not in {member.number for member in league.members}


def test_a_member_plays_with_the_weights_of_its_snapshot() -> None:
    policy = make_policy(load_game(KUHN))
    league = League(ALWAYS, policy, Accelerator(cpu=True))
    before = {name: each.clone() for name, each in policy.state_dict().items()}
    league.add_snapshot(1, policy)
    with torch.no_grad():
        policy.act.bias.add_(1.0)
    slot = league.members[0].slot
    assert all(torch.equal(each, before[name]) for name, each in league.player(slot).state_dict().items())
    assert league.draw(5, torch.Generator()).tolist() == [SELF] * 5
    league.begin_step(0)
    assert league.draw(5, torch.Generator()).tolist() == [slot] * 5


def test_weights_that_are_not_those_of_a_member_are_refused() -> None:
    policy = make_policy(load_game(KUHN))
    league, other = (League(ALWAYS, policy, Accelerator(cpu=True)) for _ in range(2))
    league.add_snapshot(40, policy)
    other.players.load_state_dict(league.players.state_dict())
    other.load_state_dict(league.state_dict())
    assert other.state_dict() == league.state_dict()
    with torch.no_grad():
        other.player(league.members[0].slot).act.bias.add_(1e-6)
    with pytest.raises(ValueError, match="the opponent of step 40 had the hash"):
        other.load_state_dict(league.state_dict())


def test_games_against_a_member_that_leaves_begin_anew() -> None:
    policy = make_policy(load_game(KUHN))
    league = League(ALWAYS, policy, Accelerator(cpu=True))
    league.add_snapshot(1, policy)
    rollouts = make_rollouts(policy, league)
    rollouts.collect(4, find_noops(load_game(KUHN), None))
    slot = league.members[0].slot
    against = rollouts.opponent == slot
    assert against.any()
    rollouts.leave(torch.tensor([slot + 1]))
    assert (rollouts.opponent[against] == slot).all()
    league.members.clear()
    rollouts.leave(torch.tensor([slot]))
    assert not (rollouts.opponent == slot).any()
    assert not rollouts.memory[against].any()


def test_only_the_policys_own_actions_are_trained() -> None:
    policy = make_policy(load_game(KUHN))
    league = League(ALWAYS, policy, Accelerator(cpu=True))
    league.add_snapshot(1, make_policy(load_game(KUHN), seed=5))
    rollouts = make_rollouts(policy, league)
    rollouts.begin(torch.arange(8))
    rollout = rollouts.collect(6, find_noops(load_game(KUHN), None))
    assert 0 < rollout.is_own.sum() < rollout.is_own.numel()
    assert not estimate(rollout, 1.0, 1.0, 0.95).weight[~rollout.is_own].any()


# ---- evaluation


def test_nash_conv_of_the_even_policy_is_known() -> None:
    """In Kuhn poker a best response to an even opponent wins 1/2 in the first seat and 5/12 in the second."""
    game = load_game(KUHN)
    policy = make_policy(game)
    torch.nn.init.zeros_(policy.act.weight)
    tree = find_tree(game, 1000)
    assert tree is not None
    assert tree.nash_conv(policy, make_sampler()) == pytest.approx(11 / 12)
    assert find_tree(game, 20) is None


@torch.no_grad()
def test_nash_conv_knows_what_the_policy_remembers() -> None:
    """The chances of each information state are those of a policy that has played to it."""
    game = load_game("leduc_poker")
    policy, sampler, games = make_policy(game), make_sampler(1.2, 0.05), Games(game, 40, 1)
    tree = find_tree(game, 20_000)
    assert tree is not None
    known, memory, live = tree.chances(policy, sampler), policy.begin(40), [*range(40)]
    assert len(known) == 936
    while live:
        view = games.view(live)
        logits, _, memory[live] = policy.step(view.seen, view.seat, memory[live])
        for row, chances in zip(live, sampler.chances(logits, view.legal), strict=True):
            expected = dict(known[games._states[row].information_state_string()])
            assert {action: float(chances[action]) for action in expected} == pytest.approx(expected, abs=1e-5)
        ended = games.play(live, view.legal.int().argmax(1).tolist())
        live = [row for row in live if row not in ended]


def test_nash_conv_of_an_equilibrium_is_zero() -> None:
    """A policy that reads its chances from the information state plays the equilibrium of Kuhn (1950) with alpha 0."""
    bets = {
        "0": 0.0, "1": 0.0, "2": 0.0, "0pb": 0.0, "1pb": 1 / 3, "2pb": 1.0,
        "0p": 1 / 3, "1p": 0.0, "2p": 1.0, "0b": 0.0, "1b": 1 / 3, "2b": 1.0,
    }  # fmt: skip
    game = load_game(KUHN)
    tree = find_tree(game, 1000)
    assert tree is not None
    names = [name for level in tree._levels for name in level.names]
    assert sorted(names) == sorted(bets)
    policy, told = make_policy(game), iter(tree._levels)

    def step(seen: Tensor, seat: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chances = torch.tensor([[1 - bets[name], bets[name]] for name in next(told).names])
        return chances.log().clamp_min(-60.0), torch.zeros(len(seen)), memory

    policy.step = step  # type: ignore[method-assign]
    assert tree.nash_conv(policy, make_sampler()) == pytest.approx(0.0, abs=1e-6)


def test_seeded_games_are_the_same_games() -> None:
    game = load_game(KUHN)
    policy, noops = make_policy(game), find_noops(game, None)
    one, same, other = (
        play(game, policy, make_sampler(), noops, 50, seed, is_alone=False).describe() for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other
    assert 2 <= one["mean_length"] <= 3


def test_a_policy_remembers_its_own_actions_in_seeded_games() -> None:
    game, remembered = load_game(KUHN), []
    policy = make_policy(game)
    step = policy.step

    def watch(seen: Tensor, seat: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        remembered.append(memory[torch.arange(len(seat)), seat].flatten(1).any(1))
        return step(seen, seat, memory)

    policy.step = watch  # type: ignore[method-assign]
    play(game, policy, make_sampler(), find_noops(game, None), 20, 1, is_alone=False)
    assert [bool(each.any()) for each in remembered[:2]] == [False, False]
    assert remembered[2].all(), "the third action is the first seat's second"


def test_a_policy_that_always_bets_takes_no_noop() -> None:
    game = load_game(KUHN)
    policy, noops = make_policy(game), find_noops(game, None)
    torch.nn.init.zeros_(policy.act.weight)
    with torch.no_grad():
        policy.act.bias.copy_(torch.tensor([-60.0, 0.0]))
    played = play(game, policy, make_sampler(), noops, 20, 1, is_alone=True)
    assert played.choices.noop_rate == 0.0
    assert played.lengths == [2] * 20
    even = play(game, policy, make_sampler(smoothing=1.0), noops, 200, 1, is_alone=False)
    assert even.describe()["noop_rate"] == pytest.approx(0.5, abs=0.1)
