"""The report: a run, or several, as one HTML page that needs no network."""

from holdfast.extending import Command, Extension

extension = Extension(
    "report",
    commands=(
        Command(
            "report",
            "holdfast.extensions.report.command:report",
            "Draw a run as one HTML page that needs no network. For several runs, compare their curves; for a store, "
            "write an index.",
            usage="holdfast report RUN... [-o FILE]\n       holdfast report STORE [-o FILE]",
        ),
    ),
    observers="holdfast.extensions.report.observer:make_reporting",
    views={
        "loss": "holdfast.extensions.report.picture:draw_loss",
        "comparison": "holdfast.extensions.report.comparing:compare_runs",
    },
)
