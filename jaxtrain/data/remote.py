"""Fetches videos and tars at ``s3://`` and ``gs://`` into the cache, once; ``https://`` to prepare.

A copy of an object in a bucket is kept for its size and ETag, so that a changed object is fetched
again. A file whose version is unknown, at ``https://`` or in a list, is assumed not to change.

A file is kept only if it arrived complete, with the number of bytes that the server announced, and
if it is not a web page, such as a login page. obstore retries failed requests. A connection that
breaks, or is silent for a minute, is continued where it broke if the server has ranges.

``https://`` (and ``http://``) has no logins; proxies and certificates are set by ``$https_proxy``,
``$SSL_CERT_FILE``, and similar variables. Redirects are followed, but not from https to http. The
credentials of buckets are those of :mod:`jaxtrain.storage.bucket`.
"""

import concurrent.futures
import contextlib
import datetime
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import obstore
from obstore.store import HTTPStore

from jaxtrain import terminal
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import addresses, bucket_folders, cache, stand_ins
from jaxtrain.storage.atomic import appearing, remove_leftovers
from jaxtrain.storage.bucket import normalized
from jaxtrain.storage.disks import check_room, disk_trouble

_FILES_AT_ONCE = 8
_CHUNK_BYTES = 2**20
_TIMEOUTS = {"connect_timeout": "30s", "read_timeout": "60s", "timeout": "7d"}
_RETRIES = 8  # of a request; about 30 s in total
_BREAKS = 8  # of connections, per file
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0  # doubled with each break
_NAME_BYTES = 150  # file systems allow 255, and a partial file has a longer name
_STATUS = re.compile(r"status code: ((\d{3})[ \w]*)")
_BROWSE = "open the URL in a browser, as for a login page, and pass that of the file itself"
_REDIRECT = (
    "the redirect is not followed, because there are too many, or it leads from https to http or "
    "to another scheme: pass the URL it leads to"
)
# obstore has one type for these errors. Its text ends with Rust's, which names the cause.
_CAUSES = (
    (
        "Name or service not known|No address associated|nodename nor servname",
        "{host} is an unknown host, or this machine has no network: check the URL and the network",
    ),
    (
        "InvalidCertificate",
        "the server's certificate is not trusted: check the URL, or set $SSL_CERT_FILE to your "
        "certificates",
    ),
    (
        "MissingContentLength",
        "the server announces no size, so a broken connection looks like the end of the file: "
        "serve it with Content-Length",
    ),
    ("BadScheme|following redirect|BareRedirect", _REDIRECT),
)


def list_folder(address: str, flag: str) -> dict[str, tuple[int, str]]:
    """Returns the size and ETag of the files in a folder at an s3 or gs URL, sorted by URL.

    Files and folders whose names begin with a dot are omitted, as on a disk. Returns an empty
    dictionary for other URLs.

    Raises:
        InputError: the folder cannot be listed.
        RunAgain: the bucket is unavailable.
    """
    if addresses.split(address).scheme in addresses.HTTP:
        return {}
    bucket, folder = _object_at(address, flag)
    folder = folder.rstrip("/")
    with _named(flag):
        versions = bucket.versions(folder)
    return {
        f"{bucket.url}/{name}": version
        for name, version in sorted(versions.items())
        if "/." not in f"/{name.removeprefix(folder).removeprefix('/')}"
    }


def version_of(address: str, flag: str) -> tuple[int, str] | None:
    """Returns size and ETag of an object at an s3 or gs URL; None for other URLs, or if absent."""
    if addresses.split(address).scheme in addresses.HTTP:
        return None
    bucket, name = _object_at(address, flag)
    with _named(flag):
        version: tuple[int, str] | None = bucket.about(name)
        return version


def fetch(
    wanted: Mapping[str, tuple[int, str] | None],
    cache_root: Path,
    flag: str,
    say: Callable[[str], None],
) -> dict[str, str]:
    """Fetches the files that are missing in the cache.

    Args:
        wanted: URLs of the files, each with its size and ETag; None if these are unknown.

    Raises:
        InputError: a file cannot be fetched, or is a web page.
        RunAgain: a file cannot be fetched after several tries, or the disk is full.
    """
    paths = {address: _cached_path(address, wanted[address], cache_root) for address in wanted}
    for address in paths:
        addresses.check(address, flag)
    missing = [address for address, path in paths.items() if not path.exists()]
    if missing:
        folder = cache_root / "remote"
        changed = [addresses.public(a) for a in missing if wanted[a] and _has_another(paths[a])]
        if changed:
            say(
                f"{flag}: {len(changed):,} of {len(paths):,} files have changed since they were "
                f"fetched, such as {changed[0]}"
            )
        say(f"fetching {len(missing):,} of {len(paths):,} files into {folder} (once)")
    stop = threading.Event()
    counted = terminal.progress_bar("fetching", "files", len(missing), 0, say)
    several = len(missing) > 1  # a worker of prepare clips, which has no console, fetches one
    with (
        counted if several else contextlib.nullcontext(lambda done, failed: None) as show,
        concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as pool,
    ):
        running = [pool.submit(_fetch, url, paths[url], flag, stop) for url in missing]
        try:
            for done, future in enumerate(concurrent.futures.as_completed(running), 1):
                future.result()
                show(done, 0)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return {address: str(path) for address, path in paths.items()}


def copy_folder(
    address: str,
    folder: Path,
    cache_root: Path,
    flag: str,
    say: Callable[[str], None],
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fetches the files of a folder at an s3 or gs URL, and links them in a folder on disk.

    Args:
        wanted: which files to fetch, by their names relative to the folder.
    """
    top = f"{normalized(address, flag)}/"
    listed = {
        url: version
        for url, version in list_folder(address, flag).items()
        if wanted(url.removeprefix(top))
    }
    for url, copy in fetch(listed, cache_root, flag, say).items():
        place = folder / url.removeprefix(top)
        # The other processes of a host make the same links, and active runs read them.
        if not (place.is_symlink() and os.readlink(place) == copy):
            place.parent.mkdir(parents=True, exist_ok=True)
            beside = place.with_name(f".{place.name}.{os.getpid()}")
            beside.unlink(missing_ok=True)
            beside.symlink_to(copy)
            beside.replace(place)


def _has_another(path: Path) -> bool:
    """Returns whether the cache has another version of a file."""
    folder = path.parent.parent
    return folder.is_dir() and any(other != path.parent.name for other in os.listdir(folder))


def _cached_path(address: str, version: tuple[int, str] | None, cache_root: Path) -> Path:
    digest = hashlib.sha256(addresses.identity(address).encode("utf-8", "replace")).hexdigest()
    name = os.path.basename(addresses.name_of(address)).encode("utf-8", "replace")
    # Keep the end, which has the suffix. "ignore" drops a truncated character.
    kept = name[-_NAME_BYTES:].decode("utf-8", "ignore")
    folder = cache_root / "remote" / digest[:2] / digest[2:18]
    return folder / (cache.digest(version)[:16] if version else "") / kept


def _fetch(address: str, path: Path, flag: str, stop: threading.Event) -> None:
    """Fetches one file, which appears complete or not at all."""
    by_http = addresses.split(address).scheme in addresses.HTTP
    subject = f"{flag} {addresses.public(address)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, alone=False)
        with appearing(path) as beside:
            if by_http:
                _download(address, beside, subject, stop)
            else:
                _download_from_bucket(address, beside, flag, stop)
            _check_page(beside, subject)
    except OSError as error:
        raise disk_trouble(
            error,
            f"cannot write to the cache folder {path.parent}",
            "pass a writable folder with --data.cache_dir or $JAXTRAIN_CACHE",
        ) from None


def _download_from_bucket(address: str, path: Path, flag: str, stop: threading.Event) -> None:
    bucket, name = _object_at(address, flag)
    with _named(flag):
        exists = bucket.download(name, path, received=lambda count: _go_on(stop))
    if not exists:
        raise InputError(f"{flag} {address} cannot be fetched: there is no such object")


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise RunAgain("another file has failed")


def _object_at(address: str, flag: str) -> tuple[Any, str]:
    if addresses.split(address).query:
        raise InputError(
            f"{flag} {addresses.public(address)} has a query: remove what follows the question mark"
        )
    with _named(flag):
        return bucket_folders.object_at(address)


@contextlib.contextmanager
def _named(flag: str) -> Iterator[None]:
    """Adds the flag to the errors of a bucket."""
    try:
        yield
    except (InputError, RunAgain) as error:
        raise type(error)(f"{flag} {error}") from None


def _download(address: str, path: Path, subject: str, stop: threading.Event) -> None:
    """Writes the file at an http or https URL to a path.

    Args:
        address: the URL, with its query. It is used as it is: a store for a host would change
            queries and %-escapes.
        path: the file, which is empty.
    """
    scheme, host, inside, query = addresses.split(address)
    options: Any = {**_TIMEOUTS, "allow_http": scheme == "http", "user_agent": "jaxtrain"}
    retries: Any = {"max_retries": _RETRIES, "retry_timeout": datetime.timedelta(minutes=5)}
    url = f"{scheme}://{host}{inside}" + (f"?{query}" if query else "")
    try:
        store = HTTPStore.from_url(url, client_options=options, retry_config=retries)
    except Exception:
        raise InputError(f"{subject} is not a valid URL: check its host and port") from None
    received, version = 0, dict[str, Any]()
    with open(path, "wb") as file:
        for breaks in range(_BREAKS + 1):
            if breaks:
                stop.wait(min(_FIRST_WAIT_S * 2 ** (breaks - 1), _LONGEST_WAIT_S))
            try:
                answer = obstore.get(
                    store, "", options={"range": {"offset": received}} if received else None
                )
            except obstore.exceptions.NotSupportedError:  # the server has no ranges
                answer = None
            except Exception as error:
                raise _error(error, subject, host) from None
            if not received:
                assert answer is not None, "only ranges are not supported"
                version = {**answer.meta}
                _check_kind(answer.attributes.get("Content-Type", ""), subject)
                cure = "free space there, or pass another folder with --data.cache_dir or "
                check_room(
                    path.parent,
                    version["size"],
                    f"fetching {subject}",
                    f"{cure}$JAXTRAIN_CACHE",
                )
            elif answer is None or {**answer.meta} != version:
                received = 0
                file.seek(0)
                file.truncate()
                continue
            stream = iter(answer.stream(_CHUNK_BYTES))
            while True:
                _go_on(stop)
                try:
                    chunk = next(stream, None)
                except Exception:  # the connection broke
                    break
                if chunk is None:
                    break
                file.write(chunk)
                received += len(chunk)
            if received == version["size"]:
                return
    raise RunAgain(
        f"{subject} cannot be fetched: received {received:,} of {version['size']:,} bytes, after "
        f"{_BREAKS} broken connections: check the network, and start again"
    )


def _error(error: Exception, subject: str, host: str) -> InputError | RunAgain:
    """Returns the error for a request that obstore does not retry, or no longer."""
    text = str(error)
    status = _STATUS.search(text)
    if status is None:
        for cause, message in _CAUSES:
            if re.search(cause, text):
                return InputError(f"{subject} cannot be fetched: {message.format(host=host)}")
        return RunAgain(
            f"{subject} cannot be fetched: the connection failed: check the URL and the network, "
            "and start again"
        )
    status_text = f"HTTP {status[1].strip()}"
    if status[2] in ("401", "403", "407"):
        return InputError(
            f"{subject}: {status_text}: a presigned URL may have expired; for other files that "
            "require a login, pass presigned URLs, or download them yourself"
        )
    if status[2] in ("408", "425", "429") or status[2].startswith("5"):
        return RunAgain(f"{subject} cannot be fetched: {status_text}: start again later")
    cure = _REDIRECT if status[2].startswith("3") else "check the URL"
    return InputError(f"{subject} cannot be fetched: {status_text}: {cure}")


def _check_kind(content_type: str, subject: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml"):
        raise InputError(f"{subject} is a web page ({kind}): {_BROWSE}")


def _check_page(file: Path, subject: str) -> None:
    """Raises InputError for what stands for a file, regardless of the announced content type."""
    if reason := stand_ins.of(file):
        raise InputError(f"{subject} is {reason}; or {_BROWSE}")
