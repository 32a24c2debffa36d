"""Preemption notices: a thread polls the cloud and a drain file, to learn when this machine will be taken away.

=======  ==========================================================  =========================  ==================
cloud    request                                                     meaning                    time that is left
=======  ==========================================================  =========================  ==================
AWS      IMDSv2 ``spot/instance-action``                             interruption               until its ``time``
AWS      IMDSv2 ``events/recommendations/rebalance``                 advice: save, train on
GCP      ``instance/preempted``                                      preemption                 30 s
Azure    ``scheduledevents``: Preempt, Terminate, Reboot, Redeploy   event of this machine      until ``NotBefore``
=======  ==========================================================  =========================  ==================

Sources: the clouds' documentation of spot interruption notices, of preemptible instances and of scheduled events.
"""

import codecs
import contextlib
import contextvars
import functools
import json
import logging
import stat
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from holdfast.machine.environment import read_system_file

log = logging.getLogger(__name__)

POLL_EVERY_S = 2.0
ANSWER_WITHIN_S = 2.0
GCP_WITHIN_S = 30.0
MAX_WITHIN_S = 365 * 24 * 3600.0
MAX_DRAIN_BYTES = 1024
AZURE_ENDS = {"Preempt", "Terminate", "Reboot", "Redeploy"}
# The folder with the firmware's description of the machine, and the texts in it by which each cloud is recognized.
# (Azure's asset tag is the same on all of its machines.)
FIRMWARE = Path("/sys/class/dmi/id")
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
METADATA_URLS = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}


@dataclass(frozen=True)
class Notice:
    """A notice that this machine, or this process, is about to end.

    Args:
        reason: the reason, for messages.
        within_s: the seconds that are left from now on; limited to those of a year, so that they are a valid timeout.
        is_advice: whether the machine is only likely to be taken away, so that the attempt saves a checkpoint and
            trains on.
        is_at_once: whether to stop after the current step. Then ``within_s`` is the time for the save alone.
    """

    reason: str
    within_s: float
    is_advice: bool = False
    is_at_once: bool = False
    _deadline: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        within_s = self.within_s if self.within_s > 0 else 0.0  # this comparison turns NaN into 0, too
        object.__setattr__(self, "within_s", min(within_s, MAX_WITHIN_S))
        object.__setattr__(self, "_deadline", time.monotonic() + self.within_s)

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self._deadline - time.monotonic())

    def __str__(self) -> str:
        if self.is_advice:
            return f"{self.reason}: saving a checkpoint now"
        return self.reason if self.is_at_once else f"{self.reason}: {self.within_s:.0f} s are left to save"


Source = Callable[[], Notice | None]


@contextlib.contextmanager
def watch(sources: Sequence[Source], tell: Callable[[Notice], None], every_s: float = POLL_EVERY_S) -> Iterator[None]:
    """While the block runs, poll the sources of notices in a thread, and report each notice once.

    Args:
        tell: a function that is called with each notice. Polling ends after the first notice that is not advice.
        every_s: the seconds between two rounds of polls.
    """
    if not sources:
        yield
        return
    done = threading.Event()
    # The thread runs in the caller's context, so that Prefect assigns its log lines to the caller's flow run.
    poll = functools.partial(contextvars.copy_context().run, _poll, sources, tell, done, every_s)
    thread = threading.Thread(target=poll, name="preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(ANSWER_WITHIN_S)


def _poll(sources: Sequence[Source], tell: Callable[[Notice], None], done: threading.Event, every_s: float) -> None:
    told: set[str] = set()
    while not done.is_set():
        for source in sources:
            try:
                notice = source()
            except Exception as error:  # an error in one source must not stop the other sources
                notice = None
                if repr(error) not in told:
                    log.warning(
                        "this machine's preemption notices can't be read: %r; a preemption may come without a warning",
                        error,
                    )
                told.add(repr(error))
            if notice is not None and notice.reason not in told and not done.is_set():
                told.add(notice.reason)
                tell(notice)
                if not notice.is_advice:
                    return
        done.wait(every_s)


def find_sources(drain_file: str | None) -> list[Source]:
    """Return the sources of notices: this machine's cloud, if it is in one, and the configured drain file."""
    sources: list[Source] = []
    cloud = find_cloud()
    if cloud in METADATA_URLS:
        server = MetadataServer(METADATA_URLS[cloud])
        sources += {"aws": aws_sources, "gcp": gcp_sources, "azure": azure_sources}[cloud](server)
    if drain_file is not None:
        path = Path(drain_file)
        sources.append(lambda: read_drain_file(path))
    return sources


def find_cloud(firmware: Path = FIRMWARE) -> str:
    """Return the name of this machine's cloud, read from the firmware; empty if it is in no known cloud."""
    names = ("sys_vendor", "bios_version", "product_name", "chassis_asset_tag")
    said = {name: read_system_file(firmware / name) for name in names}
    # On machines with Xen only the BIOS version names Amazon.
    if said["sys_vendor"].startswith("Amazon EC2") or said["bios_version"].endswith(".amazon"):
        return "aws"
    if said["product_name"].startswith("Google"):
        return "gcp"
    return "azure" if said["chassis_asset_tag"] == AZURE_TAG else ""


def read_drain_file(path: Path) -> Notice | None:
    """Return the notice of a drain file; None while there is no file.

    The file's existence is the notice. A number in the file gives the seconds that are left; without a number, 0.

    Raises:
        OSError: the path can't be examined.
        ValueError: the path is a folder or a device.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(mode):
        raise ValueError(f"resume.drain_file {str(path)!r} is not a file")
    within_s = 0.0
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        within_s = float(_decode(file.read(MAX_DRAIN_BYTES)))
    return Notice(f"{path} says that this machine is drained", within_s)


def _decode(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 as PowerShell writes it."""
    return data.decode("utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig")


class MetadataServer:
    """A client of a cloud's metadata server. A missing or malformed answer counts as no notice."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # use no proxy, even if the environment names one
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """Send a request; return the answer's text, or None if there is no answer or it reports a failure."""
        try:
            request = urllib.request.Request(self._url + path, headers=dict(headers), method=method)
            with self._opener.open(request, timeout=ANSWER_WITHIN_S) as answer:
                return str(answer.read().decode())
        except (OSError, ValueError):  # urllib's errors inherit OSError
            return None


def aws_sources(server: MetadataServer) -> list[Source]:
    """Return the sources of AWS's IMDSv2: a spot interruption, and the advice that an interruption is likely."""

    def ask(path: str) -> dict[str, Any]:
        token = server.ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
        answer = server.ask(f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": token}) if token else None
        return _parse_object(answer)

    def interruption() -> Notice | None:
        found = ask("spot/instance-action")
        if "action" not in found:
            return None
        return Notice(f"AWS will {found['action']} this spot instance", _seconds_until(found.get("time", "")))

    def rebalance() -> Notice | None:
        found = ask("events/recommendations/rebalance")
        if "noticeTime" not in found:
            return None
        return Notice("AWS reports a higher risk of a spot interruption", 0.0, is_advice=True)

    return [interruption, rebalance]


def gcp_sources(server: MetadataServer) -> list[Source]:
    """Return the source of Google's Compute Engine: the machine's preemption."""

    def preemption() -> Notice | None:
        answer = server.ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        is_preempted = (answer or "").strip() == "TRUE"
        return Notice("Google Cloud takes this machine away", GCP_WITHIN_S) if is_preempted else None

    return [preemption]


def azure_sources(server: MetadataServer) -> list[Source]:
    """Return the source of Azure: scheduled events that end this machine."""

    def ask(path: str) -> str | None:
        return server.ask(f"/metadata/{path}", {"Metadata": "true"})

    def events() -> Notice | None:
        found = _parse_object(ask("scheduledevents?api-version=2020-07-01")).get("Events") or []
        ends = [event for event in found if event.get("EventType") in AZURE_ENDS]
        name = ask("instance/compute/name?api-version=2021-02-01&format=text") if ends else None
        for event in ends:
            if name in event.get("Resources", []):  # ignore the events of other machines in the same scale set
                return Notice(f"Azure has scheduled: {event['EventType']}", _seconds_until(event.get("NotBefore", "")))
        return None

    return [events]


def _parse_object(answer: str | None) -> dict[str, Any]:
    try:
        found = json.loads(answer or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _seconds_until(time_: str) -> float:
    """Return the seconds until a time in ISO 8601 or RFC 5322 (e-mail); 0 if it is past, or can't be read."""
    try:
        at = datetime.fromisoformat(time_.replace("Z", "+00:00"))
    except ValueError:
        try:
            at = parsedate_to_datetime(time_)
        except ValueError:
            return 0.0
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
