"""A recipe on a machine in which one bit flips, once or in each step from one on, at a place of the step."""

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from holdfast import Recipe
from holdfast.machine.host import VARIABLE

# The variables with a `Flip` as JSON, and with a file that the first flip makes.
FLIP, STRUCK = "STRUCK_FLIP", "STRUCK_FILE"
STEPS_PER_EPOCH = 9
WORDS = 624  # of the state of torch's generator on a CPU, each in eight bytes after 24 others
Place = Literal["sample", "generator", "activation", "gradient", "reduction", "moment", "weight"]
PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True)
class Flip:
    """A flip of one bit on one machine.

    Args:
        place: a ``sample`` in memory, a word of the ``generator`` that dropout draws from, an ``activation``, a
            ``gradient`` before the ranks' are reduced, the ``reduction``'s result on one rank, a ``moment`` of the
            optimizer, or a ``weight``.
        host: the machine.
        step: the step in which the bit flips.
        rank: the rank on which it does.
        bit: its number in a float32, or in a word of the generator; 31 is the sign.
        element: the number of the value, modulo how many there are.
        is_sticky: whether the bit flips in all later steps, too.
    """

    place: Place
    host: str
    step: int
    rank: int
    bit: int
    element: int
    is_sticky: bool

    def variables(self, file: Path) -> dict[str, str]:
        """Return the variables that plant the flip in ranks."""
        return {FLIP: json.dumps(dataclasses.asdict(self)), STRUCK: str(file)}

    def strike(self, values: Tensor) -> None:
        """Flip the bit of the chosen value of a tensor, in place."""
        flat = values.detach().view(torch.int32).view(-1)
        flat[self.element % len(flat)] ^= _as_int32(1 << self.bit)

    def strike_copy(self, values: Tensor) -> Tensor:
        """Return the tensor with the bit flipped; the gradient passes as if nothing were."""
        copy = values.detach().clone(memory_format=torch.contiguous_format)
        self.strike(copy)
        # The difference of a value to itself is 0, so that the sum has the flipped bits, and the gradient's path.
        return copy + (values - values.detach()) if values.requires_grad else copy

    def strike_generator(self) -> None:
        """Flip the bit of a word of torch's generator."""
        state = torch.get_rng_state()
        words = state[24 : 24 + 8 * WORDS].view(torch.int64)
        words[self.element % WORDS] ^= 1 << self.bit
        torch.set_rng_state(state)


def _as_int32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


class Striker:
    """The flip that the variables plant in this process, if there is one for this machine and rank."""

    def __init__(self) -> None:
        flip = Flip(**json.loads(os.environ[FLIP])) if os.environ.get(FLIP) else None
        rank = int(os.environ.get("RANK", "0"))
        is_here = flip is not None and (flip.host, flip.rank) == (os.environ.get(VARIABLE), rank)
        self.flip = flip if is_here else None

    def strike(self, place: Place, step: int, act: Callable[[Flip], object]) -> None:
        """Do the act if the flip is due at this place of a step. The first one makes the file."""
        flip = self.flip
        if flip is None or flip.place != place or step < flip.step or (step > flip.step and not flip.is_sticky):
            return
        file = Path(os.environ[STRUCK])
        if file.exists() and not flip.is_sticky:
            return
        file.touch()
        act(flip)


class Activated(nn.Module):
    """A layer whose output may have a flipped bit."""

    def __init__(self, layer: nn.Module, strike: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self._strike = layer, strike

    def forward(self, given: Tensor) -> Tensor:
        out: Tensor = self._strike(self.layer(given))
        return out


def struck(compiles: bool = False) -> Recipe:
    """Build a small network with dropout. Steps are counted by the optimizer.

    Args:
        compiles: whether torch.compile compiles a layer, with a backend that needs no compiler.
    """
    striker, generator = Striker(), torch.Generator().manual_seed(7)
    points = torch.randn(256, 8, generator=generator)
    targets = points.sum(1, keepdim=True) + torch.randn(256, 1, generator=generator)

    def step() -> int:
        """Return the number of the step in hand."""
        return int(optimizer.state[weights[0]].get("step", 0)) + 1

    def strike_values(place: Place, values: Tensor) -> Tensor:
        found = [values]
        if torch.is_grad_enabled():
            striker.strike(place, step(), lambda flip: found.append(flip.strike_copy(values)))
        return found[-1]

    first = Activated(nn.Linear(8, 16), lambda values: strike_values("activation", values))
    hidden = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))
    if compiles:
        hidden.compile(backend="aot_eager")
    model = nn.Sequential(first, nn.Tanh(), hidden, nn.Linear(16, 1))
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=0.05)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        given, wanted = batch
        if torch.is_grad_enabled():
            striker.strike("generator", step(), Flip.strike_generator)
        return F.mse_loss(model(strike_values("sample", given)), wanted)

    def choose(flip: Flip) -> Tensor:
        return weights[flip.element % len(weights)]

    def strike_reduced(*_: object) -> None:
        def act(flip: Flip) -> None:
            gradient = choose(flip).grad
            assert gradient is not None
            flip.strike(gradient)

        striker.strike("reduction", step(), act)

    def after_step() -> None:
        done = step() - 1
        striker.strike("weight", done, lambda flip: flip.strike(choose(flip)))
        moments = ("exp_avg", "exp_avg_sq")
        striker.strike(
            "moment", done, lambda flip: flip.strike(optimizer.state[choose(flip)][moments[flip.element // 7 % 2]])
        )

    def strike_gradient(gradient: Tensor) -> Tensor:
        found = [gradient]
        striker.strike("gradient", step(), lambda flip: found.append(flip.strike_copy(gradient)))
        return found[-1]

    if striker.flip:
        choose(striker.flip).register_hook(strike_gradient)  # type: ignore[no-untyped-call]
        optimizer.register_step_pre_hook(strike_reduced)

    return Recipe(
        model=model,
        data=TensorDataset(points, targets),
        optimizer=optimizer,
        loss=loss,
        batch_size=8,
        steps_per_epoch=STEPS_PER_EPOCH,
        clip_norm=1.0,
        after_step=after_step,
    )
