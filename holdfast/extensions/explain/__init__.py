"""The cause of a step whose loss has jumped: the machine, the data, or an update that was too large."""

from holdfast.extending import Command, Extension

extension = Extension(
    "explain",
    commands=(
        Command(
            "explain",
            "holdfast.extensions.explain.command:explain_command",
            "Train a step again and say why its loss has jumped: the machine, the data, or an update that was too "
            "large.",
        ),
    ),
)
