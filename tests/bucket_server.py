"""A real S3 API on loopback (moto's server), and a proxy in front of it that injects faults."""

import contextlib
import http.client
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

BUCKET = "bucket"
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}
_STARTS_S = 60.0
_SIGNED = (  # moto does not verify it
    "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
)
_ERRORS = {
    "SlowDown": 503,
    "InternalError": 500,
    "ExpiredToken": 400,
    "QuotaExceeded": 403,
    "AccessDenied": 403,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """Starts moto's server in a process, with one bucket.

    Args:
        log: file for its output.
    """

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + _STARTS_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(f"moto did not start: see {self._log.name}") from None
                time.sleep(0.1)
        self.client().create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a run that uses this server."""
        return KEYS | {"AWS_ENDPOINT_URL": self.url}

    def client(self) -> Any:
        """A client by other authors, to look at the objects."""
        import boto3  # of moto

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the objects below a folder, without it -> bytes."""
        pages = (
            self.client()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=BUCKET, Prefix=f"{folder}/")
        )
        return {
            entry["Key"].removeprefix(f"{folder}/"): entry["Size"]
            for page in pages
            for entry in page.get("Contents", ())
        }

    def read(self, name: str) -> bytes:
        data: bytes = self.client().get_object(Bucket=BUCKET, Key=name)["Body"].read()
        return data

    def write(self, name: str, data: bytes) -> None:
        self.client().put_object(Bucket=BUCKET, Key=name, Body=data)

    def delete(self, name: str) -> None:
        self.client().delete_object(Bucket=BUCKET, Key=name)

    def download(self, folder: str, to: Path, without: str = "") -> None:
        """Copies a folder to disk, without objects below a folder in it."""
        for name in self.sizes(folder):
            if without and name.startswith(without):
                continue
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes(self.read(f"{folder}/{name}"))


Fault = Callable[[str, str], str]
"""(method, path of a request) -> "", or a fault: an S3 error code, ``cut`` or ``slow``."""


class FaultProxy:
    """Passes requests on to a server, or injects the fault that ``fault`` names.

    ``cut`` closes the connection after half of the response (of a request, after half of its body);
    ``slow`` waits for two seconds.

    Attributes:
        fault: chooses; replace it at any time.
        requests: (method, path, fault) of all requests so far.
    """

    def __init__(self, target_port: int) -> None:
        self.fault: Fault = lambda method, path: ""
        self.requests: list[tuple[str, str, str]] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                with contextlib.suppress(OSError):  # the client has gone
                    self._pass_on()

            def _pass_on(self) -> None:
                fault = proxy.fault(self.command, self.path)
                proxy.requests.append((self.command, self.path, fault))
                length = int(self.headers.get("Content-Length") or 0)
                if fault == "slow":
                    time.sleep(2)
                if fault == "cut" and length:
                    self.rfile.read(length // 2)
                    self.close_connection = True
                    return
                body = self.rfile.read(length)
                if fault in _ERRORS:
                    text = f"<Error><Code>{fault}</Code><Message>injected</Message></Error>"
                    self._answer(_ERRORS[fault], {"Content-Type": "application/xml"}, text.encode())
                    return
                connection = http.client.HTTPConnection("127.0.0.1", target_port, timeout=60)
                try:
                    sent = proxy.to_server(dict(self.headers))
                    connection.request(self.command, self.path, body, sent)
                    found = connection.getresponse()
                    content = found.read()
                finally:
                    connection.close()
                hop = {"transfer-encoding", "connection", "content-length", "date", "server"}
                headers = {k: v for k, v in found.getheaders() if k.lower() not in hop}
                headers |= proxy.from_server(headers)
                if self.command == "HEAD":
                    headers["Content-Length"] = found.getheader("Content-Length") or "0"
                self._answer(found.status, headers, content, cut=fault == "cut")

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

            def _answer(
                self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False
            ) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if cut else content)
                if cut:
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """A client that was killed is not worth a traceback."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def variables(self) -> dict[str, str]:
        return KEYS | {"AWS_ENDPOINT_URL": self.url}

    def to_server(self, headers: dict[str, str]) -> dict[str, str]:
        """Changes the headers of a request."""
        return headers

    def from_server(self, headers: dict[str, str]) -> dict[str, str]:
        """Returns headers to add to a response."""
        return {}


class GoogleProxy(FaultProxy):
    """Makes moto's server speak the XML API of Google Cloud Storage, which obstore uses for gs://.

    The two APIs differ in their conditions: Google's are on the generation of an object. The
    emulators in package registries, such as gcp-storage-emulator, have only Google's JSON API.
    """

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self._generations: dict[str, str] = {}  # ETag -> generation

    def to_server(self, headers: dict[str, str]) -> dict[str, str]:
        other = ("x-goog-if-generation-match", "authorization")
        kept = {k: v for k, v in headers.items() if k.lower() not in other}
        kept["Authorization"] = _SIGNED
        wanted = headers.get("x-goog-if-generation-match")
        if wanted == "0":
            kept["If-None-Match"] = "*"
        elif wanted is not None:
            tags = {generation: tag for tag, generation in self._generations.items()}
            kept["If-Match"] = tags.get(wanted, '"none"')
        return kept

    def from_server(self, headers: dict[str, str]) -> dict[str, str]:
        tag = next((v for k, v in headers.items() if k.lower() == "etag"), None)
        if tag is None:
            return {}
        number = self._generations.setdefault(tag, str(len(self._generations) + 1))
        return {"x-goog-generation": number}

    @property
    def variables(self) -> dict[str, str]:
        key = {"gcs_base_url": self.url, "disable_oauth": True}
        key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_BASE_URL": self.url}
