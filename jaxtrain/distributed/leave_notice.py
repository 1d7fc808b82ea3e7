"""Hears the notice that a provider is about to take this machine back, and stops the run for it.

Spot machines get a notice: two minutes before on AWS, 30 seconds on Google Cloud. It is not sent as
a signal, except by Kubernetes and SLURM, but stands in the metadata that a machine reads of itself.
"""

import contextlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import expanded

_EVERY_S = 2.0  # 5 s is what AWS recommends; Google's notice leaves 30 s for everything
_ANSWERS_WITHIN_S = 2.0
_TOKEN_S = 21_600  # the longest that AWS allows

# Sources: "Spot Instance interruption notices" and "Use IMDSv2" (docs.aws.amazon.com/AWSEC2), and
# "Detect if a VM instance is preempted" (cloud.google.com/compute). The variables that name another
# address are those of Amazon's and Google's own libraries.
_AWS = ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
_GCE = ("GCE_METADATA_HOST", "metadata.google.internal")


@contextlib.contextmanager
def heard(
    source: str | None, stop: Callable[[], None], env: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Asks for a notice every two seconds, in a thread; calls ``stop`` at the first one.

    Every process asks about its own machine: in a run of several, any of them may be taken. While
    a notice already stands, the main thread waits before anything else: a start that ended again
    would use up the launcher's restarts. A stop signal ends the wait, as does the machine's end.

    Args:
        source: ``loop.leave_notice``: "aws", "gce", or the path of a file that appears; None
            asks for nothing.

    Raises:
        InputError: the service does not answer on this machine.
    """
    if source is None:
        yield
        return
    ask: _Aws | _Gce | _File = _File(source)
    if source == "aws":
        ask = _Aws(env)
    elif source == "gce":
        ask = _Gce(env)
    try:
        notice = ask()
    except OSError as error:
        raise InputError(
            f"loop.leave_notice {source}: {ask} does not answer ({error}): this machine is not one "
            "of this provider, or hides its metadata; use --loop.leave_notice None, or the path of "
            "a file"
        ) from None
    if notice:
        terminal.warn(
            f"this machine will be taken back ({ask}: {notice}): the run does not start before the "
            "notice is gone"
        )
    while notice:
        time.sleep(_EVERY_S)
        with contextlib.suppress(OSError):
            notice = ask()
    over = threading.Event()

    def listen() -> None:
        heard, silent = "", False
        while not heard and not over.wait(_EVERY_S):
            try:
                heard, silent = ask(), False
            except OSError as error:
                if not silent:
                    terminal.warn(f"loop.leave_notice: {ask} does not answer ({error})")
                silent = True
        if heard:
            terminal.warn(f"this machine will be taken back ({ask}: {heard})")
            stop()

    thread = threading.Thread(target=listen, name="leave notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_EVERY_S + 2 * _ANSWERS_WITHIN_S)


class _File:
    """Asks whether a file exists, which for example a script of the user creates."""

    def __init__(self, source: str) -> None:
        self._path: Path = expanded(source)

    def __str__(self) -> str:
        return str(self._path)

    def __call__(self) -> str:
        """Returns the notice; "" if there is none."""
        return "it exists" if self._path.exists() else ""


class _Aws:
    """Asks a machine's metadata on AWS (IMDSv2: with a token, and 404 until there is a notice)."""

    def __init__(self, env: Mapping[str, str]) -> None:
        name, usual = _AWS
        self._base = env.get(name, usual).rstrip("/")
        self._token = ""

    def __str__(self) -> str:
        return self._base

    def __call__(self) -> str:
        """Returns the notice, such as "terminate at 2026-01-31T09:00:00Z"; "" if there is none.

        Raises:
            OSError: the service does not answer, or refuses.
        """
        if not self._token:
            seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = _answer("PUT", f"{self._base}/latest/api/token", seconds)
        path = f"{self._base}/latest/meta-data/spot/instance-action"
        try:
            notice = json.loads(_answer("GET", path, {"X-aws-ec2-metadata-token": self._token}))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            self._token = ""  # 401: it is too old
            raise
        except ValueError as error:
            raise OSError(f"it is not JSON: {error}") from None
        return f"{notice.get('action')} at {notice.get('time')}"


class _Gce:
    def __init__(self, env: Mapping[str, str]) -> None:
        name, usual = _GCE
        self._url = f"http://{env.get(name, usual)}/computeMetadata/v1/instance/preempted"

    def __str__(self) -> str:
        return self._url

    def __call__(self) -> str:
        """Returns "preempted"; "" if it is not.

        Raises:
            OSError: the service does not answer, or refuses.
        """
        answer = _answer("GET", self._url, {"Metadata-Flavor": "Google"})
        return "preempted" if answer.strip() == "TRUE" else ""


def _answer(method: str, url: str, headers: Mapping[str, str]) -> str:
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    # Without the proxies of the environment, which do not reach a machine's own metadata.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWERS_WITHIN_S) as response:
            return str(response.read(2**16).decode(errors="replace"))
    except http.client.HTTPException as error:
        raise OSError(f"it does not speak HTTP: {error!r}") from None
