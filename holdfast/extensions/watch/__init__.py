"""A live view of runs. The view reads only the runs' store, in few requests, and writes nothing."""

from holdfast.extending import Command, Extension

extension = Extension(
    "watch",
    commands=(
        Command(
            "watch",
            "holdfast.extensions.watch.command:watch_command",
            "Watch a run, or all runs of a store, as they train, from any machine that can read the store.",
            usage="holdfast watch RUN | STORE",
        ),
    ),
)
