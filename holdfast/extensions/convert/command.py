"""The command `convert`."""

import difflib
from pathlib import Path

from holdfast.attempt.progress import log_plain_lines
from holdfast.config import load_config
from holdfast.errors import ConfigError
from holdfast.extensions.convert.conversion import Conversion, convert
from holdfast.proof.prove import prove

# The number of chunks of a run. With fewer chunks a kill would lose much of the run.
CHUNKS = 10
KILLS = 3


def convert_command(script: Path, /, *arguments: str, line: int = 0, write: bool = False, prove: bool = False) -> int:
    """Print the diff that lets Holdfast train a script, with a question where a person has to decide.

    The command reads the script and executes none of it. The command finds the loop that trains, also inside
    functions of the script. In the new loop the run counts the epochs and batches, and keeps the objects and variables
    that the next step needs. Code that saves and restores is deleted. Code that it doesn't understand stays. The
    exit code is 1 if there is no such loop.

    Args:
        script: The file of a training script that has the loop. It may import modules beside it.
        arguments: The script's own options, after `--`, as in `holdfast convert train.py -- --epochs 3`. The script's
            remaining options have their defaults.
        line: The line of the loop to convert, if the script has several; by default the last one that trains.
        write: Also write the new script beside the old one, as NAME_held.py, with a configuration, NAME_held.toml.
        prove: Write both, then prove the result: train its first steps twice, straight and killed, and compare the
            bytes. This executes the script. The exit code is then that of holdfast prove.
    """
    try:
        text = script.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{script} can't be read: {error}") from None
    found = convert(text, script.name, line, arguments)
    name = f"{script.stem}_held"
    source, config = script.with_name(f"{name}.py"), script.with_name(f"{name}.toml")
    old, new = text.splitlines(keepends=True), found.text.splitlines(keepends=True)
    print("".join(difflib.unified_diff(old, new, script.name, source.name)))
    print(_describe(found))
    if not write and not prove:
        print(f"--write writes {source.name} and {config.name}; --prove proves them")
        return 0
    for path in (source, config):
        if path.exists():
            raise ConfigError(f"{path} exists", hint="remove that file, or give the script a different name")
    source.write_text(found.text, "utf-8")
    config.write_text(_make_config(found, source), "utf-8")
    print(f"wrote {source} and {config}")
    return _prove(config) if prove else 0


def _describe(found: Conversion) -> str:
    lines = [f"kept: {', '.join(found.kept) or 'nothing yet'}"]
    if found.questions:
        lines.append("to decide:")
        lines += [f"  {question}" for question in found.questions]
    return "\n".join(lines)


def _make_config(found: Conversion, source: Path) -> str:
    lines = [f'recipe = "{source}:{found.function}"', f'run = "{source.stem}"', f"epochs = {found.epochs or 1}"]
    if found.steps and found.steps > CHUNKS:
        lines += ["", "[chunk]", f"steps = {found.steps // CHUNKS}"]
    return "\n".join(lines) + "\n"


def _prove(config: Path) -> int:
    log_plain_lines()
    proof = prove(load_config(config, []), None, KILLS)
    print(proof)
    return 0 if proof.is_proved else 2
