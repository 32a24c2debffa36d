"""The machines that compute wrongly: a store's quarantine of them, and the runs that they have trained.

Audits name such a machine. The quarantine refuses the machine, the checkpoints that it left behind aren't adopted, and
a run is held or rolled back if the user has asked for that.
"""

from holdfast.extending import Command, Extension

extension = Extension(
    "quarantine",
    commands=(
        Command(
            "release",
            "holdfast.extensions.quarantine.command:release",
            "Release a run that audits hold because a machine that computes wrongly has trained it; or answer the "
            "audits' verdicts.",
        ),
    ),
    admission="holdfast.extensions.quarantine.admission:refuse_quarantined",
    adoption="holdfast.extensions.quarantine.admission:find_doubt",
    verdict="holdfast.extensions.quarantine.consequences:act_on_verdict",
    views={
        "machines": "holdfast.extensions.quarantine.records:list_quarantined",
        "release": "holdfast.extensions.quarantine.records:release_machine",
    },
)
