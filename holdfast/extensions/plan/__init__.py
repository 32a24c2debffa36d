"""The plan of a run: the best length for its chunks, and what it costs."""

from holdfast.extending import Command, Extension

extension = Extension(
    "plan",
    commands=(
        Command(
            "plan",
            "holdfast.extensions.plan.command:plan",
            'Show the best length for the chunks of a run, and what it costs. With chunk = "auto", training '
            "uses that length.",
        ),
    ),
)
