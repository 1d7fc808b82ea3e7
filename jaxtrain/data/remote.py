"""Videos, tars and lists at ``https://``, ``s3://``, ``gs://``: fetched once into the cache.

A file in the cache is not requested again: what an address names is taken not to change. Its size
and ETag are stored beside it. A file of another size than that is removed and fetched again, and
callers :func:`discard` a file that turns out not to be a video, tar or list.

A file is kept only if it arrived complete: with as many bytes as the server announced, and not as a
web page, such as a login page. A server that announces no size must send it in chunks, whose end is
marked. Failures that may pass (the connection, a timeout, HTTP 408, 425, 429 and 5xx) are retried.
A server that sends fewer than ``_LEAST_BYTES`` in ``_STALL_S`` seconds is given up on.

http and https:
    Python's own client. User names and passwords come from ``~/.netrc`` (or ``$NETRC``), for https
    and for loopback, from the entry of exactly that host; ``default`` entries are ignored, because
    a list may name any host. Proxies come from ``$https_proxy`` and the like. Up to ten redirects
    are followed, to http and https only, and never from https to http; another host gets its own
    entry of ``~/.netrc`` only, and only a proxy gets the login of a proxy.

s3 and gs:
    The package fsspec with s3fs and gcsfs (``pip install -e '.[cloud]'``), which read credentials
    from the environment and the files of their command-line tools, and have timeouts of their own.
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
import shutil
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxtrain import versions
from jaxtrain.errors import InputError, RunAgain, first_line
from jaxtrain.storage import addresses
from jaxtrain.storage.atomic import write_whole
from jaxtrain.storage.disks import disk_trouble

_AT_ONCE = 8  # files
_CHUNK_BYTES = 2**20
_TRIES = 4
_FIRST_WAIT_S = 1.0  # doubled from try to try
_LONGEST_WAIT_S = 60.0  # that a server may ask for
_CONNECT_S = 30.0
_STALL_S = 60.0
_LEAST_BYTES = 2**16
# Half a million entries. Lists are parsed in memory, where 3 bytes of JSON can take 64 (measured).
_MOST_LIST_BYTES = 2**26
_LISTS = (".json", ".jsonl", ".csv", ".txt")
_OLD_S = 24 * 3600.0  # a partial file of that age is of a process that was killed
_TO_RETRY = frozenset((408, 425, 429, 500, 502, 503, 504))
_LOGIN = frozenset((401, 403, 407))
_PAGE = re.compile(rb"\s*(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NAME_BYTES = 150  # file systems take 255, and a partial file has a longer name


class _Again(Exception):
    """A failure that may pass.

    Args:
        why: in words.
        wait_s: that the server asks for.
    """

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class _About(NamedTuple):
    """What a server says of a file, to be stored beside it."""

    size: int
    etag: str | None
    modified: str | None


def list_below(address: str, flag: str) -> list[str]:
    """All files below an s3 or gs address that is a folder; none where it is a file or nothing.

    Raises:
        InputError: it cannot be listed.
    """
    if addresses.split(address).scheme in addresses.HTTP:
        return []
    with _explained(address, flag):
        system, inside = _bucket(address, flag)
        if not system.isdir(inside):
            return []
        return [system.unstrip_protocol(path) for path in sorted(system.find(inside))]


def fetch(
    wanted: Iterable[str], cache_root: Path, flag: str, say: Callable[[str], None]
) -> dict[str, str]:
    """Bring files into the cache, those that are not there or not complete.

    Args:
        wanted: addresses of the files.
        cache_root: of the cache.
        flag: the option that named them, for messages.
        say: takes messages for the console.

    Returns:
        address -> the file in the cache.

    Raises:
        InputError: one cannot be fetched, or is a web page.
        RunAgain: one cannot be fetched now, after several tries, or the disk is full.
    """
    places = {address: _place(address, cache_root) for address in wanted}
    for address in places:
        addresses.check(address, flag)
    missing = [address for address, place in places.items() if not _is_kept(place, say)]
    if missing:
        say(
            f"fetching {len(missing):,} of {len(places):,} files into {cache_root / 'remote'}, once"
        )
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [pool.submit(_fetch, one, places[one], flag, stop, say) for one in missing]
        try:
            for future in concurrent.futures.as_completed(running):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return {address: str(place) for address, place in places.items()}


def discard(place: str) -> None:
    """Removes a file from the cache, so that the next start fetches it again.

    Args:
        place: of a file that :func:`fetch` returned.
    """
    path = Path(place)
    with contextlib.suppress(OSError):
        _record_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _place(address: str, cache_root: Path) -> Path:
    digest = hashlib.sha256(addresses.identity(address).encode("utf-8", "replace")).hexdigest()
    name = os.path.basename(addresses.name_of(address)).encode("utf-8", "replace")
    # The end has the suffix. "ignore" drops a character that was cut in two.
    kept = name[-_NAME_BYTES:].decode("utf-8", "ignore")
    return cache_root / "remote" / digest[:2] / digest[2:18] / kept


def _record_of(place: Path) -> Path:
    return place.parent.with_name(f"{place.parent.name}.json")


def _is_kept(place: Path, say: Callable[[str], None]) -> bool:
    """Whether the file is there, with the size on its record; removes it if it is another size.

    What an older version fetched has no record: its size is not known, so it counts.
    """
    try:
        size = place.stat().st_size
    except OSError:
        return False
    try:
        recorded = json.loads(_record_of(place).read_text(encoding="utf-8"))["size"]
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        recorded = None
    if size == recorded:
        return True
    words = "its record cannot be read" if recorded is None else f"{recorded!r} were fetched"
    say(f"{place} has {size:,} bytes, {words}: fetching it again")
    discard(str(place))
    return False


def _fetch(
    address: str, place: Path, flag: str, stop: threading.Event, say: Callable[[str], None]
) -> None:
    """Fetches one file, with retries."""
    shown = addresses.public(address)
    for left in reversed(range(_TRIES)):
        try:
            _fetch_once(address, place, flag, stop)
            return
        except _Again as failure:
            if stop.is_set():
                return
            if not left:
                raise RunAgain(
                    f"{flag} {shown} cannot be fetched: {failure}, {_TRIES} times: check the "
                    "address and the network, and start again"
                ) from None
            wait_s = _FIRST_WAIT_S * 2 ** (_TRIES - 1 - left) * (1 + random.random() / 2)
            wait_s = max(wait_s, min(failure.wait_s, _LONGEST_WAIT_S))
            say(f"{shown}: {failure}: trying again in {wait_s:.0f} s")
            if stop.wait(wait_s):
                return


def _fetch_once(address: str, place: Path, flag: str, stop: threading.Event) -> None:
    beside = place.with_name(f".{place.name}.{secrets.token_hex(6)}")
    by_http = addresses.split(address).scheme in addresses.HTTP
    try:
        with _disk(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            _remove_old(place)
            target = open(beside, "wb")  # noqa: SIM115
        with target:
            with _explained(address, flag):
                get = _get_by_http if by_http else _get_from_bucket
                about = get(address, _Target(target, place, address, flag, stop), flag)
            with _disk(place):
                target.flush()
                os.fsync(target.fileno())
        with _disk(place):
            _check_page(beside, address, flag)
            record = {
                "address": addresses.public(address),
                **about._asdict(),
                "fetched": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            # Before the file: one without a record would count as an older version's.
            write_whole(_record_of(place), json.dumps(record) + "\n")
            os.replace(beside, place)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


class _Target:
    """The file on the disk that takes the bytes, and how many may come.

    Args:
        file: open for writing.
        place: its name in the end.
        address: where it comes from.
        flag: for messages.
        stop: set once another file has failed.
    """

    def __init__(
        self, file: IO[bytes], place: Path, address: str, flag: str, stop: threading.Event
    ) -> None:
        self.came = 0
        self._file = file
        self._place = place
        self._what = f"{flag} {addresses.public(address)}"
        self._stop = stop
        self._most = 0

    def expect(self, size: int | None) -> None:
        """Says how many bytes are announced, None for none, before the first one comes.

        Raises:
            InputError: more than a list may have.
            RunAgain: more than the disk has room for.
        """
        free = shutil.disk_usage(self._place.parent).free
        if size is not None and size > free:
            raise RunAgain(
                f"{self._what} has {size:,} bytes, {free:,} are free in {self._place.parent}: free "
                "space there, or name another folder with --data.cache_dir or $JAXTRAIN_CACHE"
            )
        # Nobody knows when a file of no announced size ends: leave room for others.
        self._most = free // 2 if size is None else size
        if self._place.suffix.lower() in _LISTS:
            self._most = min(self._most, _MOST_LIST_BYTES)
        if size is not None and size > self._most:
            raise InputError(
                f"{self._what} has {size:,} bytes, a list at an address may have "
                f"{_MOST_LIST_BYTES:,}: split it, or copy it to this machine"
            )

    def write(self, chunk: bytes) -> None:
        """Takes bytes.

        Raises:
            InputError: more come than were announced, or may come.
        """
        if self._stop.is_set():
            raise _Again("stopped")
        self.came += len(chunk)
        if self.came > self._most:
            raise InputError(
                f"{self._what} sends more than {self._most:,} bytes, which is more than it "
                "announced or there is room for: check the address"
            )
        with _disk(self._place):
            self._file.write(chunk)


def _get_by_http(address: str, target: _Target, flag: str) -> _About:
    what = f"{flag} {addresses.public(address)}"
    watch = _Watch(target)
    try:
        with watch, watch.opener().open(_request(address, flag), timeout=_CONNECT_S) as response:
            about = _received(response, target, what)
        if watch.stalled:  # what a cut connection leaves can look like an end
            raise _Again(watch.words)
        return about
    except urllib.error.HTTPError as error:
        error.close()
        raise _answered(error, address, what) from None
    except _Again as failure:
        raise _Again(watch.words if watch.stalled else str(failure)) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        if watch.stalled:
            raise _Again(watch.words) from None
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise InputError(
                f"{what}: the server's certificate is not trusted ({cause.verify_message}): check "
                "the address, or name your certificates with $SSL_CERT_FILE"
            ) from None
        if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
            raise InputError(
                f"{what}: unknown host {addresses.split(address).host}: check the address"
            ) from None
        if isinstance(cause, http.client.IncompleteRead):
            raise _Again(f"the connection ended after {target.came:,} bytes") from None
        words = getattr(cause, "strerror", None) or type(cause).__name__
        raise _Again(f"the connection failed ({words})") from None


def _received(response: http.client.HTTPResponse, target: _Target, what: str) -> _About:
    """Takes the body of an answer."""
    if response.status != 200:
        raise InputError(f"{what}: HTTP {response.status} in place of the file: check the address")
    kind = (response.headers.get_content_type() or "").lower()
    if kind in ("text/html", "application/xhtml+xml"):
        raise _a_page(what, f"is a web page ({kind})")
    packed = response.headers.get("Content-Encoding", "identity").lower()
    if packed != "identity":
        raise InputError(
            f"{what} is sent with a Content-Encoding, though none was asked for: store it "
            "uncompressed on the server"
        )
    announced = response.length
    if announced is None and not response.chunked:  # type: ignore[attr-defined]
        raise InputError(
            f"{what}: the server announces no size, so a broken connection cannot be told from the "
            "end of the file: serve it with Content-Length"
        )
    target.expect(announced)
    while chunk := response.read1(_CHUNK_BYTES):
        target.write(chunk)
    if announced is not None and target.came != announced:
        raise _Again(f"{target.came:,} of {announced:,} bytes came")
    tag, modified = response.headers.get("ETag"), response.headers.get("Last-Modified")
    return _About(target.came, tag and tag[:200], modified and modified[:100])


def _answered(error: urllib.error.HTTPError, address: str, what: str) -> Exception:
    """What to raise for an answer that is no file."""
    code = error.code
    words = f"HTTP {code} {http.client.responses.get(code, '')}".strip()
    if code in _TO_RETRY:
        after = error.headers.get("Retry-After", "") if error.headers else ""
        return _Again(words, float(after) if after.isdecimal() and len(after) < 6 else 0.0)
    if code in _LOGIN:
        return InputError(
            f"{what}: {words}: a presigned address may have expired; else put login and password "
            f"for {addresses.split(address).host} into ~/.netrc (chmod 600)"
        )
    if 300 <= code < 400:
        return InputError(
            f"{what}: {words}: the redirect is not followed: it is one of too many, from https to "
            "http, or to another scheme: name the address it leads to"
        )
    return InputError(f"{what} cannot be fetched: {words}: check the address")


def _a_page(what: str, how: str) -> InputError:
    return InputError(
        f"{what} {how}, perhaps a login page: open it in a browser, and give the address of the "
        "file itself"
    )


def _check_page(file: Path, address: str, flag: str) -> None:
    """Raises InputError for a web page, whatever type its server announced."""
    with open(file, "rb") as opened:
        if _PAGE.match(opened.read(512).removeprefix(_BYTE_ORDER_MARK)):
            raise _a_page(f"{flag} {addresses.public(address)}", "holds HTML")


class _Watch(contextlib.AbstractContextManager["_Watch"]):
    """Cuts the connections of a download that stalls, in whatever phase, from a thread of its own.

    A timeout of the socket alone never ends a server that sends a byte now and then.
    """

    def __init__(self, target: _Target) -> None:
        self.stalled = False
        self._target = target
        self._connections: list[Any] = []
        self._over = threading.Event()

    @property
    def words(self) -> str:
        """What to say of a download that stalled."""
        return (
            f"the server sent {self._target.came:,} bytes, the last ones at fewer than "
            f"{_LEAST_BYTES:,} in {_STALL_S:g} s"
        )

    def opener(self) -> urllib.request.OpenerDirector:
        """Opens http and https, and nothing else: no file:, ftp: or data:."""
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
            if self._target.came - before < _LEAST_BYTES:
                self.stalled = True
                break
            before = self._target.came
        while self.stalled and not self._over.wait(0.5):  # a redirect may open another one
            for connection in self._connections:
                connection.cut()


class _Cut:
    """Part of a connection that can be cut, also while its answer is read."""

    sock: Any
    _answering: Any = None
    _answer: http.client.HTTPResponse | None = None

    def getresponse(self) -> http.client.HTTPResponse:
        """The answer, which takes the socket over."""
        self._answering = self.sock
        answer: http.client.HTTPResponse = super().getresponse()  # type: ignore[misc]
        self._answer = answer
        return answer

    def end(self) -> None:
        """Closes the answer, which an error on the way to a redirect leaves open."""
        if self._answer is not None:
            self._answer.close()

    def cut(self) -> None:
        """Ends what waits for the socket."""
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
        """The next request; an HTTPError with the code of the redirect where it is refused."""
        fp.close()  # urllib would read all of the answer first, however long
        before = addresses.split(req.full_url).scheme
        after = addresses.split(newurl).scheme if addresses.is_address(newurl) else ""
        try:
            addresses.refuse_user(newurl, "")
        except InputError:
            after = ""
        if after not in (addresses.HTTP if before == "http" else ("https",)):
            raise urllib.error.HTTPError(req.full_url, code, msg, headers, fp)
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None:  # it has the headers of the first one, also those for the proxy
            made.remove_header("Proxy-authorization")
        return made


class _Logins(urllib.request.BaseHandler):
    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        """Adds the login of the host; a redirect is another request, and does not inherit it."""
        parts = urllib.parse.urlsplit(request.full_url)
        login = _login(parts.hostname or "") if _is_private(parts) else None
        if login is not None:
            encoded = base64.b64encode(":".join(login).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {encoded}")
        return request

    https_request = http_request


def _is_private(parts: urllib.parse.SplitResult) -> bool:
    """Whether nobody between here and the server can read what is sent."""
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):
        return parts.scheme == "https" or ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _login(host: str) -> tuple[str, str] | None:
    """Login and password for a host, from ~/.netrc; None if that has none, or cannot be read."""
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
            "the address"
        ) from None
    path = _quoted(parts.path or "/") + (f"?{_quoted(parts.query)}" if parts.query else "")
    return urllib.request.Request(
        f"{parts.scheme}://{host}{path}", headers={"User-Agent": "jaxtrain", "Accept": "*/*"}
    )


def _quoted(text: str) -> str:
    """With %XX for what an address cannot hold; %XX that is there already stays."""
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
    if size is not None and target.came != size:
        raise _Again(f"{target.came:,} of {size:,} bytes came")
    tag, modified = about.get("ETag") or about.get("etag"), about.get("LastModified")
    return _About(target.came, tag and str(tag), modified and str(modified))


def _bucket(address: str, flag: str) -> tuple[Any, str]:
    """The file system of s3 or gs, and the path there."""
    shown, cure = addresses.public(address), versions.install("cloud")
    try:
        import fsspec
    except ImportError:
        raise InputError(f"{flag} {shown} needs the package fsspec: {cure}") from None
    try:
        system, inside = fsspec.core.url_to_fs(address)
    except ImportError as error:  # the package for this scheme
        raise InputError(f"{flag} {shown} cannot be read ({first_line(error)}): {cure}") from None
    return system, str(inside)


@contextlib.contextmanager
def _explained(address: str, flag: str) -> Iterator[None]:
    """Turns what file systems raise, which is their clients' own errors too, into one line."""
    try:
        yield
    except (InputError, RunAgain, _Again):
        raise
    except Exception as error:
        kind = type(error).__name__
        line = addresses.scrub(str(error)).strip().partition("\n")[0]
        passes = isinstance(error, ConnectionError | TimeoutError)
        if passes or "Timeout" in kind or "Connect" in kind:
            raise _Again(f"{kind}: {line}") from None
        shown = addresses.public(address)
        raise InputError(f"{flag} {shown} cannot be fetched: {kind}: {line}") from None


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[None]:
    """Turns errors of the cache's disk into the way out."""
    try:
        yield
    except OSError as error:
        raise disk_trouble(
            error,
            f"cannot write to the cache folder {place.parent}",
            "name a writable folder with --data.cache_dir or $JAXTRAIN_CACHE",
        ) from None


def _remove_old(place: Path) -> None:
    """Removes partial files that killed processes have left."""
    for left in place.parent.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD_S:
                left.unlink()
