"""The diff that turns a training script into a loop of one's own."""

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
