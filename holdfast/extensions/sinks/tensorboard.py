"""TensorBoard: one event file for each commit, below ``<log.folder>/tensorboard/<run>``.

A file's name has the commit's number and content id, and its bytes are derived from the commit alone. So a new attempt
can write the files that are missing on its machine. The attempt deletes the file of a commit that was rolled back.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from holdfast.journal import Commit
from holdfast.looking.sinks import Facts, Point, Sink

PREFIX = "events.out.tfevents."


class TensorBoard(Sink):
    """Event files that TensorBoard and other readers show as one curve."""

    hint = "log.folder has to be writable"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.folder = facts.folder / "tensorboard" / facts.run

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def has(self, commit: Commit) -> bool:
        return self._path(commit).exists()

    def _path(self, commit: Commit) -> Path:
        # TensorBoard reads the files in the order of their names, so the file of a newer commit needs a later name.
        return self.folder / f"{PREFIX}{commit.number:010d}.{commit.checkpoint_sha256[:12]}"

    def rewind(self, number: int) -> None:
        for path in self.folder.glob(f"{PREFIX}*"):
            drawn = path.name.removeprefix(PREFIX).partition(".")[0]
            if drawn.isdecimal() and int(drawn) > number:
                path.unlink(missing_ok=True)
        self.step = 0  # skip no step: `has` looks for the file of each commit instead

    def write(self, commit: Commit, points: Sequence[Point]) -> None:
        path = self._path(commit)
        temporary = path.with_name(f".{commit.number}.tmp")  # a temporary name that TensorBoard doesn't read
        with temporary.open("wb") as file:
            writer = RecordWriter(file)
            for event in _make_events(commit, points):
                writer.write(event.SerializeToString(deterministic=True))
        temporary.replace(path)


def _make_events(commit: Commit, points: Sequence[Point]) -> Iterator[Event]:
    first = points[0]
    yield Event(wall_time=first.time, file_version="brain.Event:2")
    if commit.parent != commit.number - 1:
        # After a rollback, a running TensorBoard has read the deleted files. This event makes TensorBoard drop all
        # steps from the event's step on.
        yield Event(wall_time=first.time, step=first.step, session_log=SessionLog(status=SessionLog.START))
    for point in points:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(point.values.items())]
        notes = [_make_text("run/attempts", point.note)] if point.note else []
        yield Event(wall_time=point.time, step=point.step, summary=Summary(value=values + notes))


def _make_text(tag: str, text: str) -> Summary.Value:
    plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
