"""This process's pod, asked for at the API of Kubernetes from inside, with the token that Kubernetes puts there."""

import json
import os
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ANSWER_WITHIN_S = 5.0
# The variable with the pod's name, which the pod's manifest sets; the folder where Kubernetes puts the pod's token; and
# the variables with the API's address.
POD_VARIABLE = "POD_NAME"
RIGHTS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


@dataclass(frozen=True)
class PodApi:
    """The API of a Kubernetes cluster, seen from inside a pod.

    Attributes:
        url: the pod's own URL.
        rights: the folder with the pod's token and the cluster's certificate.
    """

    url: str
    rights: Path

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ, rights: Path = RIGHTS, scheme: str = "https") -> Self | str:
        """Return the API that a pod's environment names, or a text that says what is missing."""
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

    def annotate(self, values: Mapping[str, str | None]) -> None:
        """Set the pod's annotations; remove those whose value is None.

        Raises:
            OSError: the API can't be reached, or refuses.
        """
        token = (self.rights / "token").read_text("utf-8").strip()  # the kubelet replaces it every hour
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.url.startswith("https:"):
            context = ssl.create_default_context(cafile=str(self.rights / "ca.crt"))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        request = urllib.request.Request(
            self.url,
            json.dumps({"metadata": {"annotations": values}}).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
            method="PATCH",
        )
        with urllib.request.build_opener(*handlers).open(request, timeout=ANSWER_WITHIN_S) as answer:
            answer.read()
