"""The command `new`: a starting point for a run, which you can train, prove and resume without a change."""

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.resources import files
from pathlib import Path

from holdfast.errors import ConfigError, NameTaken, WrongUse
from holdfast.store.local import LocalStore
from holdfast.terminal.distribution import spell_install
from holdfast.terminal.options import Flag

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


@dataclass(frozen=True)
class Template:
    """A starting point that `holdfast new` can write.

    Attributes:
        function: the function in the template's file that the configuration names.
        needs: the extra of Holdfast (an optional set of dependencies) that the template needs; empty if none is needed.
        settings: values of the function's parameters, as lines of TOML.
    """

    function: str
    epochs: int
    chunk_steps: int
    settings: str
    needs: str = ""


TEMPLATES = {
    "recipe": Template("spirals", epochs=20, chunk_steps=310, settings="lr = 0.02"),
    "loop": Template("train", epochs=3, chunk_steps=40, settings="lr = 2e-3"),
    "trainer": Template("train", epochs=3, chunk_steps=15, settings="lr = 5e-3", needs="transformers"),
    "lightning": Template("train", epochs=4, chunk_steps=40, settings="lr = 0.01", needs="lightning"),
}
CONFIGURATION = """\
# The function to train: a file and a name in it, or module:function.
recipe = "{name}.py:{function}"
# The run's name, and its folder on the store. The same name continues the run.
run = "{name}"
# Raise this number later to train further.
epochs = {epochs}
# By default runs are in runs/ in this folder; a bucket outlives the machine.
# store = "s3://my-bucket/runs"

[chunk]
# Steps between two checkpoints: the most that a lost machine costs.
steps = {chunk_steps}

[settings]
# Parameters of the function.
{settings}
"""
BATCH = """\
#!/bin/bash
#SBATCH --job-name={name} --output={name}-%j.log --open-mode=append
#SBATCH --nodes=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Add what the run needs here, such as #SBATCH --time=24:00:00 --gpus-per-node=8
srun --ntasks-per-node=1 --kill-on-bad-exit=1 {command} train {name}.toml \
--set compute.nodes=slurm --set compute.ranks=all
"""


def new(
    name: str,
    /,
    *,
    recipe: Flag = False,
    loop: Flag = False,
    trainer: Flag = False,
    lightning: Flag = False,
    slurm: Flag = False,
) -> None:
    """Write a starting point, NAME.py and NAME.toml, into this folder. You can train and prove them unchanged.

    Args:
        name: The name of the run and of both files.
        recipe: A function that returns model, data, optimizer and loss; Holdfast has the loop. This is the default.
        loop: Your own training loop.
        trainer: A Hugging Face Trainer.
        lightning: A Lightning module.
        slurm: Write NAME.sbatch, too: a Slurm job that trains the run, and queues itself again until it is complete.
    """
    chosen = [kind for kind, is_chosen in zip(TEMPLATES, (recipe, loop, trainer, lightning), strict=True) if is_chosen]
    if len(chosen) > 1:
        raise WrongUse(f"expected one of --{', --'.join(TEMPLATES)}; found --{' and --'.join(chosen)}")
    if not NAME.fullmatch(name):
        raise WrongUse(
            f"{name!r} can't be the name of both a run and a file",
            hint="give a name of letters, digits, - and _, such as my_run",
        )
    if name in sys.stdlib_module_names or PathFinder.find_spec(name, _packages()):
        hint = f"choose a different name: with {name}.py here, `import {name}` would not find the package"
        raise WrongUse(f"{name} is the name of a Python package", hint=hint)
    kind, command = chosen[0] if chosen else "recipe", _spell_command()
    contents = _fill_template(name, kind)
    if slurm:
        contents[f"{name}.sbatch"] = BATCH.format(name=name, command=command).encode()
    _write(contents, Path.cwd())
    print(f"{name}.py      what to train")
    print(f"{name}.toml    how long, and where it is saved")
    if slurm:
        print(f"{name}.sbatch  the Slurm job: sbatch {name}.sbatch")
    if needs := TEMPLATES[kind].needs:
        print(f"install first  {spell_install(needs)}")
    print(f"train it with  {command} train {name}.toml")
    print(f"prove it with  {command} prove {name}.toml")


def _packages() -> list[str]:
    """Return the folders of the module search path, without the current folder."""
    return [folder for folder in sys.path if Path(folder or ".").resolve() != Path.cwd()]


def _spell_command() -> str:
    """Return `holdfast`; if a shell wouldn't find the command by this name, return its path as the user typed it."""
    typed = sys.argv[0]
    found = shutil.which("holdfast")
    return typed if Path(typed).name == "holdfast" and not (found and Path(found).samefile(typed)) else "holdfast"


def _fill_template(name: str, kind: str) -> dict[str, bytes]:
    """Return the files of a template by their names."""
    code = files("holdfast.cli").joinpath("templates", f"{kind}.py.txt").read_bytes()
    return {f"{name}.py": code, f"{name}.toml": CONFIGURATION.format(name=name, **vars(TEMPLATES[kind])).encode()}


def _write(contents: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a folder.

    Raises:
        ConfigError: one of the files exists; then nothing is written.
    """
    if taken := [each for each in contents if (folder / each).exists()]:
        raise ConfigError(f"{taken[0]} exists", hint="choose a different name, or remove the existing file")
    for file, content in contents.items():
        try:
            LocalStore(str(folder)).create(file, content)
        except NameTaken:
            raise ConfigError(f"{file} exists", hint="choose a different name, or remove the existing file") from None
