"""A client for one folder of an object store, ``s3://BUCKET/PATH`` or ``gs://BUCKET/PATH``.

It uses the package obstore, which retries short failures, uploads large files in parts, and
supports conditional writes: object stores cannot rename, so these are what a lock can be built
from.

Credentials come from the environment: ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
``AWS_SESSION_TOKEN``, ``AWS_REGION``, ``AWS_ENDPOINT_URL`` and the others that obstore reads, or
``GOOGLE_APPLICATION_CREDENTIALS``, ``GOOGLE_SERVICE_ACCOUNT_KEY``, or the file that ``gcloud auth
application-default login`` writes; without them, from the role of the machine. obstore does not
read the profiles of the AWS command line: boto3 does, if it is installed.
"""

import collections
import contextlib
import copy
import datetime
import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import obstore
import obstore.store

from jaxtrain import versions
from jaxtrain.errors import InputError, RunAgain, first_line
from jaxtrain.storage import addresses, atomic

Params = ParamSpec("Params")
Result = TypeVar("Result")

SCHEMES = ("s3", "gs", "gcs")
_RETRIES, _RETRY_S = 4, 30
# S3 answers the end of an upload in parts with white space for minutes until the object is there.
_CONNECT_S, _SILENT_S, _REQUEST_S = "10s", "120s", "900s"
# On top of the tries of obstore, which end after seconds: a store that limits the rate may refuse
# longer than that.
_WAITS_S = (5.0, 30.0)
# S3 allows 10,000 parts: those of files above 150 GB, such as tokens, are larger.
_PART_BYTES, _MOST_PARTS, _PARTS_AT_ONCE = 2**24, 9_000, 4
# Of all files that are copied at the same time. A file has one more than those of its requests:
# the part that is read from the disk or written to it.
_PARTS_IN_MEMORY = 20
_MOST_IN_MEMORY = 2**26
_KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for temporary ones also "
    "AWS_SESSION_TOKEN",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the key file of a service account",
}
_EXPORT = """eval "$(aws configure export-credentials --format env)\""""
_STATUS = re.compile(r"status code: (\d{3}[ \w]*)|<Code>(\w+)</Code>")
_REJECTED = re.compile(r"ExpiredToken|TokenExpired|InvalidAccessKeyId|SignatureDoesNotMatch")
_FULL = re.compile(r"Quota\w*|\w*LimitExceeded|EntityTooLarge|InsufficientStorage")
_BAD_KEY = re.compile(r"service account file|reading pem file", re.IGNORECASE)
_MACHINE_ROLE = re.compile(r"169\.254\.169\.254|metadata\.google\.internal")
_NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist", re.IGNORECASE)


class Unavailable(RunAgain):
    """The store did not do what was asked, which may work later; the message has the fix."""


class Busy(Unavailable):
    """The store or the network may work within a minute, unlike credentials that are refused."""


class _Absent(Exception):
    """There is no such object."""


class TooLarge(InputError):
    """An object has more bytes than a run of jaxtrain writes there."""


class Content(NamedTuple):
    """A small object.

    Attributes:
        version: identifies this content, for :meth:`Bucket.put_if`.
    """

    data: bytes
    version: Any


def is_bucket(text: str) -> bool:
    """Whether this is the URL of a bucket, or such a URL whose slashes pathlib has collapsed."""
    return re.match(r"(s3|gs|gcs):/+[^/]", text) is not None


def normalized(url: str, flag: str) -> str:
    """Returns the URL of a folder in a bucket without a final slash.

    Raises:
        InputError: it is not such a URL, or contains a user, a password, or a query.
    """
    if match := re.fullmatch(r"(s3|gs|gcs):/+(.*)", url.strip()):
        url = f"{match[1]}://{match[2]}"
    public_url = addresses.public(url)
    if not addresses.is_address(url):
        raise InputError(
            f"{flag} {public_url}: not a bucket: write s3://BUCKET/PATH or gs://BUCKET/PATH"
        )
    addresses.check(url, flag)
    address = addresses.split(url)
    if address.scheme not in SCHEMES:
        raise InputError(f"{flag} {public_url}: use a local folder, s3://BUCKET/PATH, or gs://...")
    if address.query:
        raise InputError(f"{flag} {public_url} has a query: remove what follows the question mark")
    names = [name for name in address.path.split("/") if name]
    if not names or any(name in (".", "..") for name in names):
        raise InputError(
            f"{flag} {public_url} is not a folder in a bucket: write {address.scheme}://BUCKET/PATH"
        )
    return (
        f"{'gs' if address.scheme == 'gcs' else address.scheme}://{address.host}/{'/'.join(names)}"
    )


def _patient(
    method: Callable[Concatenate["Bucket", Params], Result],
) -> Callable[Concatenate["Bucket", Params], Result]:
    """Makes a method try again while the store is :class:`Busy`."""

    @functools.wraps(method)
    def tried(self: "Bucket", *args: Params.args, **kwargs: Params.kwargs) -> Result:
        for wait_s in self._waits_s:
            try:
                return method(self, *args, **kwargs)
            except Busy:
                time.sleep(wait_s)
        return method(self, *args, **kwargs)

    return tried


class Bucket:
    """The objects below a URL; names are relative to it. Safe to use from several threads.

    A store that is busy is asked again for a minute or two, except by :meth:`put_if`, after which
    it may be unknown who wrote. All methods that ask it may raise Unavailable or InputError.

    Args:
        url: from :func:`normalized`.
        store: an obstore store to use instead of the URL's, for tests.
        waits_s: before each of these tries.

    Raises:
        InputError: the environment has invalid settings.
    """

    def __init__(self, url: str, store: Any = None, waits_s: tuple[float, ...] = _WAITS_S) -> None:
        self.url = url
        self._waits_s = waits_s
        self._keys = _KEYS[addresses.split(url).scheme]
        self._memory = _MemoryLimit(_PARTS_IN_MEMORY * _PART_BYTES)
        self._store = self._opened() if store is None else store

    def impatient(self) -> "Bucket":
        """Returns a client for callers that try again on their own: it fails within seconds."""
        client = copy.copy(self)
        client._waits_s = ()
        return client

    @_patient
    def put(
        self, name: str, data: bytes | Path, sent: Callable[[int], object] = lambda count: None
    ) -> None:
        """Writes an object, from memory or from a file; it appears complete or not at all.

        Args:
            data: its content, or the file with it.
            sent: called with the number of bytes, each time that the store has taken some, and
                with a negative number if they are lost, because the upload failed.
        """
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        part_bytes = max(_PART_BYTES, -(-size // _MOST_PARTS))
        counted = 0

        def chunks(path: Path) -> Iterator[bytes]:
            nonlocal counted
            with path.open("rb") as file:
                for number in itertools.count():
                    if not (chunk := file.read(part_bytes)):
                        return
                    yield chunk
                    if number > _PARTS_AT_ONCE:  # one of them must have been taken
                        counted += part_bytes
                        sent(part_bytes)

        content = chunks(data) if isinstance(data, Path) and size > part_bytes else data
        try:
            with self._copying(data, size, part_bytes), self._explained(f"write {name}"):
                obstore.put(
                    self._store,
                    name,
                    content,
                    chunk_size=part_bytes,
                    max_concurrency=_PARTS_AT_ONCE,
                )
        except BaseException:
            sent(-counted)
            raise
        sent(size - counted)

    def put_if(self, name: str, data: bytes, version: Any) -> Any:
        """Writes a small object unless another writer came first; returns its new version.

        Args:
            version: of the content to replace; None if there must be no object.

        Returns:
            The version; None if another writer came first, or the object is gone.

        Raises:
            Unavailable, InputError: it is unknown whether it is written.
        """
        mode: Any = "create" if version is None else version
        exceptions = obstore.exceptions
        with self._explained(f"write {name}"), _unless_absent():
            try:
                return _version(obstore.put(self._store, name, data, mode=mode))
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return None
            except (NotImplementedError, exceptions.NotSupportedError):
                raise InputError(
                    f"{self.url} does not support conditional writes, which the lease of a run "
                    "requires: use S3, Google Cloud Storage, R2, or a recent MinIO"
                ) from None
        return None

    @_patient
    def get(self, name: str) -> Content | None:
        """Reads a small object; None if there is none.

        Raises:
            TooLarge: it has more than 64 MiB.
        """
        with self._explained(f"read {name}"), _unless_absent():
            answer = obstore.get(self._store, name)
            self._check_size(name, answer.meta["size"], _MOST_IN_MEMORY)
            return Content(bytes(answer.bytes()), _version(answer.meta))
        return None

    def download(
        self,
        name: str,
        path: Path,
        *,
        max_bytes: int | None = None,
        size: int | None = None,
        received: Callable[[int], object] = lambda count: None,
    ) -> bool:
        """Copies an object to a file; returns whether there is such an object.

        Without an object, or with one that is too large, no file is written or replaced.

        Args:
            path: the file; replaced if it exists.
            max_bytes: that the object may have; None without a limit.
            size: bytes of the object, if they are known: the store is not asked first, and
                :meth:`read` raises if it has fewer or none.
            received: called with the number of bytes of each part, and may raise.

        Raises:
            Unavailable, InputError: it cannot be read completely, or changes meanwhile.
        """
        about = self.about(name) if size is None else (size, "")
        if about is None:
            return False
        self._check_size(name, about[0], max_bytes)
        path.unlink(missing_ok=True)
        with path.open("xb") as file, self._copying(path, about[0], _PART_BYTES):
            for part in self._parts(name, *about):
                received(len(part))
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        return True

    @_patient
    def read(self, name: str, start: int, stop: int, tag: str) -> Any:
        """Returns a range of an object, as a buffer of bytes.

        Args:
            stop: end of the range, within the object.
            tag: ETag that the object must have; "" for any.

        Raises:
            Unavailable, InputError: it cannot be read, or has another ETag.
        """
        options: Any = {"range": (start, stop)}
        if tag:
            options["if_match"] = tag
        happened = "was deleted"
        with self._explained(f"read {name}"), _unless_absent():
            try:
                return obstore.get(self._store, name, options=options).bytes()
            except obstore.exceptions.PreconditionError:
                happened = "changed"
        raise Unavailable(f"{self.url}/{name} {happened} while it was read: start again")

    def fetch(self, name: str, path: Path, max_bytes: int | None = None) -> bool:
        """Copies an object to a file, which appears complete or not at all.

        Args:
            path: the file; an older one is replaced. Its folder must exist.

        Returns:
            Whether there is such an object; without one, the file is unchanged.
        """
        with contextlib.suppress(_Absent), atomic.appearing(path) as beside:
            if not self.download(name, beside, max_bytes=max_bytes):
                raise _Absent
            return True
        return False

    def _copying(
        self, data: bytes | Path, size: int, part_bytes: int
    ) -> contextlib.AbstractContextManager[None]:
        """Waits until memory for the parts of a file is free."""
        if isinstance(data, bytes):  # it has its memory already
            return contextlib.nullcontext()
        return self._memory.taken(min(size, (_PARTS_AT_ONCE + 1) * part_bytes))

    def _parts(self, name: str, end: int, tag: str) -> Iterator[Any]:
        """Yields the parts of an object, a few of which are read at once.

        Each has a request of its own. One for the complete object would be cut off after
        ``_REQUEST_S``, and has the speed of a single connection.
        """

        reading: collections.deque[Future[Any]] = collections.deque()
        with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            for start in range(0, end, _PART_BYTES):
                reading.append(
                    pool.submit(self.read, name, start, min(start + _PART_BYTES, end), tag)
                )
                if len(reading) == _PARTS_AT_ONCE:
                    yield reading.popleft().result()
            while reading:
                yield reading.popleft().result()

    @_patient
    def about(self, name: str) -> tuple[int, str] | None:
        """Returns the bytes and ETag of an object; None if there is none."""
        with self._explained(f"read {name}"), _unless_absent():
            meta = obstore.head(self._store, name)
            return meta["size"], meta["e_tag"] or ""
        return None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Returns the objects below a folder: name -> bytes."""
        return {name: size for name, (size, _) in self.versions(folder).items()}

    @_patient
    def names(self, folder: str = "") -> list[str]:
        """Returns the names of the objects and folders in a folder, not of what is below them."""
        with self._explained(f"list {folder or 'the folder'}"):
            listed = obstore.list_with_delimiter(self._store, prefix=folder or None)
        paths = [*listed["common_prefixes"], *(entry["path"] for entry in listed["objects"])]
        return [path.rpartition("/")[2] for path in paths]

    @_patient
    def versions(self, folder: str = "") -> dict[str, tuple[int, str]]:
        """Returns the objects below a folder: name -> bytes and ETag."""
        with self._explained(f"list {folder or 'the folder'}"):
            pages = obstore.list(self._store, prefix=folder or None)
            entries = itertools.chain.from_iterable(pages)
            return {entry["path"]: (entry["size"], entry["e_tag"] or "") for entry in entries}

    @_patient
    def delete(self, names: list[str]) -> None:
        """Deletes objects; those that do not exist are ignored.

        Raises:
            Unavailable, InputError: some may be left.
        """
        if not names:
            return
        with self._explained("delete objects"):
            with _unless_absent():
                obstore.delete(self._store, names)
                return
            for name in names:  # Google reports an absent one, and the rest may be left
                with _unless_absent():
                    obstore.delete(self._store, [name])

    def _check_size(self, name: str, size: int, max_bytes: int | None) -> None:
        if max_bytes is not None and size > max_bytes:
            raise TooLarge(
                f"{self.url}/{name} has {size:,} bytes instead of at most {max_bytes:,}: a run of "
                "jaxtrain did not write it"
            )

    def _opened(self) -> Any:
        url = addresses.split(self.url)
        options: dict[str, Any] = {
            "connect_timeout": _CONNECT_S,
            "read_timeout": _SILENT_S,
            "timeout": _REQUEST_S,
        }
        # Plain http only where the environment names an endpoint that has it.
        endpoints = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "GOOGLE_BASE_URL")
        if any(os.environ.get(name, "").startswith("http://") for name in endpoints):
            options["allow_http"] = True
        with self._explained("open the bucket"):
            profile = _profile(self.url) if url.scheme == "s3" else None
            settings: dict[str, Any] = {
                "client_options": options,
                "retry_config": {
                    "max_retries": _RETRIES,
                    "retry_timeout": datetime.timedelta(seconds=_RETRY_S),
                },
            }
            if url.scheme == "s3":
                if profile is not None:
                    settings["credential_provider"] = profile
                    self._keys = f"log in again (aws sso login), or {self._keys}"
                # S3 requires a region; other stores with its API accept any.
                if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
                    settings["region"] = getattr(profile, "config", {}).get("region", "us-east-1")
            return obstore.store.from_url(self.url, **settings)

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Turns the errors of obstore, with dozens of lines, into one line with the fix."""
        try:
            yield
        except (InputError, RunAgain):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:  # the file's own disk
                raise
            raise self._error(action, error) from None

    def _error(self, action: str, error: Exception) -> InputError | RunAgain:
        text = str(error)
        reasons = [status or code for status, code in _STATUS.findall(text)]
        why = ", ".join(dict.fromkeys(reason.strip() for reason in reasons))
        why = why or addresses.scrub(_cause(text))
        bucket = addresses.split(self.url).host
        if _NO_BUCKET.search(text):
            return InputError(
                f"{self.url}: the bucket {bucket} does not exist: check its name, or create it"
            )
        exceptions = obstore.exceptions
        invalid = exceptions.UnknownConfigurationKeyError | exceptions.InvalidPathError
        # obstore raises ValueError for a name such as "a//b".
        if isinstance(error, invalid) or type(error) is ValueError:
            return InputError(
                f"{self.url}: cannot {action} ({why}): rename that object, or use another path"
            )
        if _BAD_KEY.search(text):  # which may repeat a part of the key
            why = "no such file" if "No such file" in text else "it is not such a key"
            return InputError(
                f"{self.url}: cannot read the key of the service account ({why}): {self._keys}"
            )
        if _REJECTED.search(text) or isinstance(error, exceptions.UnauthenticatedError):
            return Unavailable(
                f"{self.url}: cannot {action} ({why}): the credentials are wrong or have expired: "
                f"{self._keys}"
            )
        if _FULL.search(text):
            return Unavailable(
                f"{self.url}: cannot {action} ({why}): raise the quota or free space"
            )
        if isinstance(error, PermissionError | exceptions.PermissionDeniedError):
            return Unavailable(
                f"{self.url}: cannot {action} ({why}): allow these credentials to list, read, "
                f"write, and delete there, or {self._keys}"
            )
        if _MACHINE_ROLE.search(text):
            more = f"; for a profile of the AWS command line, run {_EXPORT}"
            return Unavailable(
                f"{self.url}: cannot {action} (no credentials were found): {self._keys}"
                + (more if self.url.startswith("s3:") else "")
            )
        return Busy(f"{self.url}: cannot {action} ({why}): check the network and the store")


class _MemoryLimit:
    """Limits the host memory of everything that is copied at the same time.

    Measured for eight files of 100 MiB at a time, in an upload: 642 MiB without a limit.

    Args:
        count: in bytes. What asks for more waits for all of them.
    """

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Waits until this many bytes are left, and takes them while the block runs."""
        count = max(0, min(count, self._count))
        with self._changed:
            self._changed.wait_for(lambda: self._left >= count)
            self._left -= count
        try:
            yield
        finally:
            with self._changed:
                self._left += count
                self._changed.notify_all()


@contextlib.contextmanager
def _unless_absent() -> Iterator[None]:
    """Ends the block where there is no such object, but not where there is no such bucket."""
    try:
        yield
    except FileNotFoundError as error:
        if _NO_BUCKET.search(str(error)):
            raise


def _version(about: Any) -> dict[str, str]:
    return {key: about[key] for key in ("e_tag", "version") if about.get(key) is not None}


def _profile(url: str) -> Any:
    """Returns the credentials of a profile of the AWS command line; None without a profile.

    Raises:
        InputError: the profile that AWS_PROFILE names cannot be read.
    """
    named = os.environ.get("AWS_PROFILE")
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
    )
    if os.environ.get("AWS_ACCESS_KEY_ID") or not (
        named or any(os.path.isfile(os.path.expanduser(file)) for file in files)
    ):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if named is None:  # the role of the machine may be meant
            return None
        raise InputError(
            f"{url}: AWS_PROFILE={named} requires boto3: {versions.pip('install', 'boto3')}, or "
            f"run {_EXPORT}"
        ) from None
    try:
        return Boto3CredentialProvider()
    except ValueError:  # none of the files has credentials
        return None
    except Exception as error:  # of botocore, such as a profile that does not exist
        raise InputError(f"{url}: {first_line(error)}: correct AWS_PROFILE, or unset it") from None


def _cause(text: str) -> str:
    """Returns the innermost reason in an error of obstore, in one short line."""
    line = text.split("\n\nDebug source")[0].replace("\n", " ")
    return re.sub(r".*Error performing \w+ \S+ in \S+(, after[^-]*)?\s*- ", "", line)[:160].strip()
