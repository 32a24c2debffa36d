"""Automations of Prefect's server: they set flow runs without heartbeats to Crashed, and raise alarms.

`train` also watches its attempts itself (`tasks.liveness`), and detects a lost attempt without automations. Automations
are faster, and they also end flow runs that no process watches.

``python -m deployments.automations`` makes or updates the automations on the configured server. An automation doesn't
see earlier events, so run this command before the first run.

An alarm changes nothing by itself. Add an action to the alarm in Prefect's UI, such as a notification. Your action
remains when the automations are updated.
"""

from datetime import timedelta

import tasks.untracked  # noqa: F401

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, DoNothing
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture

from tasks.heartbeat import CANCELLING_EVENT, EVENT, LAST_EVENT
from tasks.hooks import OVERDUE_EVENT, OVERDUE_INTERVALS
from tasks.liveness import CANCELLED_AFTER_S, EVERY_S, NOT_BEGUN_AFTER_S

# A flow run counts as lost after this many seconds without a heartbeat: longer than `tasks.liveness.DOUBTED_FOR_S`. The
# server's shortest window is 10 seconds.
LOST_AFTER_S = max(10.0, 3 * EVERY_S + 1)
# The names that earlier versions gave to automations, by their present names. An automation keeps its actions.
EARLIER = {
    "holdfast: crash a flow run without heartbeats": "holdfast: a lost heartbeat is a crash",
    "holdfast: finish the cancellation of a lost flow run": "holdfast: a cancel that nobody carries out",
    "holdfast: crash an attempt that no worker starts": "holdfast: what never begins is a crash",
    "holdfast: alarm when a commit is overdue": "holdfast: no commit for a long time",
    "holdfast: alarm when train has failed": "holdfast: a run is lost",
}
ANY_STATE = "prefect.flow-run.*"
FINAL_STATES = {f"prefect.flow-run.{name}" for name in ("Cancelled", "Completed", "Crashed", "Failed")}


def describe_automations() -> list[AutomationCore]:
    """Return the descriptions of all automations."""
    return [
        AutomationCore(
            name="holdfast: crash a flow run without heartbeats",
            description="Sets a train or an attempt to Crashed when its process or machine is gone. A false alarm "
            "does no harm: once the next attempt begins, the earlier one can't commit any more.",
            trigger=_missing(EVENT, {EVENT, LAST_EVENT, ANY_STATE}, LOST_AFTER_S),
            actions=[_crash("vanished", f"no heartbeat for {LOST_AFTER_S:.0f} s: its process or its machine is gone")],
        ),
        AutomationCore(
            name="holdfast: finish the cancellation of a lost flow run",
            description="Sets a train or an attempt to Cancelled when it is being cancelled and its process is gone.",
            trigger=_missing(
                "prefect.flow-run.Cancelling",
                {CANCELLING_EVENT, LAST_EVENT, *FINAL_STATES},
                CANCELLED_AFTER_S,
                match_related={"prefect.resource.role": "flow", "prefect.resource.name": ["train", "attempt"]},
            ),
            actions=[ChangeFlowRunState(state=StateType.CANCELLED, message="cancelled; its process was gone already")],
        ),
        AutomationCore(
            name="holdfast: crash an attempt that no worker starts",
            description="Sets an attempt to Crashed when a worker took it and died before starting it.",
            trigger=_missing(
                "prefect.flow-run.Pending",
                {ANY_STATE},
                NOT_BEGUN_AFTER_S,
                match_related={"prefect.resource.role": "flow", "prefect.resource.name": "attempt"},
            ),
            actions=[_crash("vanished", f"a worker took it, but did not start it within {NOT_BEGUN_AFTER_S:.0f} s")],
        ),
        AutomationCore(
            name="holdfast: alarm when a commit is overdue",
            description=f"An alarm: an attempt lives, and has made no commit for {OVERDUE_INTERVALS:.0f} of its usual "
            "intervals. Add an action of your own, such as a notification.",
            trigger=EventTrigger(
                match={"prefect.resource.id": "holdfast.run.*"},
                expect={OVERDUE_EVENT},
                for_each={"prefect.resource.id"},
                posture=Posture.Reactive,
                threshold=1,
                within=timedelta(),
            ),
            actions=[DoNothing()],
        ),
        AutomationCore(
            name="holdfast: alarm when train has failed",
            description="An alarm: train has failed or crashed, so nothing starts another attempt. Add an action of "
            "your own, such as a notification.",
            trigger=EventTrigger(
                match={"prefect.resource.id": "prefect.flow-run.*"},
                match_related={"prefect.resource.role": "flow", "prefect.resource.name": "train"},
                expect={"prefect.flow-run.Crashed", "prefect.flow-run.Failed"},
                for_each={"prefect.resource.id"},
                posture=Posture.Reactive,
                threshold=1,
                within=timedelta(),
            ),
            actions=[DoNothing()],
        ),
    ]


def _missing(after: str, expect: set[str], within_s: float, **options: object) -> EventTrigger:
    return EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*"},
        after={after},
        expect=expect,
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=within_s),
        **options,
    )


def _crash(name: str, message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=StateType.CRASHED, name=name.capitalize(), message=message)


def make_automations() -> None:
    """Create each automation that the server lacks, and update each automation that differs from its description here.

    Don't update equal automations, because an update makes the server forget the flow runs for which it waits.
    """
    with get_client(sync_client=True) as client:
        for described in describe_automations():
            names = described.name, EARLIER[described.name]
            automation, known = described, [each for name in names for each in client.read_automations_by_name(name)]
            if known and automation.actions == [DoNothing()]:  # keep the actions that people have added to an alarm
                automation = automation.model_copy(update={"actions": known[0].actions})
            if not known:
                client.create_automation(automation)
            elif not is_equal(known[0], automation):
                client.update_automation(known[0].id, automation)
            for double in known[1:]:
                client.delete_automation(double.id)
            print(f"automation  {automation.name}")


def is_equal(known: Automation, automation: AutomationCore) -> bool:
    """Return whether an automation on the server equals its description here, apart from the server's ids."""
    return AutomationCore.model_validate(known.model_dump()) == automation


if __name__ == "__main__":
    make_automations()
