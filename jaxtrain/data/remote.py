"""Fetches videos, tars, and lists at ``https://``, ``s3://``, ``gs://`` into the cache, once.

A file in the cache is not requested again: files at a URL are assumed not to change. The size
and ETag are stored in a record next to the file. If the size differs from the record, the file is
removed and fetched again. Callers :func:`discard` a file that is not a valid video, tar or list.

A file is kept only if it arrived complete, with the number of bytes that the server announced, and
if it is not a web page, such as a login page. A server that announces no size must use chunked
transfer, which marks the end. Temporary failures (connection errors, timeouts, HTTP 408, 425, 429
and 5xx) are retried. A download is aborted when it receives fewer than ``_MIN_BYTES`` in
``_STALL_S`` seconds.

http and https:
    Python's own client. User names and passwords come from ``~/.netrc`` (or ``$NETRC``), for https
    and for loopback, from the entry of exactly that host; ``default`` entries are ignored, because
    a list may contain any host. Proxies are set by ``$https_proxy`` and similar variables. Up to
    ten redirects are followed, to http and https only, and never from https to http. Another host
    gets only its own entry of ``~/.netrc``, and only a proxy gets the proxy's login.

s3 and gs:
    The package fsspec with s3fs and gcsfs (``pip install -e '.[cloud]'``), which read credentials
    from the environment and the files of their command-line tools, and have their own timeouts.
    Not obstore, which writes outputs: it reads no profiles of the AWS command line, so that data in
    a bucket of another account would need a second set of keys, and it refuses names such as
    ``a//b``.
"""

import base64
import concurrent.futures
import contextlib
import datetime
import hashlib
import http.client
import ipaddress
import json
import netrc
import os
import random
import re
import secrets
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from jaxtrain import versions
from jaxtrain.errors import InputError, RunAgain, first_line
from jaxtrain.storage import addresses
from jaxtrain.storage.atomic import write_whole
from jaxtrain.storage.disks import check_room, disk_trouble, free_bytes, is_temporary

Result = TypeVar("Result")

_AT_ONCE = 8  # files
_CHUNK_BYTES = 2**20
_TRIES = 4
_FIRST_WAIT_S = 1.0  # doubled with every retry
_LONGEST_WAIT_S = 60.0  # limit for Retry-After
_CONNECT_S = 30.0
_STALL_S = 60.0
_MIN_BYTES = 2**16
# About half a million entries. Lists are parsed in memory, where 3 bytes of JSON can take 64
# (measured).
_MAX_LIST_BYTES = 2**26
_LISTS = (".json", ".jsonl", ".csv", ".txt")
_OLD_S = 24 * 3600.0  # a partial file of this age was left by a killed process
_TO_RETRY = frozenset((408, 425, 429, 500, 502, 503, 504))
_LOGIN = frozenset((401, 403, 407))
_PAGE = re.compile(rb"\s*(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NAME_BYTES = 150  # file systems allow 255, and a partial file has a longer name


class _Again(Exception):
    """A temporary failure.

    Args:
        why: the reason, for messages.
        wait_s: seconds to wait that the server requested.
    """

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class _About(NamedTuple):
    """A server's metadata of a file, for its record."""

    size: int
    etag: str | None
    modified: str | None


def list_below(address: str, flag: str, say: Callable[[str], None]) -> dict[str, tuple[int, str]]:
    """Returns the size and ETag of all files in a folder at an s3 or gs URL, sorted by URL.

    Returns an empty dictionary for other URLs.

    Raises:
        InputError: the folder cannot be listed.
        RunAgain: it cannot be listed after several tries.
    """
    if addresses.split(address).scheme in addresses.HTTP:
        return {}

    def listed() -> dict[str, tuple[int, str]]:
        with _explained(address, flag):
            system, inside = _bucket(address, flag)
            if not system.isdir(inside):
                return {}
            return {
                system.unstrip_protocol(path): (int(about.get("size") or 0), _etag(about))
                for path, about in sorted(system.find(inside, detail=True).items())
            }

    return _retried(listed, address, flag, threading.Event(), say) or {}


def fetch(
    wanted: Iterable[str], cache_root: Path, flag: str, say: Callable[[str], None]
) -> dict[str, str]:
    """Fetches the files that are missing or incomplete in the cache.

    Args:
        wanted: URLs of the files.
        cache_root: the cache folder.
        flag: the option that set the URLs, for messages.
        say: prints a message.

    Returns:
        The path in the cache for each URL.

    Raises:
        InputError: a file cannot be fetched, or is a web page.
        RunAgain: a file cannot be fetched after several tries, or the disk is full.
    """
    paths = {address: _cached_path(address, cache_root) for address in wanted}
    for address in paths:
        addresses.check(address, flag)
    missing = [address for address, path in paths.items() if not _is_kept(path, say)]
    if missing:
        folder = cache_root / "remote"
        say(f"fetching {len(missing):,} of {len(paths):,} files into {folder} (once)")
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [pool.submit(_fetch, one, paths[one], flag, stop, say) for one in missing]
        try:
            for future in concurrent.futures.as_completed(running):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return {address: str(path) for address, path in paths.items()}


def discard(cached: str) -> None:
    """Removes a file from the cache, so that the next start fetches it again.

    Args:
        cached: a path that :func:`fetch` returned.
    """
    path = Path(cached)
    with contextlib.suppress(OSError):
        _record_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _cached_path(address: str, cache_root: Path) -> Path:
    digest = hashlib.sha256(addresses.identity(address).encode("utf-8", "replace")).hexdigest()
    name = os.path.basename(addresses.name_of(address)).encode("utf-8", "replace")
    # Keep the end, which has the suffix. "ignore" drops a truncated character.
    kept = name[-_NAME_BYTES:].decode("utf-8", "ignore")
    return cache_root / "remote" / digest[:2] / digest[2:18] / kept


def _record_of(path: Path) -> Path:
    return path.parent.with_name(f"{path.parent.name}.json")


def _is_kept(path: Path, say: Callable[[str], None]) -> bool:
    """Returns whether the file exists with the recorded size; removes it if the size differs.

    Files fetched by older versions have no record and are accepted.
    """
    try:
        size = path.stat().st_size
    except OSError:
        return False
    try:
        recorded = json.loads(_record_of(path).read_text(encoding="utf-8"))["size"]
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        recorded = None
    if size == recorded:
        return True
    reason = "its record is unreadable" if recorded is None else f"but {recorded!r} were fetched"
    say(f"{path} has {size:,} bytes, {reason}: fetching it again")
    discard(str(path))
    return False


def _fetch(
    address: str, path: Path, flag: str, stop: threading.Event, say: Callable[[str], None]
) -> None:
    """Fetches one file, with retries."""
    _retried(lambda: _fetch_once(address, path, flag, stop), address, flag, stop, say)


def _retried(
    work: Callable[[], Result],
    address: str,
    flag: str,
    stop: threading.Event,
    say: Callable[[str], None],
) -> Result | None:
    """Returns the result of a request that is retried when it raises _Again; None if stopped."""
    shown = addresses.public(address)
    for left in reversed(range(_TRIES)):
        try:
            return work()
        except _Again as failure:
            if stop.is_set():
                return None
            if not left:
                raise RunAgain(
                    f"{flag} {shown} cannot be fetched: {failure} ({_TRIES} tries): check the "
                    "URL and the network, and start again"
                ) from None
            wait_s = _FIRST_WAIT_S * 2 ** (_TRIES - 1 - left) * (1 + random.random() / 2)
            wait_s = max(wait_s, min(failure.wait_s, _LONGEST_WAIT_S))
            say(f"{shown}: {failure}: retrying in {wait_s:.0f} s")
            if stop.wait(wait_s):
                return None
    raise AssertionError("the last try returns or raises")


def _fetch_once(address: str, path: Path, flag: str, stop: threading.Event) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    by_http = addresses.split(address).scheme in addresses.HTTP
    try:
        with _disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_old(path)
            target = open(beside, "wb")  # noqa: SIM115
        with target:
            with _explained(address, flag):
                get = _get_by_http if by_http else _get_from_bucket
                about = get(address, _Target(target, path, address, flag, stop), flag)
            with _disk(path):
                target.flush()
                os.fsync(target.fileno())
        with _disk(path):
            _check_page(beside, address, flag)
            record = {
                "address": addresses.public(address),
                **about._asdict(),
                "fetched": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            # Write the record first: a file without one is accepted as an older version's.
            write_whole(_record_of(path), json.dumps(record) + "\n")
            os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


class _Target:
    """Writes a download to disk, and limits its size.

    Args:
        file: the partial file, open for writing.
        path: the final path.
        address: the source.
        flag: the option that set the URL, for messages.
        stop: is set when another file has failed.
    """

    def __init__(
        self, file: IO[bytes], path: Path, address: str, flag: str, stop: threading.Event
    ) -> None:
        self.received = 0
        self._file = file
        self._path = path
        self._what = f"{flag} {addresses.public(address)}"
        self._stop = stop
        self._limit = 0

    def expect(self, size: int | None) -> None:
        """Sets the announced size in bytes, or None, before the first write.

        Raises:
            InputError: a list is too large.
            RunAgain: the disk has too little free space.
        """
        cure = "free space there, or pass another folder with --data.cache_dir or $JAXTRAIN_CACHE"
        check_room(self._path.parent, size or 0, self._what, cure)
        # A file of unknown size may use half of the free space, which leaves room for others.
        self._limit = free_bytes(self._path.parent) // 2 if size is None else size
        if self._path.suffix.lower() in _LISTS:
            self._limit = min(self._limit, _MAX_LIST_BYTES)
        if size is not None and size > self._limit:
            raise InputError(
                f"{self._what} has {size:,} bytes, but a list at a URL may have at most "
                f"{_MAX_LIST_BYTES:,}: split it, or copy it to this machine"
            )

    def write(self, chunk: bytes) -> None:
        """Writes bytes.

        Raises:
            InputError: more bytes arrive than announced or allowed.
        """
        if self._stop.is_set():
            raise _Again("stopped")
        self.received += len(chunk)
        if self.received > self._limit:
            raise InputError(
                f"{self._what} sends more than {self._limit:,} bytes, which is more than it "
                "announced or than the disk can hold: check the URL"
            )
        with _disk(self._path):
            self._file.write(chunk)


def _get_by_http(address: str, target: _Target, flag: str) -> _About:
    what = f"{flag} {addresses.public(address)}"
    watch = _Watch(target)
    try:
        with watch, watch.opener().open(_request(address, flag), timeout=_CONNECT_S) as response:
            about = _received(response, target, what)
        if watch.stalled:  # a closed connection can look like the end of the file
            raise _Again(watch.reason)
        return about
    except urllib.error.HTTPError as error:
        error.close()
        raise _answered(error, address, what) from None
    except _Again as failure:
        raise _Again(watch.reason if watch.stalled else str(failure)) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        if watch.stalled:
            raise _Again(watch.reason) from None
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise InputError(
                f"{what}: the server's certificate is not trusted ({cause.verify_message}): check "
                "the URL, or set $SSL_CERT_FILE to your certificates"
            ) from None
        if addresses.is_unknown_host(error):
            raise _unknown_host(address, flag) from None
        if isinstance(cause, http.client.IncompleteRead):
            raise _Again(f"the connection ended after {target.received:,} bytes") from None
        reason = getattr(cause, "strerror", None) or type(cause).__name__
        raise _Again(f"the connection failed ({reason})") from None


def _unknown_host(address: str, flag: str) -> InputError:
    return InputError(
        f"{flag} {addresses.public(address)}: {addresses.split(address).host} is an unknown host, "
        "or this machine has no network: check the URL and the network"
    )


def _received(response: http.client.HTTPResponse, target: _Target, what: str) -> _About:
    """Writes the body of a response to the target."""
    if response.status != 200:
        raise InputError(f"{what}: got HTTP {response.status} instead of the file: check the URL")
    kind = (response.headers.get_content_type() or "").lower()
    if kind in ("text/html", "application/xhtml+xml"):
        raise _a_page(what, f"is a web page ({kind})")
    packed = response.headers.get("Content-Encoding", "identity").lower()
    if packed != "identity":
        raise InputError(
            f"{what} is sent with a Content-Encoding that was not requested: store it uncompressed "
            "on the server"
        )
    announced = response.length
    if announced is None and not response.chunked:  # type: ignore[attr-defined]
        raise InputError(
            f"{what}: the server announces no size, so a broken connection looks like the end of "
            "the file: serve it with Content-Length"
        )
    target.expect(announced)
    while chunk := response.read1(_CHUNK_BYTES):
        target.write(chunk)
    if announced is not None and target.received != announced:
        raise _Again(f"received {target.received:,} of {announced:,} bytes")
    tag, modified = response.headers.get("ETag"), response.headers.get("Last-Modified")
    return _About(target.received, tag and tag[:200], modified and modified[:100])


def _answered(error: urllib.error.HTTPError, address: str, what: str) -> Exception:
    """Returns the error to raise for an HTTP error."""
    code = error.code
    status = f"HTTP {code} {http.client.responses.get(code, '')}".strip()
    if code in _TO_RETRY:
        after = error.headers.get("Retry-After", "") if error.headers else ""
        return _Again(status, float(after) if after.isdecimal() and len(after) < 6 else 0.0)
    if code in _LOGIN:
        return InputError(
            f"{what}: {status}: a presigned URL may have expired; otherwise add the login and "
            f"password for {addresses.split(address).host} to ~/.netrc (chmod 600)"
        )
    if 300 <= code < 400:
        return InputError(
            f"{what}: {status}: the redirect is not followed, because there are too many, or it "
            "leads from https to http or to another scheme: pass the URL it leads to"
        )
    return InputError(f"{what} cannot be fetched: {status}: check the URL")


def _a_page(what: str, how: str) -> InputError:
    return InputError(
        f"{what} {how}, perhaps a login page: open it in a browser, and pass the URL of the "
        "file itself"
    )


def _check_page(file: Path, address: str, flag: str) -> None:
    """Raises InputError for a web page, regardless of the announced content type."""
    with open(file, "rb") as opened:
        if _PAGE.match(opened.read(512).removeprefix(_BYTE_ORDER_MARK)):
            raise _a_page(f"{flag} {addresses.public(address)}", "contains HTML")


class _Watch(contextlib.AbstractContextManager["_Watch"]):
    """Closes the connections of a download that stalls in any phase, from a separate thread.

    A socket timeout alone never ends a download of occasional single bytes.
    """

    def __init__(self, target: _Target) -> None:
        self.stalled = False
        self._target = target
        self._connections: list[Any] = []
        self._over = threading.Event()

    @property
    def reason(self) -> str:
        """Returns the error text for a stalled download."""
        return (
            f"the download stalled after {self._target.received:,} bytes (fewer than "
            f"{_MIN_BYTES:,} in {_STALL_S:g} s)"
        )

    def opener(self) -> urllib.request.OpenerDirector:
        """Returns an opener for http and https only, not for file:, ftp: or data:."""
        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.UnknownHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            _Redirects(),
            _Logins(),
            _Http(self._connections),
            _Https(self._connections),
        ):
            opener.add_handler(handler)
        return opener

    def __enter__(self) -> "_Watch":
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for connection in self._connections:
            connection.end()

    def _run(self) -> None:
        before = 0
        while not self._over.wait(_STALL_S):
            if self._target.received - before < _MIN_BYTES:
                self.stalled = True
                break
            before = self._target.received
        while self.stalled and not self._over.wait(0.5):  # a redirect may open another connection
            for connection in self._connections:
                connection.cut()


class _Cut:
    """Mixin for a connection that can be cut, even while its response is read."""

    sock: Any
    _answering: Any = None
    _answer: http.client.HTTPResponse | None = None

    def getresponse(self) -> http.client.HTTPResponse:
        """Returns the response, which takes over the socket."""
        self._answering = self.sock
        answer: http.client.HTTPResponse = super().getresponse()  # type: ignore[misc]
        self._answer = answer
        return answer

    def end(self) -> None:
        """Closes the response, which an error during a redirect leaves open."""
        if self._answer is not None:
            self._answer.close()

    def cut(self) -> None:
        """Shuts down the socket, which ends all reads that wait for it."""
        with contextlib.suppress(OSError, AttributeError):
            (self.sock or self._answering).shutdown(socket.SHUT_RDWR)


class _HttpConnection(_Cut, http.client.HTTPConnection):
    pass


class _HttpsConnection(_Cut, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def __init__(self, made: list[Any]) -> None:
        super().__init__()
        self._made = made

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        def make(host: str, **more: Any) -> _HttpConnection:
            self._made.append(_HttpConnection(host, **more))
            made: _HttpConnection = self._made[-1]
            return made

        return self.do_open(make, req)  # type: ignore[arg-type]


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, made: list[Any]) -> None:
        super().__init__()
        self._made = made

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        def make(host: str, **more: Any) -> _HttpsConnection:
            self._made.append(_HttpsConnection(host, **more))
            made: _HttpsConnection = self._made[-1]
            return made

        return self.do_open(make, req)  # type: ignore[arg-type]


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Returns the next request; raises HTTPError for a redirect that is not allowed."""
        fp.close()  # urllib would first read the complete response, of any length
        before = addresses.split(req.full_url).scheme
        after = addresses.split(newurl).scheme if addresses.is_address(newurl) else ""
        try:
            addresses.refuse_user(newurl, "")
        except InputError:
            after = ""
        if after not in (addresses.HTTP if before == "http" else ("https",)):
            raise urllib.error.HTTPError(req.full_url, code, msg, headers, fp)
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None:  # it inherits all headers, including those for the proxy
            made.remove_header("Proxy-authorization")
        return made


class _Logins(urllib.request.BaseHandler):
    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        """Adds the host's login, which redirected requests do not inherit."""
        parts = urllib.parse.urlsplit(request.full_url)
        login = _login(parts.hostname or "") if _is_private(parts) else None
        if login is not None:
            encoded = base64.b64encode(":".join(login).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {encoded}")
        return request

    https_request = http_request


def _is_private(parts: urllib.parse.SplitResult) -> bool:
    """Returns whether a request is encrypted or stays on this machine."""
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):
        return parts.scheme == "https" or ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _login(host: str) -> tuple[str, str] | None:
    """Returns login and password for a host from ~/.netrc, or None."""
    try:
        found = netrc.netrc(os.environ.get("NETRC") or None).hosts.get(host)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return None
    return None if found is None else (found[0], found[2] or "")


def _request(address: str, flag: str) -> urllib.request.Request:
    parts = addresses.split(address)
    try:
        host = parts.host if parts.host.isascii() else parts.host.encode("idna").decode()
    except UnicodeError:
        raise InputError(
            f"{flag} {addresses.public(address)}: {parts.host!a} is not a valid host name: check "
            "the URL"
        ) from None
    path = _quoted(parts.path or "/") + (f"?{_quoted(parts.query)}" if parts.query else "")
    return urllib.request.Request(
        f"{parts.scheme}://{host}{path}", headers={"User-Agent": "jaxtrain", "Accept": "*/*"}
    )


def _quoted(text: str) -> str:
    """Escapes invalid characters as %XX; existing %XX escapes are kept."""
    text = re.sub("%(?![0-9A-Fa-f]{2})", "%25", text)
    return urllib.parse.quote(text, safe="/%~:@!$&'()*+,;=?[]", errors="replace")


def _get_from_bucket(address: str, target: _Target, flag: str) -> _About:
    system, inside = _bucket(address, flag)
    about = system.info(inside)
    size = about.get("size")
    target.expect(size)
    with system.open(inside, "rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            target.write(chunk)
    if size is not None and target.received != size:
        raise _Again(f"received {target.received:,} of {size:,} bytes")
    modified = about.get("LastModified")
    return _About(target.received, _etag(about) or None, modified and str(modified))


def _etag(about: dict[str, Any]) -> str:
    return str(about.get("ETag") or about.get("etag") or "")


def _bucket(address: str, flag: str) -> tuple[Any, str]:
    """Returns the s3 or gs file system, and the path in it."""
    shown, cure = addresses.public(address), versions.install("cloud")
    try:
        import fsspec
    except ImportError:
        raise InputError(f"{flag} {shown} requires the package fsspec: {cure}") from None
    try:
        system, inside = fsspec.core.url_to_fs(address, **_settings(address, flag))
    except ImportError as error:  # the package for this scheme
        raise InputError(f"{flag} {shown} cannot be read ({first_line(error)}): {cure}") from None
    return system, str(inside)


def _settings(address: str, flag: str) -> dict[str, Any]:
    """Returns what these packages do not take from the environment, but obstore does.

    So the variables that runs in a bucket need are enough for inputs, too.
    """
    if addresses.split(address).scheme == "s3":
        region = os.environ.get("AWS_REGION")  # botocore reads only AWS_DEFAULT_REGION
        return {"client_kwargs": {"region_name": region}} if region else {}
    key = os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY")
    if not key:
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(parsed := json.loads(key), dict):
            return {"token": parsed}
    raise InputError(
        f"{flag} {addresses.public(address)}: GOOGLE_SERVICE_ACCOUNT_KEY is not the content of a "
        "key file of a service account: set it to the JSON, or set GOOGLE_APPLICATION_CREDENTIALS "
        "to the file"
    )


@contextlib.contextmanager
def _explained(address: str, flag: str) -> Iterator[None]:
    """Turns errors of file systems and of their client libraries into one-line errors."""
    try:
        yield
    except (InputError, RunAgain, _Again):
        raise
    except Exception as error:
        kind = type(error).__name__
        line = addresses.scrub(str(error)).strip().partition("\n")[0]
        if addresses.is_unknown_host(error):
            raise _unknown_host(address, flag) from None
        temporary = isinstance(error, ConnectionError | TimeoutError)
        # s3fs turns HTTP 5xx into errors of the operating system; those of gcsfs have the code.
        temporary |= isinstance(error, OSError) and is_temporary(error)
        temporary |= str(getattr(error, "code", "")) in map(str, _TO_RETRY)
        if temporary or "Timeout" in kind or "Connect" in kind:
            raise _Again(f"{kind}: {line}") from None
        shown = addresses.public(address)
        raise InputError(f"{flag} {shown} cannot be fetched: {kind}: {line}") from None


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turns errors of the cache's disk into messages with the fix."""
    try:
        yield
    except OSError as error:
        raise disk_trouble(
            error,
            f"cannot write to the cache folder {path.parent}",
            "pass a writable folder with --data.cache_dir or $JAXTRAIN_CACHE",
        ) from None


def _remove_old(path: Path) -> None:
    """Removes partial files left by killed processes."""
    for left in path.parent.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD_S:
                left.unlink()
