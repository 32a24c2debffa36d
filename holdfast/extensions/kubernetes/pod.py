"""A client of the Kubernetes API for this process's own pod, with the token that Kubernetes puts into the pod."""

import json
import logging
import os
import queue
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 5.0
# The longest wait for the pod's status when an attempt ends. The attempt has saved by then, and Kubernetes's grace
# period has 15 s left for everything after the save.
DISRUPTION_WITHIN_S = 2.0
MAX_BYTES = 2**22  # more than any answer: etcd stores objects of up to 1.5 MB
# In this order: the environment variable with the pod's name, which the pod's manifest sets; the folder with the pod's
# token, which Kubernetes creates; and the environment variables with the API's address.
POD_VARIABLE = "POD_NAME"
RIGHTS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


@dataclass(frozen=True)
class PodApi:
    """The Kubernetes API for this process's own pod.

    Attributes:
        url: the pod's own URL.
        rights: the folder with the pod's token and the cluster's certificate.
    """

    url: str
    rights: Path

    @classmethod
    def find(
        cls, environ: Mapping[str, str] = os.environ, rights: Path | None = None, scheme: str = "https"
    ) -> Self | str:
        """Return the API that a pod's environment names, or a text that says what is missing.

        Args:
            rights: the folder with the pod's token; `RIGHTS` if None.
        """
        rights = rights or RIGHTS
        missing = [name for name in (HOST_VARIABLE, PORT_VARIABLE, POD_VARIABLE) if not environ.get(name)]
        if missing:
            return f"the environment variable {missing[0]} is not set"
        try:
            namespace = (rights / "namespace").read_text("utf-8").strip()
        except OSError as error:
            return f"{rights / 'namespace'}: {error.strerror}"
        host = environ[HOST_VARIABLE]
        at = f"[{host}]" if ":" in host else host
        names = [urllib.parse.quote(each, safe="") for each in (namespace, environ[POD_VARIABLE])]
        url = f"{scheme}://{at}:{environ[PORT_VARIABLE]}/api/v1/namespaces/{names[0]}/pods/{names[1]}"
        return cls(url, rights)

    def read_disruption(self) -> str:
        """Return why Kubernetes disrupts the pod, from its condition DisruptionTarget; empty without this condition.

        Raises:
            OSError: the API can't be reached, or refuses.
            ValueError: the answer doesn't describe a pod.
        """
        pod = json.loads(self._ask(urllib.request.Request(self.url)))
        conditions = pod.get("status", {}).get("conditions", []) if isinstance(pod, dict) else []
        for each in conditions:
            if each.get("type") == "DisruptionTarget" and each.get("status") == "True":
                return ": ".join(filter(None, (each.get("reason", "unknown reason"), each.get("message"))))
        return ""

    def _ask(self, request: urllib.request.Request) -> bytes:
        """Send a request with the pod's token, and return the answer's body."""
        # read the token each time, because the kubelet replaces it every hour
        token = (self.rights / "token").read_text("utf-8").strip()
        request.add_header("Authorization", f"Bearer {token}")
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.url.startswith("https:"):
            context = ssl.create_default_context(cafile=str(self.rights / "ca.crt"))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        with urllib.request.build_opener(*handlers).open(request, timeout=ANSWER_WITHIN_S) as answer:
            return bytes(answer.read(MAX_BYTES))


def describe_disruption() -> str:
    """Return why Kubernetes disrupts this process's pod, for the attempt's ending; empty if it doesn't."""
    reason = ask_pod()
    return reason and f"Kubernetes disrupts the pod: {reason}"


def ask_pod(within_s: float = DISRUPTION_WITHIN_S) -> str:
    """Return why Kubernetes disrupts this process's pod; empty if it doesn't, or if the API doesn't answer in time.

    This makes one request, in a separate thread. It makes no request if `POD_VARIABLE` doesn't name the pod, or if the
    pod has no token. If the API refuses or doesn't answer, it logs one warning.

    Args:
        within_s: the longest wait, in seconds.
    """
    api = PodApi.find()
    if isinstance(api, str):
        return ""
    answer: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put(api.read_disruption())
        except Exception as error:  # catch any error, because a malformed answer raises errors of many kinds
            answer.put(error)

    threading.Thread(target=ask, name="pod", daemon=True).start()
    try:
        found = answer.get(timeout=within_s)
    except queue.Empty:
        found = TimeoutError(f"no answer within {within_s:g} s")
    if isinstance(found, str):
        return found
    log.warning("can't ask Kubernetes whether it disrupts this pod: %s", found)
    return ""
