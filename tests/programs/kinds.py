"""The ordinary programs, those of ``ordinary/`` and others that tests have, each with its run."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.foreign.test_foreign import EPOCHS, LATE, NEEDED, STEPS
from tests.support.loops import LOOPS
from tests.support.odd_loops import ODD_LOOPS
from tests.support.ordinary import OPTIMIZERS, SCHEDULERS
from tests.support.ordinary_loops import ORDINARY_LOOPS
from tests.support.rehearsed import PROGRAMS, list_functions

# How many commits of each are rehearsed.
REHEARSALS = 8
# Loops whose tests train 18 steps: more would run out of data or of a schedule, or diverge.
SHORT = {
    "carries_a_hidden_state", "contrasts", "mines_hard_samples", "keeps_the_samplers_weights", "changes_attributes",
}  # fmt: skip
RECIPES = {
    "ordinary": ("tied", "normed", "lazy", "swa", "target", "adversarial", "streamed"),
    "varied": ("averaged", "pythonic", "normalised", "timed", "streamed"),
    "composed": ("adversarial", "accumulating", "two_rates", "pruned", "two_sgds", "batched"),
}
# Recipes of `RECIPES` whose schedule is as long as a setting says.
SCHEDULED = {"composed:adversarial", "composed:two_rates"}


@dataclass(frozen=True)
class Kind:
    """An ordinary program and its run.

    Args:
        recipe: ``module:function`` below tests/.
        epochs, chunk: of a run with at least nine commits, more than four steps apart.
        settings: those of the recipe.
        needs: a library that only an extra has.
        late: modules that it imports late.
    """

    recipe: str
    epochs: int
    chunk: str
    settings: tuple[tuple[str, str], ...] = ()
    needs: str = ""
    late: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.recipe.partition(".")[2], *(value for _, value in self.settings)])


def list_kinds() -> Iterator[Kind]:
    """Yield all of them."""
    for file in sorted((PROGRAMS / "ordinary").glob("*.py")):
        for name, _, _ in list_functions(file):
            yield Kind(f"programs.ordinary.{file.stem}:{name}", 5, "steps = 5")
    for module, loops in {"ordinary_loops": ORDINARY_LOOPS, "odd_loops": ODD_LOOPS, "loops": LOOPS}.items():
        for name in loops:
            if name not in SHORT:
                yield Kind(f"support.{module}:{name}", 9, "epochs = 1")
    for module, recipes in RECIPES.items():
        for name in recipes:
            schedule = (("settings.epochs", "9"),) if f"{module}:{name}" in SCHEDULED else ()
            yield Kind(f"support.{module}:{name}", 9, "epochs = 1", schedule)
    schedulers = [name for name in SCHEDULERS if name != "OneCycleLR"]  # which ends after 40 steps
    for number, name in enumerate(OPTIMIZERS):
        chosen = ("settings.optimizer", name), ("settings.scheduler", schedulers[number % len(schedulers)])
        yield Kind("support.ordinary:trained", 9, "epochs = 1", chosen)
    for name, epochs in EPOCHS.items():
        late = tuple(LATE.get(NEEDED.get(name, ""), ()))
        chunk = "steps = 6" if STEPS // epochs % 6 == 0 else "steps = 5"
        yield Kind(f"foreign.after.{name}:train", epochs, chunk, needs=NEEDED.get(name, ""), late=late)


KINDS = list(list_kinds())
