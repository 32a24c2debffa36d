"""Trackio: a row in Trackio's local database for each step. `trackio show` and `trackio sync` read these rows."""

from collections.abc import Sequence
from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage

from holdfast.journal import Commit
from holdfast.looking.sinks.points import Point
from holdfast.looking.sinks.sink import Sink


class Trackio(Sink):
    """A run in Trackio's database on this machine.

    Each row has an id that is derived from the run and the step, and the database ignores a second row with the same
    id. So no step is drawn twice, even if the databases of several machines are merged.
    """

    hint = "the folder of Trackio's database, TRACKIO_DIR, has to be writable"

    def open(self) -> None:
        self.step = SQLiteStorage.get_last_step(self.facts.project, self.facts.run, run_id=self.facts.id) or 0

    def write(self, commit: Commit, points: Sequence[Point]) -> None:
        facts = self.facts
        SQLiteStorage.bulk_log(
            facts.project,
            facts.run,
            [dict(point.values) for point in points],
            steps=[point.step for point in points],
            timestamps=[_format_time(point) for point in points],
            config=facts.settings,
            log_ids=[f"{facts.id}-{point.step}" for point in points],
            run_id=facts.id,
        )
        noted = [point for point in points if point.note]
        SQLiteStorage.bulk_alert(
            facts.project,
            facts.run,
            titles=[point.note for point in noted],
            texts=[None for _ in noted],
            levels=["info" for _ in noted],
            steps=[point.step for point in noted],
            timestamps=[_format_time(point) for point in noted],
            alert_ids=[f"{facts.id}-{point.step}" for point in noted],
            run_id=facts.id,
        )


def _format_time(point: Point) -> str:
    return datetime.fromtimestamp(point.time, UTC).isoformat()
