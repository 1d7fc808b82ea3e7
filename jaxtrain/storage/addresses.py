"""Checks URLs of data, and removes secrets before they are recorded or printed.

A URL may contain a secret. Passwords (``https://user:password@host/``) are rejected. A query
(``?X-Amz-Signature=...``) is used to fetch but never recorded or printed: ``?hidden`` replaces it.

Signatures are not part of the name or the path in the cache: storage services issue a new one for
each presigned URL of the same file. So preparation continues with a newly signed URL.
Signatures are the parameters of AWS (versions 4 and 2), Google Cloud, CloudFront and Azure SAS; any
other parameter, such as ``token``, counts as part of the URL.

A fragment (``#...``) of an http URL never reaches the server and is dropped. A secret in the
path itself cannot be recognized.
"""

import hashlib
import re
import socket
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlencode

from jaxtrain.errors import InputError

T = TypeVar("T")

SCHEMES = ("https", "http", "s3", "gs", "gcs")
"""Supported schemes."""
HTTP = ("https", "http")

_HIDDEN = "hidden"  # in place of a query
_HASH_DIGITS = 12  # 48 bits: a collision among a million URLs has a probability of 0.2%

_SIGNATURES = re.compile(
    "x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id",
    re.IGNORECASE,
)
# Only together with "sig", as their names are short.
# https://learn.microsoft.com/rest/api/storageservices/create-service-sas
_AZURE = {"sig", "sv", "ss", "srt", "sp", "se", "st", "spr", "sr", "sip", "si", "sdd", "ses"}
_AZURE |= {"skoid", "sktid", "skt", "ske", "sks", "skv", "saoid", "suoid", "scid"}

_ADDRESS = re.compile(r"([A-Za-z][\w+.:-]*)://(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:@\\/?#]+)(:\d{1,5})?")
_BUCKET = re.compile(r"[\w.-]+|arn:[\w.:-]+")
# Texts may be untrusted and of any size: each expression runs in linear time.
_START = re.compile(r"([A-Za-z][\w+.-]{0,30})://")
_HOST_LIKE, _BEFORE_SLASH = re.compile(r"[^/?#\s]*"), re.compile(r"[^/@\[\s]*")
_NO_PORT, _TO_AT = re.compile(r":(?!\d+(?:/|$))"), re.compile(r"[^@\s]*")
# In a text, a URL ends at a space or quote, and pathlib may have collapsed the double slash.
_IN_TEXT = re.compile(
    r"(?P<start>[A-Za-z][\w+.-]{0,30}://|\b(?:https?|s3a?|gcs|gs|ftps?|sftp|ssh|hf|file):/)"
    r"(?P<rest>[^\s\"'<>]*)",
    re.IGNORECASE,
)
_NOT_IN_TEXT = re.compile(r"[\s\"'<>]")
_ENDING = ".,;:!)]}"
_LONGEST = 2**13  # characters; what common servers accept


class SplitAddress(NamedTuple):
    """The parts of a URL.

    Attributes:
        scheme: in lower case.
        host: with the port; the bucket for s3 and gs.
        path: as typed, with its leading slash.
        query: after the first ``?``; "" if there is none.
    """

    scheme: str
    host: str
    path: str
    query: str


def is_address(text: str) -> bool:
    """Whether this is a URL, supported or not, rather than a path."""
    return _ADDRESS.match(text.lstrip()) is not None


def split(address: str) -> SplitAddress:
    """Splits a URL. Drops an http fragment; in a bucket, # is an ordinary character."""
    match = _ADDRESS.match(address.strip())
    assert match, "is_address() holds"
    scheme, rest = match[1].lower(), match[2]
    if scheme in HTTP:
        rest = rest.partition("#")[0]
    before, _, query = rest.partition("?")
    host, slash, path = before.partition("/")
    return SplitAddress(scheme, host, slash + path, query)


def check(address: str, flag: str) -> None:
    """Checks the form of a URL, before the network is used.

    Raises:
        InputError: the URL contains a user or password, has no host or an unknown scheme, is too
            long, or was recorded without its query.
    """
    refuse_user(address, flag)
    if len(address) > _LONGEST:
        raise InputError(
            f"{flag} {split(address).scheme[:20]}://... has {len(address):,} characters, and the "
            f"limit is {_LONGEST:,}: use a shorter URL"
        )
    url, public_address = split(address), public(address)
    if url.scheme not in SCHEMES:
        raise InputError(
            f"{flag} {public_address}: unknown scheme {url.scheme}://: use a path, https://, "
            "s3://, or gs://"
        )
    if not (_HOST if url.scheme in HTTP else _BUCKET).fullmatch(url.host):
        kind = "host" if url.scheme in HTTP else "bucket"
        raise InputError(
            f"{flag} {url.scheme}://...: what follows :// is not a {kind}: write "
            f"{url.scheme}://{kind.upper()}/PATH"
        )
    if not address.strip().isprintable():
        raise InputError(f"{flag} {public_address!r} contains a control character: remove it")
    if url.query == _HIDDEN:
        raise InputError(
            f"{flag} {public_address} is a recorded URL without its query: pass the complete URL"
        )
    if url.query and _NOT_IN_TEXT.search(address.strip()):
        raise InputError(
            f"{flag} {public_address} has a query and contains a space, quote, or angle bracket: "
            "write %20, %22, %27, %3C, or %3E"
        )


def refuse_user(text: str, flag: str) -> None:
    """Rejects a text that contains a URL with a user or password.

    Raises:
        InputError: there is one; the message does not repeat the URL.
    """
    if "@" not in text:
        return
    without = 0  # up to here, no @ precedes the next space
    for match in _START.finditer(text):
        end, without = _user_end(text, match.end(), without)
        if end:
            break
    else:
        return
    scheme = match[1].lower()
    google = "set GOOGLE_APPLICATION_CREDENTIALS"
    cures = {
        "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        "gs": google,
        "gcs": google,
    }
    raise InputError(
        f"{flag} {scheme}://***@...: the URL contains a user name or password, which would be "
        f"recorded: remove what precedes the @, and {cures.get(scheme, 'use a presigned URL')}"
    )


def is_unknown_host(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is that no host has this name.

    The name is most likely wrong, so that trying again later does not help.
    """
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False


def identity(address: str) -> str:
    """Returns the URL without its signature, to identify it in the cache.

    May contain secrets: only hash it. A URL without a query is unchanged.
    """
    url = split(address)
    kept = _kept(url.query)
    return f"{url.scheme}://{url.host}{url.path}" + (f"?{kept}" if kept else "")


def public(address: str) -> str:
    """Returns a URL as it may be recorded and printed; public URLs are unchanged."""
    match = _ADDRESS.fullmatch(address.strip())
    return scrub(address) if match is None else _public(f"{match[1]}://", match[2])


def name_of(address: str) -> str:
    """Returns a name for data at a URL: host, path, and a hash of the unsigned query.

    The hash precedes the suffix, ``a.org/x/b.query-f94e14b94966.mp4``, so that the name works as a
    file name.
    """
    url = split(address)
    name = f"{url.host}{url.path}".strip("/")
    kept = _kept(url.query)
    if not kept:
        return name
    folder, slash, last = name.rpartition("/")
    stem, dot, ending = last.rpartition(".")
    mark = f"query-{hashlib.sha256(kept.encode()).hexdigest()[:_HASH_DIGITS]}"
    return folder + slash + (f"{stem}.{mark}.{ending}" if dot and stem else f"{last}.{mark}")


def scrub(text: str) -> str:
    """Removes user, password, and query from each URL in a text."""
    if ":/" not in text:
        return text
    return _IN_TEXT.sub(_replaced, text)


def scrubbed(value: T) -> T:
    """Applies :func:`public` to each string in JSON-able values and tuples."""
    result: Any = value
    if isinstance(value, str):
        result = public(value)
    elif isinstance(value, dict):
        result = {scrubbed(key): scrubbed(item) for key, item in value.items()}
    elif isinstance(value, list):
        result = [scrubbed(item) for item in value]
    elif isinstance(value, tuple):
        result = tuple(scrubbed(item) for item in value)
    return result  # type: ignore[no-any-return]


def _replaced(match: re.Match[str]) -> str:
    rest = match["rest"].rstrip(_ENDING)
    return _public(match["start"], rest) + match["rest"][len(rest) :]


def _user_end(text: str, start: int = 0, without: int = 0) -> tuple[int, int]:
    """Finds the end of the user or password in a URL.

    They precede the first slash, or, with a slash in the password, follow a colon without a port.

    Args:
        start: the position after ``://``.
        without: up to this position, no @ precedes the next space.

    Returns:
        The position after the @, 0 if there is none; and ``without`` for the rest of the text.
    """
    host = _HOST_LIKE.match(text, start)
    assert host
    if "@" in host[0]:
        return start + host[0].rindex("@") + 1, without
    before = _BEFORE_SLASH.match(text, start)
    assert before
    if start < without or not _NO_PORT.search(text[start : before.end() + 1]):
        return 0, without
    secret = _TO_AT.match(text, start)
    assert secret
    if text[secret.end() : secret.end() + 1] == "@":
        return secret.end() + 1, without
    return 0, secret.end()


def _public(start: str, rest: str) -> str:
    user, _ = _user_end(rest)
    rest = f"***@{rest[user:]}" if user else rest
    if start.lower().startswith(HTTP):
        rest = rest.partition("#")[0]
    before, _, query = rest.partition("?")
    return start + before + (f"?{_HIDDEN}" if query else "")


def _kept(query: str) -> str:
    """Returns the query parameters that identify the file, sorted."""
    pairs = parse_qsl(query, keep_blank_values=True)
    azure = _AZURE if any(name == "sig" for name, _ in pairs) else set()
    kept = [
        (name, value)
        for name, value in pairs
        if not _SIGNATURES.fullmatch(name) and name not in azure
    ]
    return urlencode(sorted(kept), errors="surrogatepass")
