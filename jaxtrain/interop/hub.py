"""Fetches models from the Hugging Face Hub, and publishes them there.

``hf:ORG/MODEL[@REVISION][:FILE]`` names a model. Only the files that jaxtrain reads are downloaded,
never code or pickles:

- with ``:FILE``: this weights file (``.safetensors``, or a PyTorch file, which is read as data);
- if the repository has a ``config.json``: a transformers folder, which is ``config.json``,
  ``model.safetensors`` or the files that its index lists, and ``tokenizer.json``;
- otherwise its only ``.safetensors`` file.

The client ``huggingface_hub`` does the transfers. It follows ``HF_TOKEN``, ``HF_HOME``,
``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``, moves a file into its cache only when it is complete, and
downloads it once if several processes of a host need it.
"""

import dataclasses
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jaxtrain import terminal
from jaxtrain.checkpoint import resume
from jaxtrain.checkpoint.pointer import BEST, CHECKPOINTS
from jaxtrain.data.text import hub_datasets, tokenizer, transformers_files
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain, short_repr
from jaxtrain.interop import huggingface
from jaxtrain.storage import addresses, bucket, cache, hub_errors, tensor_files
from jaxtrain.storage.atomic import expanded
from jaxtrain.terminal import Say

T = TypeVar("T")

FORM = f"{hub_datasets.PREFIX}ORG/MODEL[@REVISION][:FILE]"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_OF_TOKENIZER = (*transformers_files.FILES, tokenizer.NAME, huggingface.SETTINGS)
_COMMIT = re.compile("[0-9a-f]{40}")
_PAUSES_S = (1.0, 4.0, 15.0)  # between attempts, after an error that may be temporary
_TIMEOUT_S = 30.0  # for an answer about a repository; the client has none


@dataclasses.dataclass(frozen=True)
class Named:
    """A parsed :data:`FORM`.

    Attributes:
        repository: ``ORG/MODEL``.
        revision: a branch, tag or commit; "" is the newest commit of the main branch.
        file: a weights file in the repository; "" for the model of the repository.
    """

    repository: str
    revision: str
    file: str
    text: str


@dataclasses.dataclass(frozen=True)
class Found:
    """A model that exists on the Hub.

    Attributes:
        sizes: the files to download -> bytes. The last one completes the model.
    """

    commit: str
    sizes: Mapping[str, int]

    def only(self, *names: str) -> "Found":
        """Returns this model with only some of its files."""
        return Found(self.commit, {name: self.sizes[name] for name in names if name in self.sizes})

    def missing(self, repository: str) -> list[str]:
        """Returns the files that are not in the cache; uses no network."""
        import huggingface_hub

        def path(name: str) -> Any:
            return huggingface_hub.try_to_load_from_cache(repository, name, revision=self.commit)

        return [name for name in self.sizes if not isinstance(path(name), str)]

    def described(self, names: Iterable[str]) -> str:
        """Describes files in a few words, with the commit."""
        sizes = [self.sizes[name] for name in names]
        count = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
        return f"{count}, {sum(sizes) / 2**20:.1f} MiB, commit {self.commit}"


def is_remote(source: str | Path) -> bool:
    """Whether :func:`local` downloads a source."""
    return is_named(source) or bucket.is_bucket(str(source))


def is_named(source: str | Path) -> bool:
    """Whether a source names a model on the Hub rather than a path."""
    return str(source).startswith(hub_datasets.PREFIX)


def parse(text: str, flag: str = "") -> Named:
    """Parses :data:`FORM`; uses no network."""
    display = f"{flag} {text}".strip()
    name, _, file = text.removeprefix(hub_datasets.PREFIX).partition(":")
    repository, at, revision = name.partition("@")
    if not _REPOSITORY.fullmatch(repository) or (at and not revision):
        raise InputError(f"{display}: write {FORM}, such as hf:openai-community/gpt2@main")
    if text.count(":") > 1:
        path = Path(file)
        if path.is_absolute() or ".." in path.parts or path.suffix not in tensor_files.ENDINGS:
            raise InputError(
                f"{display}: FILE must be a weights file of the repository "
                f"({', '.join(tensor_files.ENDINGS)})"
            )
    return Named(repository, revision, file, display)


def local(
    source: str | Path,
    *,
    say: Say = terminal.warn,
    flag: str = "SOURCE",
    cache_dir: str | None = None,
) -> Path:
    """Returns the path of a source; downloads a model of the Hub, or a checkpoint of a bucket.

    Args:
        source: a path, :data:`FORM`, or the URL of a run or checkpoint in a bucket.
        flag: the flag or field that has the URL of a bucket, for messages.
        cache_dir: for checkpoints of a bucket; None is the cache folder of :func:`cache.root`.

    Raises:
        RunAgain: the Hub cannot be reached now, or the disk is full.
    """
    if bucket.is_bucket(str(source)):
        return resume.checkpoint_at_url(
            str(source), flag, cache.root(cache_dir), say, (BEST, CHECKPOINTS)
        )[0]
    if not is_named(source):
        return expanded(source)
    named = parse(str(source))
    return download(named, find(named, say), say)


def with_local_source(model: Any, say: Say, cache_dir: str | None = None) -> Any:
    """Returns a model's config with a local ``init_from``; downloads it from the Hub.

    All processes of a run call this. Process 0 determines the commit, so all use the same one.
    """
    if model.init_from is not None and bucket.is_bucket(model.init_from):
        fetch = functools.partial(
            local, model.init_from, say=say, flag="model.init_from", cache_dir=cache_dir
        )
        path = process_group.process_zero_first(fetch, "model")
        return dataclasses.replace(model, init_from=str(path))
    named = _source_of(model)
    if named is None:
        return model

    def decide() -> str:
        return json.dumps(dataclasses.asdict(find(named, say)))

    files = Found(**json.loads(process_group.process_zero_decides(decide)))
    return dataclasses.replace(model, init_from=str(download(named, files, say)))


def with_local_tokenizer(model: Any, say: Say) -> Any:
    """Like :func:`with_local_source`, but without the weights, and in one process.

    For commands that read a run's data without training.
    """
    named = _source_of(model)
    if named is None or model.tokens_per_example() is None:
        return model
    files = find(named, say)
    if tokenizer.NAME not in files.sizes:
        return model
    path = download(named, files.only(*_OF_TOKENIZER), say)
    return dataclasses.replace(model, init_from=str(path))


def _source_of(model: Any) -> Named | None:
    """Returns the model on the Hub that a model's config starts from; None if there is none."""
    if model.init_from is None or not is_named(model.init_from):
        return None
    return parse(model.init_from, "model.init_from")


def find(named: Named, say: Say) -> Found:
    """Looks up a model on the Hub; if ``HF_HUB_OFFLINE`` is set, in the cache."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return _cached(named)
    info = _request(
        named,
        say,
        lambda: huggingface_hub.HfApi().model_info(
            named.repository,
            revision=named.revision or None,
            files_metadata=True,
            timeout=_TIMEOUT_S,
        ),
    )
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise InputError(
            f"{named.text}: the server returned no commit hash: HF_ENDPOINT must be a Hub"
        )
    listed = {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def index() -> Path:
        fetch = huggingface_hub.hf_hub_download
        return Path(
            _request(
                named, say, lambda: fetch(named.repository, huggingface.INDEX, revision=info.sha)
            )
        )

    return Found(info.sha, _needed(named, listed, index))


def _cached(named: Named) -> Found:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = huggingface_hub.snapshot_download(
            named.repository, revision=named.revision or None, local_files_only=True
        )
        folder = Path(path)
        paths = (path for path in folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
        # The cache has only what was downloaded, which may be one file of a complete model.
        if not named.file and huggingface.SETTINGS not in sizes:
            raise InputError(f"no {huggingface.SETTINGS}; a single file is hf:ORG/MODEL:FILE")
        return Found(folder.name, _needed(named, sizes, lambda: folder / huggingface.INDEX))
    except (LocalEntryNotFoundError, InputError) as error:
        why = f" ({error})" if isinstance(error, InputError) else ""
        raise InputError(
            f"{named.text} is not completely in the cache, and HF_HUB_OFFLINE is set: unset it, "
            f"or download the model on a machine with a network into the same $HF_HOME{why}"
        ) from error


def _needed(named: Named, sizes: Mapping[str, int], index: Callable[[], Path]) -> dict[str, int]:
    """Selects the files to download, and orders them.

    Args:
        sizes: all files of the repository -> bytes.
    """
    weights = sorted(name for name in sizes if name.endswith(tensor_files.ENDINGS))
    root = [x for x in weights if x.endswith(tensor_files.SAFETENSORS) and "/" not in x]
    if named.file:
        if named.file not in sizes:
            raise InputError(
                f"{named.text}: no such file; its weights files are {_listed(weights)}"
            )
        names = [named.file]
    elif huggingface.SETTINGS in sizes:
        if huggingface.ARRAYS in sizes:
            names = [huggingface.ARRAYS]
        elif huggingface.INDEX in sizes:
            names = tensor_files.shards(index())
            if missing := [name for name in names if name not in sizes]:
                raise InputError(
                    f"{named.text}: {huggingface.INDEX} lists {_listed(missing)}, which the "
                    "repository does not have: use another revision"
                )
            names.append(huggingface.INDEX)
        else:
            raise InputError(
                f"{named.text} has a {huggingface.SETTINGS}, but neither {huggingface.ARRAYS} nor "
                f"{huggingface.INDEX}; its weights files are {_listed(weights)}: use a revision "
                "with safetensors, or convert the model"
            )
        names += [name for name in _OF_TOKENIZER if name in sizes]
    elif len(root) == 1:
        names = root
    else:
        raise InputError(
            f"{named.text} has no {huggingface.SETTINGS}, and its weights files are "
            f"{_listed(weights)}: name one as hf:{named.repository}:FILE"
        )
    return {name: sizes[name] for name in names}


def _listed(names: list[str]) -> str:
    limit = 4
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(short_repr(name) for name in names[:limit]) + more if names else "none"


def download(named: Named, files: Found, say: Say) -> Path:
    """Downloads the missing files of a model, and returns its path: a folder, or a weights file."""
    import huggingface_hub

    missing = files.missing(named.repository)
    if missing:
        say(f"downloading {named.text} ({files.described(missing)})")
    fetch = functools.partial(
        huggingface_hub.hf_hub_download, named.repository, revision=files.commit
    )
    paths = [Path(_request(named, say, functools.partial(fetch, name))) for name in files.sizes]
    if missing and not _COMMIT.fullmatch(named.revision):  # for a later HF_HUB_OFFLINE
        _request(
            named,
            say,
            lambda: huggingface_hub.HfApi().resolve_revision(
                named.repository, revision=named.revision or None
            ),
        )
    return paths[-1].parent if paths[-1].name == huggingface.SETTINGS else paths[-1]


def check_login(repository: str) -> None:
    """Checks the name of a repository to publish in, and that there is a token; uses no network."""
    import huggingface_hub

    flag = f"--push {repository}"
    if not _REPOSITORY.fullmatch(repository) or "/" not in repository:
        raise InputError(f"{flag}: write --push ORG/MODEL")
    if huggingface_hub.is_offline_mode():
        raise InputError(f"{flag}: HF_HUB_OFFLINE is set: unset it")
    if huggingface_hub.get_token() is None:
        raise InputError(
            f"{flag}: you are not logged in: run hf auth login, or set HF_TOKEN to a token with "
            "write access"
        )


def push(folder: Path, repository: str, *, private: bool, message: str, say: Say) -> str:
    """Uploads the files of a folder in one commit; creates the repository if it is missing.

    A model card that is already there is kept, since people edit theirs.

    Returns:
        The URL of the model's page.

    Raises:
        RunAgain: the Hub cannot be reached now.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    named = Named(repository, "", "", f"--push {repository}")

    def call(request: Callable[[], T]) -> T:
        return _request(named, say, request, writes=True)

    call(lambda: api.create_repo(repository, private=private or None, exist_ok=True))
    info = call(lambda: api.model_info(repository, timeout=_TIMEOUT_S))
    if private and info.private is not True:
        raise InputError(
            f"--push {repository} --private: this repository already exists and is public: make "
            "it private in its settings on the Hub, or push to another one"
        )
    kept = (
        [huggingface.CARD]
        if any(file.rfilename == huggingface.CARD for file in info.siblings or ())
        else []
    )
    if kept:
        say(f"{repository} keeps its {huggingface.CARD}: delete it there to get a new one")
    call(
        lambda: api.upload_folder(
            folder_path=folder, repo_id=repository, commit_message=message, ignore_patterns=kept
        )
    )
    return f"{api.endpoint}/{repository}"


def _request(named: Named, say: Say, request: Callable[[], T], *, writes: bool = False) -> T:
    """Returns the result of a request to the Hub; tries again after temporary errors.

    Raises:
        InputError, RunAgain: the request failed; the message has the fix.
    """
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # its warnings of retries take several lines each
    if not terminal.lively(sys.stderr):
        disable_progress_bars()
    for pause_s in (*_PAUSES_S, None):
        try:
            return request()
        except (InputError, RunAgain):
            raise
        except Exception as error:  # from several libraries
            if pause_s is None or not hub_errors.is_temporary(error):
                _fail(named, error, writes=writes)
            say(f"{named.text}: {hub_errors.reason(error)}; trying again in {pause_s:g} s")
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def _fail(named: Named, error: Exception, *, writes: bool) -> NoReturn:
    """Raises errors of the Hub and the network as one line, and any other error unchanged."""
    import huggingface_hub
    import huggingface_hub.errors as refusals

    text, endpoint = named.text, huggingface_hub.HfApi().endpoint
    reason = hub_errors.reason(error)
    status = getattr(hub_errors.response(error), "status_code", None)
    of_network = hub_errors.is_temporary(error) or addresses.is_unknown_host(error)
    broken = isinstance(error, RuntimeError | refusals.XetDownloadError)
    if status is None and broken and not of_network:
        raise RunAgain(f"{text}: the transfer failed ({reason}): run the command again") from error
    if writes and status == 403:
        raise InputError(
            f"{text}: the token has no write access there ({reason}): make one with write access "
            f"on {endpoint}/settings/tokens, or push to a repository of your own"
        ) from error
    if status == 401 and (writes or not isinstance(error, refusals.RepositoryNotFoundError)):
        raise InputError(
            f"{text}: the Hub does not accept the token ({reason}): run hf auth login, or set "
            "HF_TOKEN to a valid one"
        ) from error
    hub_errors.fail(
        error,
        text,
        kind="model",
        page=named.repository,
        absent=f"no such model on {endpoint}, or no access to it ({reason}): check the name; if it "
        "is private, run hf auth login or set HF_TOKEN",
        offline="" if writes else "set HF_HUB_OFFLINE=1 to use what was downloaded before",
    )
