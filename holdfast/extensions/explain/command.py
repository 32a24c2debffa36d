"""The command ``explain``: why the loss of a step has jumped."""

from holdfast.attempt.progress import log_plain_lines
from holdfast.cli.trusting import open_trusted
from holdfast.errors import WrongUse
from holdfast.extensions.explain.explanation import explain_step
from holdfast.terminal.options import Json, Set, TrustRecords, print_json


def explain_command(
    run: str,
    step: int,
    /,
    *,
    most: int = 5,
    set_: Set = None,
    recipe: str = "",
    trust_records: TrustRecords = False,
    json: Json = False,
) -> int:
    """Train a step again and say why its loss has jumped: the machine, the data, or an update that was too large.

    The training begins with a checkpoint before the step, and nothing is written. The exit code is 2 if the step's
    bits differ from the recorded bits, and 0 otherwise.

    Args:
        run: <store>/<run>; or the TOML file of your configuration of the run. Recipe, data, store and settings then
            come from this file, and the run's records are compared with it.
        step: The step's number, from 1.
        most: The largest number of samples, and of parameters, to show.
        set_: key=value: change a setting of your configuration.
        recipe: The recipe to use instead of the recorded one, as in a configuration. By default the recorded recipe is
            trained, but only if its code is in this folder or comes with Holdfast.
        trust_records: Train with the recorded recipe and settings, even if the code is elsewhere or a setting names a
            file or an address, but never with code from a file in a store.
        json: Print JSON.
    """
    if most < 1:
        raise WrongUse(f"--most {most}: expected at least 1")
    journal, trust = open_trusted(run, recipe, trust_records, set_ or [])
    journal.read_run()
    log_plain_lines()
    found = explain_step(journal, step, most, trust)
    if json:
        print_json(found.model_dump() | {"cause": found.cause})
    else:
        print(found.describe(most))
    return 2 if found.cause == "bits" else 0
