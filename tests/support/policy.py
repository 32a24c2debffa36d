"""A policy that collapses after a given step: from then on it chooses the no-op with certainty.

Health has limits if the environment has POLICY_LIMITS, so that a run without limits can be continued with them.
"""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from holdfast import Limits, Recipe

ACTIONS, NOOP = 4, 0
LIMITS = {"entropy": Limits(min=0.05), "noop_rate": Limits(max=0.9)}


class Policy(nn.Module):
    """A model from observations (batch, 6) to logits of actions (batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, ACTIONS)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, seen: Tensor) -> Tensor:
        logits: Tensor = self.out(seen)
        return logits


def policy(collapse_at: int = 10**9) -> Recipe:
    """Build the recipe. From step ``collapse_at`` on, its weights make every action the no-op."""
    generator = torch.Generator().manual_seed(5)
    seen = torch.randn(40, 6, generator=generator)
    model = Policy()

    def loss(model: Policy, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[0].argmax(1) % ACTIONS)

    @torch.no_grad()
    def after_step() -> None:
        model.steps += 1
        if model.steps >= collapse_at:
            model.out.weight.zero_()
            model.out.bias.copy_(torch.tensor([14.0, 0.0, 0.0, 0.0]))

    def probe(model: nn.Module) -> dict[str, Tensor]:
        chances = model(seen).softmax(1)
        entropy = -(chances * chances.log()).sum(1).mean()
        return {"chances": chances, "entropy": entropy, "noop_rate": (chances.argmax(1) == NOOP).float().mean()}

    return Recipe(
        model=model, data=TensorDataset(seen), optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), loss=loss,
        batch_size=4, after_step=after_step, probe=probe, health=LIMITS if "POLICY_LIMITS" in os.environ else {},
    )  # fmt: skip
