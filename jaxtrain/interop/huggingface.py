"""Folders as transformers saves and loads them: config.json, model.safetensors, a tokenizer.

``AutoModelForMaskedLM.from_pretrained`` or ``AutoModelForCausalLM.from_pretrained``, and
``AutoTokenizer.from_pretrained``, load what :func:`write` writes; what they save is read here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import errors
from jaxtrain.errors import InputError, first_line
from jaxtrain.models import from_file
from jaxtrain.storage import atomic, tensor_files

SETTINGS = "config.json"
_SETTINGS_BYTES = 2**24  # the largest known have some 100 KB, of labels
_DESCRIBED, _TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_ARRAYS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PYTORCH = "pytorch_model.bin"
_WRITTEN = {SETTINGS, _DESCRIBED, _TOKENS, _ARRAYS, "tokenizer.json"}
_CAUSAL = "ForCausalLM"  # how architectures end whose tokenizers mark beginnings alone


def is_one(path: Path) -> bool:
    """Whether a path is such a folder; a run's directory has a config.json of another kind."""
    if not (path / SETTINGS).is_file():
        return False
    try:
        return "model_type" in atomic.read_json(path / SETTINGS, _SETTINGS_BYTES)
    except (OSError, ValueError):
        return False


def model(folder: Path) -> Any:
    """Our config of the model in a folder.

    Raises:
        InputError: no such model is known, or it differs from ours.
    """
    path = folder / SETTINGS
    try:
        content = atomic.read_json(path, _SETTINGS_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    kind = content.get("model_type")
    # The name is only compared with those of our own models: it chooses no module to import.
    known = {one.model_type: one for _, one in from_file.configs() if hasattr(one, "model_type")}
    if not isinstance(kind, str) or kind not in known:
        shown = errors.shown(kind)
        raise InputError(f"{path}: model_type is {shown}; known are: {', '.join(sorted(known))}")
    return known[kind].from_settings(content, str(path))


def tensors(folder: Path) -> tensor_files.Tensors:
    """All arrays of a folder, float32.

    Raises:
        InputError: there are none, or a file is damaged.
    """
    if (folder / _ARRAYS).is_file():  # as transformers, which looks at an index after it
        names = [_ARRAYS]
    elif (folder / _INDEX).is_file():
        names = _parts(folder / _INDEX)
    else:
        names = [_PYTORCH] if (folder / _PYTORCH).is_file() else []
    if not names:
        raise InputError(f"{folder}: neither {_ARRAYS} nor {_PYTORCH} is there")
    found: tensor_files.Tensors = {}
    for name in names:
        found |= tensor_files.read(folder / name)[0]
    return found


def _parts(index: Path) -> list[str]:
    """The files that an index names, all of them in its own folder.

    Raises:
        InputError: it names none, or others.
    """
    try:
        names = atomic.read_json(index).get("weight_map")
    except (OSError, ValueError) as error:
        raise InputError(f"{index} cannot be read: {first_line(error)}") from error
    if not isinstance(names, dict) or not names:
        raise InputError(f"{index} lists no files: its weight_map is not an object with names")
    for name in names.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.isprintable()
            or not name.endswith(tensor_files.SAFETENSORS)
        ):
            raise InputError(
                f"{index}: its weight_map names {errors.shown(name)}, and it may name "
                f"{tensor_files.SAFETENSORS} files of its own folder only"
            )
    return sorted(set(names.values()))


def check_target(folder: Path) -> None:
    """Refuses a folder that cannot be written to, or that holds something else.

    Raises:
        InputError: names what is in the way.
    """
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(there - _WRITTEN) if is_one(folder) else sorted(there)
    if others:
        raise InputError(f"{folder} holds other files, as {others[0]}: name a new folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a new folder")
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    atomic.check_writable("DIR", above / SETTINGS)


def write(folder: Path, model: Any, params: Mapping[str, np.ndarray], tokenizer: Any) -> int:
    """Writes a model and its tokenizer; each file appears whole, config.json last.

    Of a folder that is written again config.json goes first: without it, none is one.

    Args:
        folder: made if it is not there (:func:`check_target`).
        model: our config of it.
        params: dotted path -> float32 array.
        tokenizer: a ``tokenizers.Tokenizer``.

    Returns:
        How many numbers were written.

    Raises:
        InputError: the tokenizer has more words than the model, other padding, or lacks a special
            token.
    """
    from jaxtrain.data.text import tokenizer as tokenizers

    tokenizers.check_size(tokenizer, model.vocab_size, "the tokenizer")
    settings = model.to_settings()
    causal = settings["architectures"][0].endswith(_CAUSAL)
    ids = _special_ids(tokenizer, None if causal else model.pad_id)
    tokens = {f"{name}_token": tokenizer.id_to_token(number) for name, number in ids.items()}
    if causal:
        settings |= {"pad_token_id": None} | {f"{n}_token_id": number for n, number in ids.items()}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.sequence_length,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).unlink(missing_ok=True)
    tensors = getattr(model, "to_transformers", model.to_weights)(params)
    tensor_files.write(folder / _ARRAYS, tensors, {})
    atomic.write_whole(folder / tokenizers.NAME, tokenizer.to_str())
    for name, content in (
        (_DESCRIBED, described),
        (_TOKENS, tokens),
        (SETTINGS, settings),
    ):
        atomic.write_whole(folder / name, json.dumps(content, indent=2) + "\n")
    return sum(tensor.size for tensor in tensors.values())


def _special_ids(tokenizer: Any, pad_id: int | None) -> dict[str, int]:
    """Special tokens by what transformers calls them.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        pad_id: the model's padding; None for a causal model, in whose text only what begins a
            document is marked, and the next one ends it.
    """
    from jaxtrain.data.text import specials

    if pad_id is None:
        return dict.fromkeys(("bos", "eos"), specials.begin(tokenizer, "the tokenizer"))
    found = specials.find(tokenizer, "the tokenizer")
    specials.check_padding(found, pad_id, "the tokenizer")
    return {name: getattr(found, name) for name in ("pad", "unk", "cls", "sep", "mask")}
