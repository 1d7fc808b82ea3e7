"""A Hugging Face Hub on loopback: the endpoints that ``huggingface_hub`` uses, also for datasets.

Large files are served by another host name ("the CDN"), as on the real Hub. Requests are recorded,
and faults can be planted.
"""

import atexit
import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from storage import loopback

WRITER, READER = "hf_writer", "hf_reader"
"""Valid tokens; only the first may write."""


@dataclasses.dataclass
class Repository:
    """A repository of a model.

    Attributes:
        commits: commit -> path -> content.
        refs: branch or tag -> commit.
        private: whether a token is needed to read it.
        gated: whether even a token gives no access to its files.
    """

    commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    refs: dict[str, str] = dataclasses.field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes]) -> str:
        """Adds or replaces files on main, and returns the commit."""
        before = self.refs.get("main", "")
        everything = {**self.commits.get(before, {}), **files}
        text = before + json.dumps(sorted((name, sha256(x)) for name, x in everything.items()))
        made = hashlib.sha1(text.encode()).hexdigest()
        self.commits[made], self.refs["main"] = everything, made
        return made

    @property
    def files(self) -> dict[str, bytes]:
        """The files on main."""
        return self.commits[self.refs["main"]]


@dataclasses.dataclass
class Fault:
    """A planted fault.

    Attributes:
        path: expression that is searched for in the path of the request.
        status: of the answer; None sends the normal answer.
        sent: bytes of the normal answer's body before the connection is closed.
        pause_s: seconds after them.
        times: how often it still happens.
    """

    path: str
    method: str = "GET"
    status: int | None = None
    sent: int = 0
    pause_s: float = 0.0
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Request:
    """A recorded request and the status of its answer."""

    method: str
    path: str
    host: str
    range: str | None
    token: str | None
    status: int


class Refusal(Exception):
    """An answer other than success."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(status)
        self.status, self.code, self.message = status, code, message


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pth"))


class Hub:
    """The state of the Hub.

    Attributes:
        repositories: ``ORG/MODEL`` or ``datasets/ORG/NAME`` -> repository.
        base: URL, for HF_ENDPOINT.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.uploaded: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.base = self.cdn = ""

    def add(self, name: str, files: dict[str, bytes], **fields: Any) -> Repository:
        repository = self.repositories[name] = Repository(**fields)
        repository.commit(files)
        return repository

    def seen(self, method: str, path: str) -> list[Request]:
        """Returns the requests with this method whose path contains an expression."""
        return [one for one in self.requests if one.method == method and re.search(path, one.path)]

    def reset(self) -> None:
        for everything in (self.repositories, self.uploaded, self.faults, self.requests):
            everything.clear()

    def fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and fault.method == method and re.search(fault.path, path):
                fault.times -= 1
                return fault
        return None

    def open(self, name: str, token: str | None, *, files: bool = False) -> Repository:
        """Returns a repository that a token may read."""
        if token not in (None, WRITER, READER):
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        found = self.repositories.get(name)
        if found is None or (found.private and token is None):
            raise Refusal(404 if token else 401, "RepoNotFound", "Repository not found")
        if files and found.gated:
            raise Refusal(403, "GatedRepo", f"Access to model {name} is restricted")
        return found

    def at(self, name: str, revision: str, token: str | None, *, files: bool = False) -> Any:
        """Returns the commit and the files of a revision."""
        repository = self.open(name, token, files=files)
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]


def check_writer(token: str | None) -> None:
    if token is None:
        raise Refusal(401, "", "Invalid username or password.")
    if token not in (WRITER, READER):
        raise Refusal(401, "", "Invalid credentials in Authorization header")
    if token != WRITER:
        raise Refusal(403, "", "You don't have the rights to write to this repository")


@dataclasses.dataclass
class Answer:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(value).encode(), status, {"Content-Type": "application/json"})


def answer(hub: Hub, method: str, target: str, token: str | None, body: bytes) -> Answer:
    """Answers a request as the Hub does."""
    parts = urlsplit(target)
    path, query = unquote(parts.path), parse_qs(parts.query)
    name = r"/?(?P<name>[\w.-]+/[\w.-]+)"
    dataset = r"(?P<name>datasets/[\w.-]+/[\w.-]+)"
    routes = (
        ("GET", rf"/api/models{name}(/revision/(?P<revision>.+))?", info),
        ("GET", rf"/api/{dataset}(/revision/(?P<revision>.+))?", info),
        ("GET", rf"/api/{dataset}/tree/(?P<revision>.+)", tree),
        ("HEAD", rf"/{dataset}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", resolve),
        ("GET", rf"/{dataset}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", resolve),
        ("HEAD", rf"{name}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", resolve),
        ("GET", rf"{name}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", resolve),
        ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})", download),
        ("POST", r"/api/repos/create", create),
        ("POST", r"/api/validate-yaml", validate),
        ("POST", rf"/api/models{name}/preupload/(?P<revision>.+)", preupload),
        ("POST", rf"{name}\.git/info/lfs/objects/batch", batch),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", upload),
        ("POST", rf"/api/models{name}/commit/(?P<revision>.+)", commit),
    )
    try:
        for verb, expression, handler in routes:
            match = re.fullmatch(expression, path)
            if verb == method and match:
                return handler(hub, token, body, query, **match.groupdict())
        raise Refusal(404, "", f"no such endpoint: {method} {path}")
    except Refusal as refusal:
        made = as_json({"error": refusal.message}, refusal.status)
        made.headers |= {"X-Error-Message": refusal.message}
        if refusal.code:
            made.headers["X-Error-Code"] = refusal.code
        return made


def info(
    hub: Hub, token: str | None, body: bytes, query: Any, name: str, revision: str | None
) -> Answer:
    commit, files = hub.at(name, revision or "main", token)
    repository = hub.repositories[name]
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(files)]
    if "blobs" in query:
        for one in siblings:
            content = files[one["rfilename"]]
            one |= {"size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
    content = {"id": name, "sha": commit, "private": repository.private, "siblings": siblings}
    card = files.get("README.md", b"").decode().split("---\n")
    if len(card) > 2:
        content["cardData"] = yaml.safe_load(card[1])
    return as_json(content)


def tree(hub: Hub, token: str | None, body: bytes, query: Any, name: str, revision: str) -> Answer:
    _, files = hub.at(name, revision, token)
    return as_json(
        [
            {
                "type": "file",
                "path": path,
                "size": len(content),
                "oid": hashlib.sha1(content).hexdigest(),
            }
            for path, content in sorted(files.items())
        ]
    )


def resolve(
    hub: Hub, token: str | None, body: bytes, query: Any, name: str, revision: str, file: str
) -> Answer:
    commit, files = hub.at(name, revision, token, files=True)
    if file not in files:
        raise Refusal(404, "EntryNotFound", "Entry not found")
    content = files[file]
    headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
    if is_large(file):
        digest = sha256(content)
        headers |= {
            "X-Linked-ETag": f'"{digest}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{hub.cdn}/cdn/{digest}",
        }
        return Answer(b"", 302, headers)
    return Answer(content, 200, headers | {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})


def download(hub: Hub, token: str | None, body: bytes, query: Any, oid: str) -> Answer:
    assert token is None, "a token was sent to another host"
    for repository in hub.repositories.values():
        for files in repository.commits.values():
            for content in files.values():
                if sha256(content) == oid:
                    return Answer(content, 200, {"Accept-Ranges": "bytes"})
    raise Refusal(404)


def create(hub: Hub, token: str | None, body: bytes, query: Any) -> Answer:
    check_writer(token)
    asked = json.loads(body)
    name = f"{asked.get('organization') or 'me'}/{asked['name']}"
    if name in hub.repositories:
        return as_json({"error": "You already created this model repo", "url": name}, 409)
    hub.add(name, {".gitattributes": b"*.safetensors filter=lfs"})
    hub.repositories[name].private = asked.get("visibility") == "private"
    return as_json({"url": f"{hub.base}/{name}", "name": name})


def validate(hub: Hub, token: str | None, body: bytes, query: Any) -> Answer:
    head = json.loads(body)["content"].split("---\n")[1]
    try:
        assert isinstance(yaml.safe_load(head), dict)
    except (AssertionError, yaml.YAMLError) as error:
        return as_json({"errors": [{"message": str(error)}], "warnings": []}, 400)
    return as_json({"errors": [], "warnings": []})


def preupload(
    hub: Hub, token: str | None, body: bytes, query: Any, name: str, revision: str
) -> Answer:
    check_writer(token)
    _, files = hub.at(name, revision, token)

    def entry(path: str) -> dict[str, Any]:
        content = files.get(path)
        oid = None
        if content is not None:
            blob = b"blob %d\0" % len(content) + content
            oid = sha256(content) if is_large(path) else hashlib.sha1(blob).hexdigest()
        mode = "lfs" if is_large(path) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    return as_json({"files": [entry(file["path"]) for file in json.loads(body)["files"]]})


def batch(hub: Hub, token: str | None, body: bytes, query: Any, name: str) -> Answer:
    check_writer(token)
    objects = [
        {**one, "actions": {"upload": {"href": f"{hub.cdn}/lfs/{one['oid']}"}}}
        for one in json.loads(body)["objects"]
    ]
    return as_json({"transfer": "basic", "objects": objects})


def upload(hub: Hub, token: str | None, body: bytes, query: Any, oid: str) -> Answer:
    if sha256(body) != oid:
        raise Refusal(400, "", "the content does not have this checksum")
    hub.uploaded[oid] = body
    return Answer()


def commit(
    hub: Hub, token: str | None, body: bytes, query: Any, name: str, revision: str
) -> Answer:
    check_writer(token)
    hub.at(name, revision, token)
    files = {}
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = hub.uploaded[value["oid"]]
    made = hub.repositories[name].commit(files)
    return as_json({"commitUrl": f"{hub.base}/{name}/commit/{made}", "commitOid": made})


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Starts a Hub on a free port of 127.0.0.1."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            login = self.headers.get("Authorization")
            token = login.removeprefix("Bearer ") if login else None
            fault = hub.fault(self.command, self.path)
            if fault is not None and fault.status is not None:
                made = Answer(b"", fault.status)
            else:
                made = answer(hub, self.command, self.path, token, body)
            asked = self.headers.get("Range")
            content = made.body
            if asked and made.status == 200:
                start = int(asked.removeprefix("bytes=").partition("-")[0])
                made.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                made.status, content = 206, content[start:]
            host = self.headers.get("Host", "").partition(":")[0]
            hub.requests.append(Request(self.command, self.path, host, asked, token, made.status))
            self.send_response(made.status)
            for key, value in {"Content-Length": str(len(content)), **made.headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if fault is not None and fault.status is None:
                content, self.close_connection = content[: fault.sent], True
            if self.command != "HEAD":
                with contextlib.suppress(OSError):
                    self.wfile.write(content)
                    self.wfile.flush()
            if fault is not None:
                time.sleep(fault.pause_s)

        do_GET = do_HEAD = do_POST = do_PUT = serve

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with loopback.serving(Handler) as port:
        hub.base, hub.cdn = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        yield hub


def start() -> Hub:
    """Starts a Hub for the rest of this process, and makes it the client's.

    The client reads these variables when it is imported.
    """
    assert "huggingface_hub" not in sys.modules, "run this file alone"
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    hub = opened.enter_context(serving())
    os.environ |= {
        "HF_ENDPOINT": hub.base,
        "HF_HOME": opened.enter_context(tempfile.TemporaryDirectory()),
        "HF_HUB_DISABLE_XET": "1",  # the server has only HTTP transfers
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return hub
