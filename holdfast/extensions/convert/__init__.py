"""The diff that turns a training script into a loop of a Holdfast run."""

from holdfast.extending import Command, Extension

extension = Extension(
    "convert",
    commands=(
        Command(
            "convert",
            "holdfast.extensions.convert.command:convert_command",
            "Print the diff that lets Holdfast train a script, with a question where a person has to decide.",
        ),
    ),
)
