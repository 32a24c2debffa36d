"""Nine ways to get a resume almost right, and who notices: the rank's code is changed before it begins.

`tests.forked.prove_mutated` puts one into the ranks; everything else is the real thing.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutation:
    """A fault in the code of a rank.

    Args:
        apply: puts it in.
        caught_by: ``gate``, ``prove`` or ``start``.
        named: what the message has to name.
    """

    apply: Callable[[], None]
    caught_by: str
    named: str


def _restoring(change: Callable[[Any, dict[str, Any], Callable[..., None]], None]) -> None:
    """`state.restore` becomes the change, which is given the training, the saved state, and the right way to do it."""
    from holdfast import state

    right = state.restore
    state.restore = lambda training, saved: change(training, saved, right)


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
    from holdfast import determinism
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


MUTATIONS = {
    "forget the scheduler": Mutation(forget_the_scheduler, "gate", "schedulers.0"),
    "forget one RNG": Mutation(forget_one_rng, "gate", "rng.0.numpy"),
    "forget the loader's position": Mutation(forget_the_position, "prove", "samples"),
    "overwrite the restored lr": Mutation(overwrite_the_restored_lr, "gate", "optimizer.param_groups."),
    "skip the EMA": Mutation(skip_the_average, "gate", "extras.0.average"),
    "set determinism after the model": Mutation(determinism_after_the_model, "start", "use_deterministic_algorithms"),
    "shuffle with the global RNG": Mutation(shuffle_with_the_global_rng, "gate", "the probe"),
    "resume at the wrong step": Mutation(resume_at_the_wrong_step, "gate", "progress.step"),
    "load the optimizer of another commit": Mutation(optimizer_of_another_commit, "gate", "optimizer."),
}
