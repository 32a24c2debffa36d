"""The import of another program's checkpoint: a reader for each format, and the new run's first attempt."""

from holdfast.extending import Command, Extension

extension = Extension(
    "importing",
    commands=(
        Command(
            "import",
            "holdfast.extensions.importing.command:import_command",
            "Make a new run that continues from another program's checkpoint: weights, optimizer, scheduler and step.",
            usage="holdfast import SOURCE RUN --config CONFIG [--step N] [--map OLD=NEW]",
        ),
    ),
)
