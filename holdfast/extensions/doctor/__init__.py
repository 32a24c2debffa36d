"""The examination of a machine and of a store, before a run depends on them."""

from holdfast.extending import Command, Extension

extension = Extension(
    "doctor",
    commands=(
        Command(
            "doctor",
            "holdfast.extensions.doctor.command:doctor",
            "Show the properties of this machine on which a run's bits depend, and the GPUs' health; measure whether "
            "equal steps compute equal bits.",
        ),
        Command(
            "check",
            "holdfast.extensions.doctor.command:check_earlier",
            "Try a store; the present command is holdfast doctor --store STORE.",
            is_shown=False,
        ),
    ),
)
