"""Explains errors of the Hugging Face Hub: its models and data sets fail in the same ways."""

from collections.abc import Iterator
from typing import Any, NoReturn

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import addresses
from jaxtrain.storage.disks import disk_trouble

_NETWORK = ("httpx", "httpcore", "requests", "urllib3", "aiohttp", "socket", "ssl")
_LATER, _SERVERS_FAULT = (408, 429), 500  # retry after: timeout, too many requests, server errors


def is_temporary(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is of the network or a failing server.

    Each library has its own classes for these, which need not derive from Python's. A host that
    does not exist is not temporary.
    """
    answer = response(error)
    if answer is not None:  # the Hub was reached
        return bool(answer.status_code in _LATER or answer.status_code >= _SERVERS_FAULT)
    of_network = any(
        isinstance(cause, ConnectionError | TimeoutError)
        or any(kind.__module__.startswith(_NETWORK) for kind in type(cause).__mro__)
        for cause in _chain(error)
    )
    return of_network and not addresses.is_unknown_host(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def response(error: BaseException | None) -> Any:
    """Returns the Hub's response that an error or one of its causes is about, or None."""
    answers = (getattr(cause, "response", None) for cause in _chain(error))
    return next((answer for answer in answers if answer is not None), None)


def reason(error: BaseException) -> str:
    """Returns the cause of an error in a few words: the Hub's status, or the message."""
    answer = response(error)
    if answer is not None:
        phrase = getattr(answer, "reason_phrase", "")
        return f"the Hub answers {answer.status_code} {phrase}".strip()
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def fail(
    error: Exception, text: str, *, kind: str, page: str, absent: str, offline: str = ""
) -> NoReturn:
    """Raises an error of the Hub, the network, or a disk as one line, and any other unchanged.

    Args:
        text: what was asked for, as typed.
        kind: ``model`` or ``dataset``.
        page: of the repository, below the Hub's URL.
        absent: message if there is no such repository, or no access to it.
        offline: what to do where there is no network.
    """
    import huggingface_hub
    import huggingface_hub.errors as hub_errors

    endpoint, why = huggingface_hub.HfApi().endpoint, reason(error)
    or_offline = f"; or {offline}" if offline else ""
    if is_temporary(error):
        raise RunAgain(
            f"{text}: {endpoint} cannot be reached ({why}): run the command again later{or_offline}"
        ) from error
    if addresses.is_unknown_host(error):
        raise InputError(
            f"{text}: {endpoint} is an unknown host, or this machine has no network: check both "
            f"and HF_ENDPOINT{or_offline}"
        ) from error
    if isinstance(error, hub_errors.GatedRepoError):
        raise InputError(
            f"{text}: access to this {kind} is restricted: request it on {endpoint}/{page}, then "
            "run hf auth login"
        ) from error
    if isinstance(error, hub_errors.RevisionNotFoundError):
        raise InputError(
            f"{text}: no such revision; use a branch, tag, or commit of the {kind}"
        ) from error
    if isinstance(error, hub_errors.RepositoryNotFoundError | hub_errors.HFValidationError):
        raise InputError(f"{text}: {absent}") from error
    if response(error) is not None:
        raise InputError(
            f"{text}: the Hub refuses the request ({why}): check that your "
            f"account may read {endpoint}/{page}, and run hf auth login"
        ) from error
    if isinstance(error, OSError) and error.errno is not None:
        raise disk_trouble(
            error,
            f"{text}: cannot read or write {error.filename or 'a file'}",
            "make it readable and writable, or set $HF_HOME to another folder",
        ) from error
    if isinstance(error, ValueError | KeyError | OSError):  # a response of an unknown form
        raise InputError(f"{text}: {why}") from error
    raise error  # not from itself: who follows its causes would never end
