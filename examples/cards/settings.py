"""The settings of the cards recipe: ``[settings]`` and its tables."""

from typing import ClassVar

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from holdfast import Anneal, Limits
from holdfast.errors import ConfigError


class Annealed(BaseModel):
    """A table with the settings of annealed values; see `Anneal.from_settings`.

    A value without ``_final`` stays at ``_initial``.
    """

    table: ClassVar[str]

    def anneal(self, name: str, epochs: float, smallest: float, largest: float) -> Anneal:
        """Return the anneal of a value.

        Args:
            epochs: the length that the fractions refer to.
            smallest, largest: the range of the value.

        Raises:
            ConfigError: a setting is out of range.
        """
        settings = self.model_dump()
        if settings[f"{name}_final"] is None:
            settings[f"{name}_final"] = settings[f"{name}_initial"]
        for end in ("initial", "final"):
            value = settings[f"{name}_{end}"]
            if not smallest <= value <= largest:
                raise ConfigError(f"{self.table}.{name}_{end} = {value!r}: expected {smallest:g} to {largest:g}")
        return Anneal.from_settings(name, settings, epochs, table=self.table)


class PolicySettings(Annealed):
    """``[settings.policy]``: the network, and how actions are sampled from it."""

    table: ClassVar[str] = "settings.policy"

    hidden: PositiveInt = Field(32, description="the size of the LSTM's state")
    subaction_temperature_initial: float = 1.2
    subaction_temperature_final: float | None = None
    subaction_temperature_anneal_start_frac: float = 0.0
    subaction_temperature_anneal_end_frac: float = 1.0
    subaction_temperature_anneal_start_step: int | None = None
    subaction_temperature_anneal_end_step: int | None = None
    smoothing_eps_initial: float = 0.05
    smoothing_eps_final: float | None = None
    smoothing_eps_anneal_start_frac: float = 0.0
    smoothing_eps_anneal_end_frac: float = 1.0
    smoothing_eps_anneal_start_step: int | None = None
    smoothing_eps_anneal_end_step: int | None = None


class TrainSettings(Annealed):
    """``[settings.train]``: rollouts, and the updates of PPO."""

    table: ClassVar[str] = "settings.train"

    steps_per_epoch: PositiveInt = 50
    rows: PositiveInt = Field(256, description="games that each rank plays at a time")
    ticks: int = Field(8, ge=2, description="actions that a step takes in each game")
    lr: PositiveFloat = 2e-3
    final_lr_scale: float = Field(1.0, gt=0, le=1, description="of the rate after schedule_epochs; it falls on a line")
    passes: PositiveInt = Field(2, description="passes over a rollout")
    minibatches: PositiveInt = Field(1, description="minibatches of a pass, each of some of the games")
    gamma: float = Field(1.0, gt=0, le=1, description="the discount of each own action")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="the decay of generalized advantage estimation")
    clip: PositiveFloat = Field(0.2, description="the range in which PPO's ratio counts")
    value_coef: NonNegativeFloat = 0.5
    clip_norm: PositiveFloat = 0.5
    ent_coef_initial: float = 0.1
    ent_coef_final: float | None = None
    ent_coef_anneal_start_frac: float = 0.0
    ent_coef_anneal_end_frac: float = 1.0
    ent_coef_anneal_start_step: int | None = None
    ent_coef_anneal_end_step: int | None = None


class LeagueSettings(BaseModel):
    """``[settings.league]``: past policies as opponents."""

    share: float = Field(0.25, ge=0, le=1, description="the share of games against the league, once it is active")
    activate_after_steps: NonNegativeInt = Field(50, description="steps of self-play alone")
    snapshot_every_steps: PositiveInt = Field(10, description="steps between two snapshots of the policy")
    recent: PositiveInt = Field(6, description="members that are the newest snapshots")
    middle: NonNegativeInt = Field(4, description="members that are older: every third snapshot")
    old: NonNegativeInt = Field(3, description="members that are older still: every ninth snapshot")
    promote_above: float = Field(0.55, ge=0, lt=1, description="the lower Wilson bound that makes a new champion")


class EvaluationSettings(BaseModel):
    """``[settings.evaluation]``: what is measured at the end of an epoch."""

    games: PositiveInt = Field(1000, description="seeded games against an opponent that plays at random")
    seed: NonNegativeInt = 7
    nash_conv_histories: NonNegativeInt = Field(
        20_000, description="NashConv is computed for games with at most this many histories"
    )


class HealthSettings(BaseModel):
    """``[settings.health]``: the limits of a healthy policy."""

    min_entropy: NonNegativeFloat = Field(0.02, description="nats")
    max_noop_rate: float = Field(0.95, ge=0, le=1)
    probe_games: PositiveInt = Field(128, description="games of the probe, from their beginning")

    def limits(self) -> dict[str, Limits]:
        """Return the limits of the probe's numbers."""
        entropy, noop_rate = Limits(min=self.min_entropy), Limits(max=self.max_noop_rate)
        return {
            "entropy": entropy,
            "noop_rate": noop_rate,
            "rollout_entropy": entropy,
            "rollout_noop_rate": noop_rate,
        }


class Settings(BaseModel):
    """``[settings]``: the game, and the tables below."""

    game: str = Field("kuhn_poker", description="a two-player game of OpenSpiel, such as crazy_eights(players=2)")
    noop_actions: list[str] | None = Field(
        None, description='actions that do nothing, by name; by default "Pass" if the game has it'
    )
    schedule_epochs: PositiveFloat = Field(6.0, description="the length that the fractions of anneals refer to")
    policy: PolicySettings = PolicySettings()
    train: TrainSettings = TrainSettings()
    league: LeagueSettings = LeagueSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    health: HealthSettings = HealthSettings()
