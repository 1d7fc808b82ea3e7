"""Videos, tars and lists at ``https://``, ``s3://``, ``gs://``: fetched once into the cache.

The package fsspec reads them (``pip install -e '.[cloud]'``). A file that is in the cache is not
asked for again: what lies at an address is taken to stay as it is.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError

_AT_ONCE = 8  # files
_PIECE_BYTES = 2**22


def is_remote(path: str) -> bool:
    """Whether a path is an address."""
    scheme, mark, _ = path.partition("://")
    return bool(mark) and scheme.replace("+", "").isalnum()


def name_of(address: str) -> str:
    """What a video at an address is called: the address without its scheme and its query."""
    return address.partition("://")[2].partition("?")[0].strip("/")


def list_below(address: str, flag: str) -> list[str]:
    """All files below an address that is a folder; none where it is a file or nothing.

    Raises:
        InputError: it cannot be listed.
    """
    system, inside = _system(address, flag)
    with _explained(address, flag):
        if not system.isdir(inside):
            return []
        return [system.unstrip_protocol(path) for path in sorted(system.find(inside))]


def fetch(
    addresses: Iterable[str], cache_root: Path, flag: str, say: Callable[[str], None]
) -> dict[str, str]:
    """Bring files into the cache, those that are not there yet.

    Args:
        addresses: of the files.
        cache_root: of the cache.
        flag: the option that named them, for messages.
        say: takes messages for the console.

    Returns:
        address -> the file in the cache.

    Raises:
        InputError: one cannot be fetched, or came in another size than it has there.
    """
    places = {address: _place(address, cache_root) for address in addresses}
    missing = [address for address, place in places.items() if not place.exists()]
    if missing:
        say(
            f"fetching {len(missing):,} of {len(places):,} files into {cache_root / 'remote'}, once"
        )
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [pool.submit(_fetch, one, places[one], flag) for one in missing]
        try:
            for future in running:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {address: str(place) for address, place in places.items()}


def _place(address: str, cache_root: Path) -> Path:
    digest = hashlib.sha256(address.encode()).hexdigest()
    return cache_root / "remote" / digest[:2] / digest[2:18] / os.path.basename(name_of(address))


def _fetch(address: str, place: Path, flag: str) -> None:
    system, inside = _system(address, flag)
    beside = place.with_name(f".{place.name}.{secrets.token_hex(6)}")
    with _explained(address, flag):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with system.open(inside, "rb") as source, open(beside, "wb") as target:
                shutil.copyfileobj(source, target, _PIECE_BYTES)
                target.flush()
                os.fsync(target.fileno())
            told, came = system.info(inside).get("size"), beside.stat().st_size
            if told is not None and came != told:
                raise InputError(f"{flag} {address}: {came:,} of {told:,} bytes came; start again")
            os.replace(beside, place)
        finally:
            beside.unlink(missing_ok=True)


def _system(address: str, flag: str) -> tuple[Any, str]:
    """The file system that an address belongs to, and the path there."""
    cure = "pip install -e '.[cloud]'"
    try:
        import fsspec
    except ImportError as error:
        raise InputError(f"{flag} {address} needs the package fsspec: {cure}") from error
    try:
        system, inside = fsspec.core.url_to_fs(address)
    except ImportError as error:  # the package for this scheme
        raise InputError(f"{flag} {address} cannot be read ({error}): {cure}") from error
    except ValueError as error:
        raise InputError(
            f"{flag} {address}: {error}; use a path, https://, s3:// or gs://"
        ) from error
    return system, str(inside)


@contextlib.contextmanager
def _explained(address: str, flag: str) -> Any:
    """Turns what file systems raise, which is their clients' own errors too, into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        line = str(error).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {line[0]}"
        raise InputError(f"{flag} {address} cannot be fetched: {text}") from error
