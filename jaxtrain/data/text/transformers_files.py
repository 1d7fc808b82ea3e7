"""What a transformers folder has beside its weights and ``tokenizer.json``.

These are the ids of special tokens in config.json, such as that which begins a document, settings
of the tokenizer and of generation, and chat templates. A model that starts from such a folder keeps
them: an export has the same files, and each checkpoint has all of them in one file, :data:`NAME`.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain import errors
from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import atomic

NAME = "transformers.json"
SETTINGS = "config.json"
TOKENIZER = "tokenizer_config.json"
SPECIALS = "special_tokens_map.json"
_GENERATION = "generation_config.json"
FILES = (
    TOKENIZER,
    SPECIALS,
    "added_tokens.json",
    _GENERATION,
    "chat_template.json",
    "chat_template.jinja",
)
_IDS = "_token_id"  # suffix of the entries of config.json to keep
_MOST_BYTES = 2**24  # the largest known have some 100 KB


@dataclasses.dataclass(frozen=True)
class Kept:
    """Part of a transformers folder, as it was read.

    Attributes:
        ids: entries of config.json: each an id, several ids, or None.
        positions: ``max_position_embeddings`` of config.json.
        files: name, one of :data:`FILES` -> content.
    """

    ids: Mapping[str, Any]
    positions: Any
    files: Mapping[str, str]

    def to_json(self) -> str:
        """Returns the content of :data:`NAME`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @property
    def bos(self) -> int | None:
        """Returns the id that begins a document; None if the folder has none."""
        of_config = _listed(self.ids.get("bos_token_id"))
        return next(iter(of_config or _listed(self._generation.get("bos_token_id"))), None)

    @property
    def eos(self) -> tuple[int, ...]:
        """Returns the ids that end a document; transformers prefers generation_config.json."""
        of_generation = _listed(self._generation.get("eos_token_id"))
        return of_generation or _listed(self.ids.get("eos_token_id"))

    @functools.cached_property
    def _generation(self) -> dict[str, Any]:
        return dict(json.loads(self.files.get(_GENERATION, "{}")))


def beside(path: Path) -> Kept | None:
    """Reads what belongs to a ``tokenizer.json``; None if it is not from a transformers folder.

    Raises:
        InputError: a file that cannot be read, or ids that are not.
    """
    folder = path.parent
    if (folder / NAME).is_file():
        return _kept(folder / NAME, **_json(folder / NAME, _read(folder / NAME)))
    if not (folder / SETTINGS).is_file():
        return None
    try:
        config = atomic.parse_json(_read(folder / SETTINGS))
    except ValueError:
        return None
    if not isinstance(config, dict) or "model_type" not in config:  # of a run, or something else
        return None
    files = {name: _read(folder / name) for name in FILES if (folder / name).is_file()}
    ids = {name: value for name, value in config.items() if name.endswith(_IDS)}
    positions = config.get("max_position_embeddings")
    return _kept(folder / SETTINGS, ids=ids, positions=positions, files=files)


def _kept(path: Path, *, ids: dict[str, Any], positions: Any, files: dict[str, str]) -> Kept:
    kept = Kept(ids, positions, {name: files[name] for name in FILES if name in files})
    settings = {path: ids}
    for name, content in kept.files.items():
        if name.endswith(".json"):
            settings[path.with_name(name)] = _json(path.with_name(name), content)
    for file, entries in settings.items():
        for name, value in entries.items():
            if name.endswith(_IDS) and any(type(number) is not int for number in _listed(value)):
                raise InputError(f"{file}: {name}={errors.short_repr(value)}: use ids, or null")
    return kept


def _read(path: Path) -> str:
    try:
        return atomic.read_regular(path, _MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error


def _json(path: Path, content: str) -> dict[str, Any]:
    try:
        parsed = atomic.parse_json(content)
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{path} cannot be read: it is not a JSON object")
    return parsed


def _listed(value: Any) -> tuple[int, ...]:
    """Returns ids as transformers writes them: one, several, or None."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)
