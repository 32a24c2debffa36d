"""The commands of ``holdfast``. The command line imports a command's module when the command is called."""

from holdfast.extending import Command

COMMANDS = (
    Command(
        "audit",
        "holdfast.cli.proving:audit_command",
        "Train chunks of a run again, and compare the bytes.",
    ),
    Command(
        "diff",
        "holdfast.cli.differences:diff_command",
        "Show what changed over a run's life, or how it differs from a configuration.",
        usage="holdfast diff RUN [CONFIG.toml]",
    ),
    Command(
        "docs",
        "holdfast.cli.pages:docs",
        "Show a page of the documentation, or find one. The pages need no network. Without a word, list all pages.",
    ),
    Command(
        "evaluate",
        "holdfast.cli.proving:evaluate_command",
        "Restore a checkpoint with the checks that training makes, and evaluate it.",
    ),
    Command(
        "export",
        "holdfast.cli.keeping:export_weights",
        "Write a checkpoint's weights, verified, for other tools. Equal weights make equal files, on every machine.",
        usage="holdfast export RUN [COMMIT] OUT [--form FORM] [--part PART]",
    ),
    Command(
        "goodput",
        "holdfast.cli.accounting:goodput",
        "Show where the time of a run went: training that counts, and each kind of loss.",
    ),
    Command(
        "keygen",
        "holdfast.cli.keeping:keygen",
        "Make a pair of keys that sign and verify commits.",
    ),
    Command(
        "new",
        "holdfast.cli.starting:new",
        "Write a starting point, NAME.py and NAME.toml, into this folder. You can train and prove them unchanged.",
    ),
    Command(
        "pin",
        "holdfast.cli.keeping:pin",
        "Keep a checkpoint, regardless of retention.",
    ),
    Command(
        "prove",
        "holdfast.cli.proving:prove_command",
        "Train a run's first steps twice, straight and killed, and compare the bytes. Keep neither run.",
    ),
    Command(
        "prune",
        "holdfast.cli.keeping:prune_command",
        "Delete the checkpoints that the run's own retention doesn't keep, and the leftovers of dead attempts.",
    ),
    Command(
        "quarantine",
        "holdfast.cli.keeping:quarantine",
        "Never use a checkpoint again: the run continues from the previous checkpoint.",
    ),
    Command(
        "show",
        "holdfast.cli.looking:show_command",
        "Show the state of a run: its step, loss, checkpoint, attempts, and the texts and pictures that it has shown.",
    ),
    Command(
        "skip",
        "holdfast.cli.keeping:skip_command",
        "Skip steps that a run has trained: go back to the checkpoint before them, and go on without their batches.",
    ),
    Command(
        "train",
        "holdfast.cli.training:train_command",
        "Train a run, or continue it from its last verified checkpoint, in this process and without Prefect.",
    ),
    Command(
        "verify",
        "holdfast.cli.verifying:verify_command",
        "Read every record and every checkpoint of a run back, and compare them with the commits.",
    ),
    Command(
        "runs",
        "holdfast.cli.earlier:runs_earlier",
        "List the runs of a store; the present command is holdfast show --store STORE.",
        is_shown=False,
    ),
    Command(
        "unpin",
        "holdfast.cli.earlier:unpin_earlier",
        "Undo a pin; the present command is holdfast pin RUN COMMIT --off.",
        is_shown=False,
    ),
)
