"""The comparison of two trainings: their first difference, and the recorded differences that explain it."""

from holdfast.extending import Command, Extension

extension = Extension(
    "compare",
    commands=(
        Command(
            "compare",
            "holdfast.extensions.compare.command:compare_command",
            "Find out whether two runs trained the same. Show their first difference and its most likely cause.",
            usage="holdfast compare RUN OTHER [OPTIONS]",
        ),
    ),
)
