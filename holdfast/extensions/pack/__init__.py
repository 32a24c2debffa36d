"""A packed checkpoint: one tar file, from which any store makes a run."""

from holdfast.extending import Command, Extension

extension = Extension(
    "pack",
    commands=(
        Command(
            "pack",
            "holdfast.extensions.pack.command:pack_command",
            "Write a checkpoint into one tar file. Equal checkpoints make equal files, on every machine.",
            usage="holdfast pack RUN [COMMIT] OUT.tar",
        ),
        Command(
            "unpack",
            "holdfast.extensions.pack.command:unpack_command",
            "Verify a packed checkpoint, and make a new run of the original name from it.",
        ),
    ),
)
