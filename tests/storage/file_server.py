"""Serves HTTP on loopback, optionally with faults, and replaces s3 by a bucket in memory."""

import contextlib
import dataclasses
import http.server
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from obstore.store import MemoryStore
from storage import loopback

from jaxtrain.storage import bucket_folders
from jaxtrain.storage.bucket import Bucket


@dataclasses.dataclass
class Answer:
    """The response for a path.

    Attributes:
        headers: added to Content-Length, or replacing it.
        sent: bytes of the body to send before closing the connection; None sends all.
        pause_s: pause between two bytes.
        query: required query of the request; other queries get status 403.
        ranges: whether to answer requests for a part of the body.
    """

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    sent: int | None = None
    announced: bool = True
    chunked: bool = False
    pause_s: float = 0.0
    query: str | None = None
    ranges: bool = False


class Server:
    """Serves ``files``; a list gives one response per request, and its last one repeats."""

    def __init__(self) -> None:
        self.files: dict[str, Answer | list[Answer]] = {}
        self.asked: list[str] = []
        self.ranges: list[str | None] = []
        self.base = ""

    def take(self, path: str) -> Answer:
        """Returns the next response for a path."""
        found = self.files.get(path, Answer(b"not here", 404))
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        return found


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Starts a server on a free port of 127.0.0.1."""
    server = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.asked.append(self.path)
            server.ranges.append(self.headers.get("Range"))
            path, _, query = self.path.partition("?")
            answer = server.take(path)
            if answer.query is not None and query != answer.query:
                answer = Answer(b"<Error>SignatureDoesNotMatch</Error>", 403)
            part = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            body = answer.body
            if answer.ranges and part:
                body, size = body[int(part[1]) :], len(body)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {part[1]}-{size - 1}/{size}")
            else:
                self.send_response(answer.status)
            if answer.chunked:
                self.send_header("Transfer-Encoding", "chunked")
            elif answer.announced and "Content-Length" not in answer.headers:
                self.send_header("Content-Length", str(len(body)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(OSError):
                body = body[: answer.sent]
                if answer.pause_s:
                    for byte in body:
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                        time.sleep(answer.pause_s)
                elif answer.chunked:
                    self.wfile.write(f"{len(answer.body):x}\r\n".encode() + body)
                    self.wfile.write(b"\r\n0\r\n\r\n" if answer.sent is None else b"")
                else:
                    self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with loopback.serving(Handler) as port:
        server.base = f"http://127.0.0.1:{port}"
        yield server


@contextlib.contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Bucket]:
    """Replaces ``s3://NAME`` by an empty bucket in memory."""
    real, made = bucket_folders.opened, Bucket(f"s3://{name}", MemoryStore())
    monkeypatch.setattr(
        bucket_folders, "opened", lambda url: made if url == made.url else real(url)
    )
    yield made
