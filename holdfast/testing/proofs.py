"""A proof for a project's own tests: a killed run ends on the same bytes as a run that was never killed."""

from pathlib import Path

from holdfast.config import RunConfig, load_config
from holdfast.proof.prove import prove
from holdfast.proof.result import Proof


def assert_resumes(
    config: RunConfig | str | Path, *, kills: int = 3, steps: int = 20, seed: int | None = None
) -> Proof:
    """Assert that a killed and resumed run ends with the same bytes as a run that was never killed.

    The first steps are trained twice in a temporary folder, as by `holdfast prove`; no server is needed. If the
    assertion fails, its message names the first step that differs, and any state that isn't registered for saving.

    Args:
        config: the run, or its TOML file. The run's recipe has to be importable from the working directory.
        kills: the number of SIGKILLs.
        seed: the seed that chooses chunks and kills; None for a random seed, which the message names.

    Returns: the proof, which also lists the cases that it did not test.

    Raises:
        AssertionError: the bytes differ, or state is lost.
        HoldfastError: the recipe can't be built, or fails.
    """
    found = prove(config if isinstance(config, RunConfig) else load_config(config), steps, kills, seed)
    assert found.is_proved, str(found)
    return found
