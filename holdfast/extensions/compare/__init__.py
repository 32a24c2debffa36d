"""The comparison of two trainings: their first difference, and the recorded differences that explain it."""

from holdfast.extending import Command, Extension

extension = Extension(
    "compare",
    commands=(
        Command(
            "compare",
            "holdfast.extensions.compare.command:compare_command",
            "Tell whether two runs are the same training. Show their first difference and its most likely cause.",
            usage="holdfast compare RUN OTHER [OPTIONS]",
        ),
    ),
)
