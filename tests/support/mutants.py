"""Mutations that make a resume almost right, and the check that catches each: faults in a rank, and careless recipes.

Each row of MUTATIONS is a test with real ranks in `tests/holdfast/proof/test_mutants.py`, and a row of
docs/data/faults.csv. `tests.support.forked` applies a fault in the ranks before they begin; all else is unchanged code.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support import rank_faults


@dataclass(frozen=True)
class Mutation:
    """A fault in the code of a rank, or in a recipe.

    Args:
        name: the mutation's name in docs/data/faults.csv.
        caught_by: ``gate``: the gate refuses to resume; ``prove``: the proof ends on different bytes; ``search``: the
            bytes are equal and it is proved, and the proof names the state that no checkpoint has; ``audit``: the
            replay ends on different bytes; ``start``: the recipe isn't built.
        named: a part of the message, which names the state that is wrong.
        apply: puts the fault into the rank's code.
        recipe, settings: the recipe to train, and its settings.
        ranks: the number of ranks.
        virtual_ranks: the number of virtual ranks.
    """

    name: str
    caught_by: Literal["gate", "prove", "search", "audit", "start"]
    named: str
    apply: Callable[[], None] = lambda: None
    recipe: str = "tests.support.varied:averaged"
    settings: Mapping[str, Any] = field(default_factory=lambda: {"schedule": "cosine"})
    ranks: int = 1
    virtual_ranks: int = 0


def careless(name: str, caught_by: Any, named: str, recipe: str, ranks: int = 1, **settings: Any) -> Mutation:
    """Return a row for a recipe of `tests.support.careless`."""
    return Mutation(name, caught_by, named, recipe=f"tests.support.careless:{recipe}", settings=settings, ranks=ranks)


def _restoring(change: Callable[[Any, dict[str, Any], Callable[..., None]], None]) -> None:
    """Replace `capturing.restore` by ``change(training, saved, right)``, where ``right`` is the original function."""
    from holdfast.training import capturing

    right = capturing.restore
    capturing.restore = lambda training, saved: change(training, saved, right)


def forget_the_scheduler() -> None:
    def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
        right(training, saved | {"schedulers": [each.state_dict() for each in training.schedulers]})

    _restoring(restore)


def forget_one_rng() -> None:
    import numpy as np

    def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
        right(training, saved)
        states = training.generators.state_dict()
        training.generators.load_state_dict(states | {"numpy": np.random.get_state(legacy=False)})

    _restoring(restore)


def forget_the_position() -> None:
    from holdfast.data import Batches

    right = Batches.begin
    Batches.begin = lambda self, step, stop, *rest: right(self, 0, stop, *rest)  # type: ignore[method-assign]


def overwrite_the_restored_lr() -> None:
    def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
        right(training, saved)
        for group in training.optimizer.param_groups:
            group["lr"] = group["initial_lr"]

    _restoring(restore)


def skip_the_average() -> None:
    def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
        right(
            training, saved | {"extras": [{name: extra.state_dict() for name, extra in training.recipe.extras.items()}]}
        )

    _restoring(restore)


def determinism_after_the_model() -> None:
    from holdfast.machine import determinism
    from holdfast.training import build

    right, build_recipe = determinism.apply, build.build_recipe

    def build_then_apply(*arguments: Any) -> Any:
        built = build_recipe(*arguments)
        right(*late)
        return built

    late: list[Any] = []
    determinism.apply = lambda *arguments: late.extend(arguments)
    build.build_recipe = build_then_apply


def shuffle_with_the_global_rng() -> None:
    import numpy as np

    from holdfast.data import Order

    passes: dict[int, Any] = {}

    def step_indices(self: Order, step: int) -> Any:
        number, within = divmod(step, self.steps_per_pass)
        if number not in passes:
            passes[number] = np.random.permutation(self.samples)
        size = self.batch_size * self.grad_accum
        return passes[number][within * size : (within + 1) * size].reshape(self.grad_accum, self.batch_size)

    Order.step_indices = step_indices  # type: ignore[method-assign]


def resume_at_the_wrong_step() -> None:
    def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
        right(training, saved)
        training.progress.step -= 1

    _restoring(restore)


def optimizer_of_another_commit() -> None:
    from holdfast import checkpoint, state
    from holdfast.config import RunConfig
    from holdfast.journal import Journal
    from holdfast.store import open_store

    config = RunConfig.model_validate_json(os.environ["HOLDFAST_CONFIG"])

    def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
        journal = Journal(open_store(config.store), config.run)
        other = state.from_payload(checkpoint.read_payload(journal.store, journal.read_commit(1)))
        right(training, saved | {"optimizer": other["optimizer"]})

    _restoring(restore)


def with_two_ranks(name: str, named: str, part: str) -> Mutation:
    """Return a row in which both ranks restore what the first one saved of a component."""

    def apply() -> None:
        def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
            right(training, saved | {part: [saved[part][0]] * 2})

        _restoring(restore)

    return Mutation(name, "gate", named, apply, "tests.support.varied:normalised", {}, ranks=2)


def forget(part: str, name: str, value: Any) -> Callable[[], None]:
    """Return a fault that restores a different value in place of one saved value of a component."""

    def apply() -> None:
        def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
            right(training, saved | {part: saved[part] | {name: value}})

        _restoring(restore)

    return apply


def forget_a_buffer() -> None:
    def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
        right(training, saved)
        training.accelerator.unwrap_model(training.model)[1].reset_running_stats()

    _restoring(restore)


def exchange_moments() -> None:
    """Exchange the moments of two tensors of one shape."""

    def restore(training: Any, saved: dict[str, Any], right: Callable[..., None]) -> None:
        right(training, saved)
        norm, state = training.accelerator.unwrap_model(training.model)[1], training.optimizer.state
        state[norm.weight], state[norm.bias] = state[norm.bias], state[norm.weight]

    _restoring(restore)


def after_the_gate(change: Callable[[Any, Any], object]) -> Callable[[], None]:
    """Return a fault that calls ``change(training, model)`` between the gate and the first resumed step."""

    def apply() -> None:
        from holdfast.rank import restore

        right = restore.resume

        def resume(training: Any, *arguments: Any) -> Any:
            resumed = right(training, *arguments)
            change(training, training.accelerator.unwrap_model(training.model))
            return resumed

        restore.resume = resume

    return apply


def flip(tensor: Any) -> None:
    """Flip one bit of the first number."""
    import torch

    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)


def draw(training: Any, model: Any) -> None:
    import random

    with training.generators.training():
        random.random()


def in_rank_1(name: str, named: str, change: Callable[[Any], object], recipe: str, virtual_ranks: int = 0) -> Mutation:
    """Return a row for a fault of `rank_faults`, in the second of two ranks."""
    apply = after_the_gate(rank_faults.in_one_rank(change))
    return Mutation(name, "prove", named, apply, f"tests.support.{recipe}", {}, ranks=2, virtual_ranks=virtual_ranks)


MUTATIONS = [
    Mutation("forget the scheduler", "gate", "schedulers.0", forget_the_scheduler),
    Mutation("forget the state of one random generator", "gate", "rng.0.numpy", forget_one_rng),
    Mutation("forget the loader's position", "prove", "samples", forget_the_position),
    Mutation("overwrite the restored lr", "gate", "optimizer.param_groups.", overwrite_the_restored_lr),
    Mutation("skip the EMA", "gate", "extras.0.average", skip_the_average),
    Mutation(
        "set the determinism flags after the model is built",
        "start",
        "use_deterministic_algorithms",
        determinism_after_the_model,
    ),
    Mutation("shuffle with the global random generator", "prove", "samples", shuffle_with_the_global_rng),
    Mutation("resume at the wrong step", "gate", "progress.step", resume_at_the_wrong_step),
    Mutation("load the optimizer of another commit", "gate", "optimizer.", optimizer_of_another_commit),
    Mutation("forget the epoch's losses", "gate", "progress.epoch_loss_sum", forget("progress", "epoch_loss_sum", 0.0)),
    Mutation("forget the results of the epochs before", "gate", "progress.history", forget("progress", "history", [])),
    Mutation("forget the batch norm's statistics", "gate", "model.1.", forget_a_buffer),
    Mutation("exchange the moments of two tensors", "gate", "optimizer.state.1.", exchange_moments),
    Mutation(
        "a bit of a weight, flipped after the gate",
        "prove",
        "loss",
        after_the_gate(lambda training, model: flip(model[0].weight)),
    ),
    Mutation(
        "a bit of a moment, flipped after the gate",
        "prove",
        "optimizer.exp_avg",
        after_the_gate(lambda training, model: flip(training.optimizer.state[model[0].weight]["exp_avg"])),
    ),
    Mutation(
        "a bit of a buffer, flipped after the gate",
        "prove",
        "buffers",
        after_the_gate(lambda training, model: flip(model[1].running_var)),
    ),
    Mutation(
        "a learning rate, changed after the gate",
        "prove",
        "lrs",
        after_the_gate(lambda training, model: training.optimizer.param_groups[0].update(lr=0.02)),
    ),
    Mutation(
        "a scheduler, stepped after the gate",
        "prove",
        "optimizer",
        after_the_gate(lambda training, model: vars(training.schedulers[0]).update(last_epoch=1)),
    ),
    Mutation("a random number, drawn after the gate", "prove", "rng", after_the_gate(draw)),
    with_two_ranks("the first rank's generators, restored in both ranks", "rng.1.", "rng"),
    with_two_ranks("the first rank's normaliser, restored in both ranks", "extras.1.normaliser.mean", "extras"),
    in_rank_1("a random number, drawn in one rank alone", "generators of rank 1", rank_faults.draw, "shares:counted"),
    in_rank_1(
        "one rank takes the other rank's samples",
        "samples of rank 1",
        rank_faults.take_the_first_share,
        "shares:counted",
    ),
    in_rank_1(
        "one rank doesn't seed its generators for each share, with virtual ranks",
        "generators of rank 1 (shares 4, 5, 6, 7)",
        rank_faults.keep_the_generators,
        "shares:averaged",
        8,
    ),
    in_rank_1(
        "a buffer, changed in one rank alone, with virtual ranks",
        "buffers of rank 1 (shares 4, 5, 6, 7)",
        rank_faults.grow_a_buffer,
        "shares:counted",
        8,
    ),
    in_rank_1(
        "one rank sums gradients in a different order, with virtual ranks",
        "sum of gradients of rank 1",
        rank_faults.sum_in_a_row,
        "shares:averaged",
        8,
    ),
    careless(
        "a count in the second rank alone, which changes the loss",
        "gate",
        "the gradient of a micro-batch",
        "counter",
        2,
        rank=1,
    ),
    careless("noise in training that grows", "gate", "the gradient of a micro-batch", "noise"),
    careless("a dropout rate that grows", "gate", "the gradient of a micro-batch", "dropout"),
    careless(
        "an average of weights that isn't in extras, read by evaluation only", "prove", "average (Average", "average"
    ),
    careless("an average of weights in a plain dict, read by evaluation only", "prove", "metrics", "plain_average"),
    careless("a target network that copies the weights every 50 steps", "search", "target (Sequential", "target"),
    careless("a target network that copies a part of the model", "search", "target (Linear", "target", of="part"),
    careless("a torch.Generator in the loss", "gate", "generator (Generator", "torch_generator"),
    careless("a NumPy generator in collate", "gate", "noise (Generator", "numpy_generator"),
    careless("a random.Random in the data", "gate", "data.random (Random", "python_generator"),
    careless("modules in a plain list of the model", "start", "and no saved object has this parameter", "heads"),
    careless("an optimizer inside the loss function", "gate", "self.critic_optimizer (Adam", "critic"),
    careless("a scheduler that after_step steps", "prove", "warmup (LinearLR", "scheduler"),
    careless(
        "a normaliser that functools.partial has bound to the loss", "gate", "normaliser (Normaliser", "normaliser"
    ),
    careless(
        "a count in a global variable, which changes the loss", "gate", "the gradient of a micro-batch", "counter"
    ),
    careless("a buffer with persistent=False", "gate", "the gradient of a micro-batch", "buffer"),
    careless(
        "a buffer with persistent=False; trained without the training probe, then audited", "audit", "loss", "buffer"
    ),
    careless(
        "a count in a global variable; trained without the training probe, then audited", "audit", "loss", "counter"
    ),
]


def find_fault(name: str) -> Callable[[], None]:
    """Return the function that applies the fault of this name; for an empty name it does nothing."""
    return next((each.apply for each in MUTATIONS if each.name == name), lambda: None)
