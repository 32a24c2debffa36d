"""The command ``import``: a new run that continues from another program's checkpoint."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.attempt.progress import log_plain_lines
from holdfast.config import load_config
from holdfast.errors import WrongUse
from holdfast.extensions.importing.first_attempt import import_run
from holdfast.terminal.options import Json, Set, print_json

Map = Annotated[list[str] | None, Parameter(name="--map", negative="", consume_multiple=False)]


def import_command(
    source: str,
    run: str,
    /,
    *,
    config: Path,
    step: int | None = None,
    map_: Map = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Make a new run that continues from another program's checkpoint: weights, optimizer, scheduler and step.

    Args:
        source: A file of torch.save, a Trainer's checkpoint-N, a Lightning .ckpt, a folder of accelerate's save_state
            or of torch.distributed.checkpoint, or safetensors with an optimizer's file beside them.
        run: <store>/<run>, or the new run's name in the configuration's store.
        config: The new run's configuration, a TOML file.
        step: The step to continue from, if the source has none.
        map_: OLD=NEW: rename an object or a weight of the source, and everything below it; OLD= leaves it out.
        set_: key=value: change a setting, for example --set epochs=8 or --set settings.lr=0.001.
        json: Print JSON.
    """
    store, _, name = run.rstrip("/").rpartition("/")
    place = [f"run={name}", *([f"store={store}"] if store else [])]
    settings = load_config(config, [*(set_ or []), *place])
    names = dict(map(_split, map_ or []))
    log_plain_lines()
    made = import_run(settings, source, step, names)
    commit = made.commit
    if json:
        print_json(commit.model_dump(mode="json", include={"number", "step", "path", "checkpoint_sha256", "origin"}))
        return
    print(f"run {settings.run}: commit {commit.number}, step {commit.step} of {made.total_steps}")
    print(f"  {commit.checkpoint_sha256}  {settings.store.rstrip('/')}/{settings.run}/{commit.path}")
    changes = [word for each in [*(set_ or []), *place] for word in ("--set", each)]
    print(f"continue with: {shlex.join(['holdfast', 'train', str(config), *changes])}")


def _split(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise WrongUse(f"--map {text}: expected OLD=NEW", hint="--map OLD= leaves an object of the source out")
    return old, new
