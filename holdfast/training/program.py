"""The program that is trained: a recipe, whose steps the engine takes, or a loop of the user's own.

Wherever recipes and loops differ, a `Training` calls its program.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import nn

from holdfast.config import RunConfig
from holdfast.config.steps import Steps
from holdfast.data import refuse_inexact, take_apart
from holdfast.errors import ConfigError, RecipeError
from holdfast.recipe import Recipe, Stateful
from holdfast.recipe.function import build_recipe
from holdfast.state import is_sharded
from holdfast.training.cooperation import Cooperation
from holdfast.training.data_ranks import DataRanks
from holdfast.training.devices import moves_model, prepare_device
from holdfast.training.kept import GRADIENTS, PRUNED, Kept
from holdfast.training.left_gradients import Gradients
from holdfast.training.optimizers import Optimizers, parts_of, refuse_partitioned
from holdfast.training.placement import find_data_groups, place_modules
from holdfast.training.pruned import find_pruned


@dataclass(frozen=True)
class Advice:
    """Hints for errors, worded for a recipe or for a loop.

    Attributes:
        numbers: the hint if the ranks log different numbers.
        model: the hint if the ranks have different weights.
        optimizer: the hint if the ranks have different states of the optimizer.
        health: the hint if the model isn't healthy.
        shares: the hint if a share of a batch changes state that all shares have in common.
        stepped: the hint if an optimizer steps a parameter that was added after the first step.
        saved: the hint if an optimizer steps a parameter that belongs to no saved object.
    """

    numbers: str
    model: str
    optimizer: str
    health: str
    shares: str
    stepped: str
    saved: str


class Program(abc.ABC):
    """A program that is built and ready for a `Training`.

    Attributes:
        recipe: the recipe; for a loop, its kept objects in the form of a recipe.
        settings: the settings that the program was built with, defaults included.
        advice: hints for errors, worded for this kind of program.
        keeps_seeds: whether to keep the seeds that the program may have set in each rank.
        can_go_back: whether a rank can undo a step that it hasn't completed.
        data_ranks: which ranks train the same samples, if the program has set this; otherwise None.
        framework: the framework that runs the loop, such as ``a Lightning Trainer``; empty if there is none.
        skipped: the steps whose batches are drawn, but not trained; see `skipped_steps`.
    """

    framework = ""
    skipped = Steps()
    advice: Advice
    keeps_seeds: bool
    can_go_back: bool

    def __init__(
        self, accelerator: Accelerator, recipe: Recipe, settings: dict[str, Any], data_ranks: DataRanks | None = None
    ) -> None:
        self.accelerator, self.recipe, self.settings, self.data_ranks = accelerator, recipe, settings, data_ranks

    @property
    @abc.abstractmethod
    def batch_size(self) -> int | None:
        """Return the number of samples of a batch over all ranks; None if only the program's own code knows it."""

    @abc.abstractmethod
    def take_data(self) -> Any:
        """Return the data from which the batches are loaded; for a wrapped loader, the loader inside (`take_apart`)."""

    @abc.abstractmethod
    def prepare(self, config: RunConfig, ranks: Cooperation) -> tuple[Any, Any]:
        """Make the modules ready to train in this rank.

        Returns:
            The model and the optimizer for the steps: the recipe's, or wrappers of the recipe's model and optimizer.

        Raises:
            RecipeError, ConfigError: the modules or the optimizer don't fit the configuration.
        """


class RecipeProgram(Program):
    """A recipe as a program: the engine trains the steps."""

    advice = Advice(
        numbers="return numbers of the same names and shapes in all ranks",
        model="step the recipe's optimizers only, whose gradients are averaged over the ranks",
        optimizer="step the recipe's optimizers only, whose gradients are averaged over the ranks",
        health="check the limits in Recipe(health=...); an earlier checkpoint is still healthy",
        shares="change extras in after_step, which all ranks call alike, or set compute.virtual_ranks = 0",
        stepped="build all modules before the first step, and give their parameters to the optimizers then",
        saved="put the parameter into the model or a module in extras; a state_dict hook may leave the parameter out",
    )
    keeps_seeds = False
    can_go_back = True

    @property
    def batch_size(self) -> int | None:
        return self.recipe.batch_size or getattr(self.recipe.data, "batch_size", None)

    def take_data(self) -> Any:
        return take_apart(self.recipe.data, "Recipe(data=dataset, batch_size=...)")

    def prepare(self, config: RunConfig, ranks: Cooperation) -> tuple[Any, Any]:
        """Move the modules to the device. Return model and optimizer as accelerate has prepared them for the step."""
        recipe, accelerator = self.recipe, self.accelerator
        if isinstance(recipe.optimizer, Mapping):
            recipe.optimizer = Optimizers(recipe.optimizer)  # type: ignore[assignment]
        for part in parts_of(recipe.optimizer):
            refuse_partitioned("the recipe's optimizer", part)
        ranks.check_optimizer(recipe.optimizer)
        place_modules(config, recipe, accelerator)
        ranks.attach([recipe.model])
        for name, extra in recipe.extras.items():
            refuse_inexact(f"Recipe(extras={{{name!r}: ...}})", extra)
            if isinstance(extra, nn.Module) and not any(map(is_sharded, extra.parameters())):
                extra.to(accelerator.device)
        pruned = None if any(map(is_sharded, recipe.model.parameters())) else find_pruned(recipe.model)
        if pruned is not None:
            self._add_own(PRUNED, pruned)
        optimizer: Any = recipe.optimizer
        if accelerator.scaler is not None and (recipe.step is not None or isinstance(optimizer, Optimizers)):
            raise ConfigError(
                'compute.mixed_precision = "fp16": one GradScaler can\'t serve several optimizers or Recipe(step=...)',
                hint='set mixed_precision = "bf16", or write a loop of your own with run.accelerator',
            )
        if recipe.step is not None:
            recipe.model.to(accelerator.device)
            self._add_own(GRADIENTS, Gradients(recipe.model, optimizer))
            return recipe.model, optimizer
        accelerator.gradient_accumulation_steps = recipe.grad_accum
        if not ranks.sums_gradients and config.compute.parallel == "ddp":
            # Each step begins without gradients. So gradients may be views of DDP's buckets, which saves the memory of
            # a copy.
            accelerator.ddp_handler.gradient_as_bucket_view = True
            model = accelerator.prepare(recipe.model, device_placement=[moves_model(accelerator, recipe.model)])
        else:  # don't wrap in DDP: the ranks sum the gradients themselves, or FSDP2 sums the gradients of shards
            is_moved = moves_model(accelerator, recipe.model)
            model = accelerator.prepare_model(recipe.model, device_placement=is_moved, evaluation_mode=True)
        if isinstance(optimizer, Optimizers):
            return model, Optimizers({name: accelerator.prepare(part) for name, part in optimizer.parts.items()})
        return model, accelerator.prepare(optimizer)

    def _add_own(self, name: str, extra: Stateful) -> None:
        """Add one of Holdfast's own extras to the recipe's extras."""
        if name in self.recipe.extras:
            raise RecipeError(
                f"Holdfast needs the name {name!r} for an extra of its own, but the recipe has an extra of this name",
                hint="give your extra another name",
            )
        self.recipe.extras = {**self.recipe.extras, name: extra}


class LoopProgram(Program):
    """A loop of the user's own as a program: the loop trains the steps, with the objects that it keeps."""

    advice = Advice(
        numbers="call run.log with the same names in all ranks",
        model="call model = run.wrap(model), so that all ranks train one model; freeze parameters only after it",
        optimizer='the optimizer may read only values that all ranks share: run.accelerator.reduce(loss, "mean")',
        health="an earlier checkpoint is still healthy; don't log a loss that isn't finite if the loop skips its step",
        shares="change weights and kept objects after the loop over step.shares(), not inside it",
        stepped="build and keep all modules before the first step, and give their parameters to the optimizers then",
        saved="keep the module that has the parameter: run.keep(model=model, ...)",
    )
    keeps_seeds = True
    can_go_back = False

    def __init__(
        self, accelerator: Accelerator, kept: Kept, settings: dict[str, Any], data_ranks: DataRanks | None = None
    ) -> None:
        super().__init__(accelerator, kept, settings, data_ranks)
        self._trained = list(kept.trained.values())

    @property
    def batch_size(self) -> int | None:
        return self.recipe.batch_size

    def take_data(self) -> Any:
        return self.recipe.data  # `Run.steps` has already called `take_apart`

    def prepare(self, config: RunConfig, ranks: Cooperation) -> tuple[Any, Any]:
        ranks.check_optimizer(self.recipe.optimizer)
        ranks.attach(self._trained)
        if not ranks.has_common_state:
            ranks.find_stages(self.recipe.model, is_told=self.data_ranks is not None)
        return self.recipe.model, self.recipe.optimizer


def build_program(config: RunConfig) -> Program:
    """Make this process deterministic, build a configuration's recipe in it, and return the recipe as a program.

    Raises:
        RecipeError: the recipe can't be built.
        ConfigError: the recipe doesn't fit the configuration.
    """
    accelerator = prepare_device(config)
    built = build_recipe(config.recipe, config.settings, accelerator.device)
    return RecipeProgram(accelerator, *built, data_ranks=find_data_groups(config, accelerator))
